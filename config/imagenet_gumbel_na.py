"""ImageNet, 256 x 256, in 10,240 bits: straight-through Gumbel-Softmax, one pass.

    torchrun --nproc_per_node=2 train.py config/imagenet_gumbel_na.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation beta-ELBO of 85.2k, a PSNR of 24.49 dB and an FID of 51.66.
"""

dataset = "imagenet"
method = "gumbel_na"
out_dir = "out/imagenet_gumbel_na"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
tau_init = 1.0
tau_final = 0.1
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
