"""python train.py config/mnist_daps.py config/short.py

Added to a run: a budget of 3,000 steps, with a learning rate suited to so few steps.
DAPS gains from config/ours.py at this budget or, with codes of 64 tokens, from config/ours_64.py.
For other data sets, also add --batch_size=32 --beta_init=0.5 --eval_examples=1000 and a
learning rate: --lr=4e-3 for DAPS with config/ours_64.py; those of other methods are in
experiments/cifar10.sh.
Paper: nothing this short, and nothing at this learning rate.
Hardware: two CPU cores; about 8 minutes with config/mnist_daps.py, 3 with config/mnist_daps_na.py.
"""

max_steps = 3000
lr = 6e-3
lr_final = 0.0  # a cosine, down to zero
eval_interval = 500
log_interval = 10
