"""MNIST in 64 bits: finite scalar quantisation.

    python train.py config/mnist_fsq.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU; add config/short.py for 3,000 steps on two CPU cores.
Expect: the paper has a validation PSNR of 18.42 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "fsq"
out_dir = "out/mnist_fsq"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 2
mlp_ratio = 7
fsq_levels = "8 8 4"
max_steps = 250_000
batch_size = 256
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
eval_interval = 1000
log_interval = 100
