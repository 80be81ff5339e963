"""ImageNet, 256 x 256, in 10,240 bits: VQ-VAE, code vectors by running means.

    torchrun --nproc_per_node=2 train.py config/imagenet_vqvae.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation PSNR of 23.83 dB and an FID of 65.01.
"""

dataset = "imagenet"
method = "vqvae"
out_dir = "out/imagenet_vqvae"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
commitment = 0.25
vq_ema = True
max_steps = 300_000
batch_size = 64
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
grad_clip = 0.0
eval_interval = 2000
eval_examples = 2000
log_interval = 100
