"""python train.py config/cifar10_daps_na.py config/ours_64.py

config/ours.py with another cure for values that drop out, for codes of 64 tokens. Values start as
clusters of what the encoder sees, and the encoder learns slowly: noise in the rewards of so many
tokens would undo this start. Only its confidence, a single number, is learned fast.
With config/short.py, also add, for DAPS, --batch_size=32 --lr=4e-3 --beta_init=0.5
--eval_examples=1000. Each cure loses clearly where the other wins: docs/trials.md has both.
"""

base = "ours.py"
split_interval = 0
kmeans_start = True
encoder_lr = 0.1
scale_lr = 3.0
