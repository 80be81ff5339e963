"""CIFAR-10 in 576 bits: VQ-VAE, code vectors by running means.

    python train.py config/cifar10_vqvae.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation PSNR of 24.19 dB and an FID of 164.30
(to statistics of ImageNet-64, where ours is to the validation images: they do not compare).
"""

dataset = "cifar10"
method = "vqvae"
out_dir = "out/cifar10_vqvae"
n_tokens = 64
vocab_size = 512
width = 128
n_heads = 4
n_layers = 4
mlp_ratio = 6
commitment = 0.25
vq_ema = True
max_steps = 250_000
batch_size = 256
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
grad_clip = 0.0
eval_interval = 1000
log_interval = 100
