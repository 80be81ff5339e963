"""ImageNet, 256 x 256, in 10,240 bits: Gumbel-Rao, one pass.

    torchrun --nproc_per_node=2 train.py config/imagenet_grmck_na.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation beta-ELBO of 21.4k, a PSNR of 21.85 dB and an FID of 99.15.
"""

dataset = "imagenet"
method = "grmck_na"
out_dir = "out/imagenet_grmck_na"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
tau_init = 1.0
tau_final = 0.1
mc_samples = 10
beta_init = 10.0
beta_final = 1.0
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
