"""MNIST in 64 bits: PPO.

    python train.py config/mnist_ppo.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU; add config/short.py for 3,000 steps on two CPU cores.
Expect: the paper has a validation beta-ELBO of -104.66 and a PSNR of 14.56 dB (mean of 10 seeds).
"""

dataset = "mnist"
method = "ppo"
out_dir = "out/mnist_ppo"
n_tokens = 8
vocab_size = 256
width = 64
n_heads = 4
n_layers = 1
mlp_ratio = 4
aligned = False
n_samples = 8
ppo_epochs = 4
ppo_clip = 0.2
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
