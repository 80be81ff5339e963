"""MNIST in 64 bits: straight-through Gumbel-Softmax, one pass.

    python train.py config/mnist_gumbel_na.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU; add config/short.py for 3,000 steps on two CPU cores.
Expect: the paper has a validation beta-ELBO of -47.09 and a PSNR of 18.21 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "gumbel_na"
out_dir = "out/mnist_gumbel_na"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 2
mlp_ratio = 6
tau_init = 1.0
tau_final = 0.1
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
