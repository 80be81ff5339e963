"""ImageNet, 256 x 256, in 10,240 bits: Gumbel-Rao, autoregressive.

    torchrun --nproc_per_node=2 train.py config/imagenet_grmck.py

The paper's sizes, steps and schedules.
Hardware: made for two GPUs.
Expect: the paper has a validation beta-ELBO of 60.7k, a PSNR of 23.01 dB and an FID of 73.21.
"""

dataset = "imagenet"
method = "grmck"
out_dir = "out/imagenet_grmck"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 2
mlp_ratio = 4
aligned = False
tau_init = 1.0
tau_final = 0.75
mc_samples = 10
beta_init = 10.0
beta_final = 1.0
max_steps = 300_000
batch_size = 64
lr = 1e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
grad_clip = 0.0
eval_interval = 2000
eval_examples = 2000
log_interval = 100
