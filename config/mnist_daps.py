"""MNIST in 64 bits: autoregressive DAPS with the paper's sizes, steps and schedules.

    python train.py config/mnist_daps.py

Hardware: made for one GPU. On two CPU cores a step takes 0.13 s, 250,000 steps 9 hours;
add config/short.py for 3,000 steps.
Expect: the paper has a validation beta-ELBO of -46.54 and a PSNR of 18.23 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "daps"
out_dir = "out/mnist_daps"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 1
mlp_ratio = 4
aligned = False
n_samples = 8
ess_target = 0.33
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
