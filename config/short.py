"""A budget for two CPU cores, on top of any other config: 3,000 steps instead of 250,000.

python train.py config/mnist_daps.py config/short.py --out_dir=out/mnist_daps_short
"""

max_steps = 3000
lr = 6e-3
lr_schedule = "cosine"
warmup_steps = 50
aligned = True
eval_interval = 500
log_interval = 10
