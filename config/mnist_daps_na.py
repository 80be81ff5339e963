"""MNIST in 64 bits: one-pass DAPS (DAPS-NA) with the paper's sizes, steps and schedules.

    python train.py config/mnist_daps_na.py

Hardware: made for one GPU. On two CPU cores a step takes 0.07 s, 250,000 steps 5 hours;
add config/short.py for 3,000 steps.
Expect: the paper has a validation beta-ELBO of -46.96 and a PSNR of 18.36 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "daps_na"
out_dir = "out/mnist_daps_na"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 2
mlp_ratio = 6
n_samples = 8
ess_target = 0.5
beta_init = 0.5
beta_final = 0.01
max_steps = 250_000
batch_size = 256
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
eval_interval = 1000
log_interval = 100
