"""ImageNet, 256 x 256, in 10,240 bits: DAPS, one pass.

    torchrun --nproc_per_node=2 train.py config/imagenet_daps_na.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation beta-ELBO of 78.8k, a PSNR of 24.40 dB and an FID of 57.43.
"""

dataset = "imagenet"
method = "daps_na"
out_dir = "out/imagenet_daps_na"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
n_samples = 8
ess_target = 0.25
beta_init = 50.0
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
