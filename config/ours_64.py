"""python train.py config/cifar10_daps_na.py config/ours_64.py

Added to another config instead of config/ours.py: our changes to the paper for codes of 64 tokens.
The encoder starts with a meaningful code and learns slowly, so that the noise in the rewards of so
many tokens does not undo it. Only its confidence, a single number, is learned fast. Values then
need neither copies nor ties to the decoder's vectors. With config/short.py, also add, for DAPS,
--batch_size=32 --lr=4e-3 --beta_init=0.5 --eval_examples=1000.
"""

base = "ours.py"
tied = False
split_interval = 0
kmeans_start = True
encoder_lr = 0.1
scale_lr = 3.0
