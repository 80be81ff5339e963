"""MNIST in 64 bits: Gumbel-Rao, autoregressive.

    python train.py config/mnist_grmck.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU; add config/short.py for 3,000 steps on two CPU cores.
Expect: the paper has a validation beta-ELBO of -62.25 and a PSNR of 16.78 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "grmck"
out_dir = "out/mnist_grmck"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 1
mlp_ratio = 4
aligned = False
tau_init = 1.0
tau_final = 0.75
mc_samples = 100
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
