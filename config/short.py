"""A budget for two CPU cores, on top of another config: 3,000 steps instead of 250,000.

    python train.py config/mnist_daps.py config/short.py --out_dir=out/mnist_short

Hardware: two CPU cores, about 8 minutes with config/mnist_daps.py, 3 with config/mnist_daps_na.py;
with configs of other data sets, add --batch_size=32 --lr=2e-3 --eval_examples=1000.
Expect: the tables in the README.
"""

max_steps = 3000
lr = 6e-3
lr_schedule = "cosine"
warmup_steps = 50
aligned = True
eval_interval = 500
log_interval = 10
