"""ImageNet, 256 x 256, in 10,240 bits: autoregressive DAPS.

    torchrun --nproc_per_node=2 train.py config/imagenet_daps.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation beta-ELBO of 87.0k, a PSNR of 24.66 dB and an FID of 48.65.
"""

dataset = "imagenet"
method = "daps"
out_dir = "out/imagenet_daps"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 2
mlp_ratio = 4
aligned = False
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
