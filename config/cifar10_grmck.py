"""CIFAR-10 in 576 bits: Gumbel-Rao, autoregressive.

    python train.py config/cifar10_grmck.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation beta-ELBO of 217.45, a PSNR of 22.69 dB and an FID of 179.88
(to statistics of ImageNet-64, where ours is to the validation images: they do not compare).
"""

dataset = "cifar10"
method = "grmck"
out_dir = "out/cifar10_grmck"
n_tokens = 64
vocab_size = 512
width = 128
n_heads = 4
n_layers = 2
mlp_ratio = 4
aligned = False
tau_init = 1.0
tau_final = 0.75
mc_samples = 100
beta_init = 3.0
beta_final = 0.01
max_steps = 250_000
batch_size = 256
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
grad_clip = 0.0
eval_interval = 1000
log_interval = 100
