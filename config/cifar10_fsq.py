"""CIFAR-10 in 576 bits: finite scalar quantisation.

    python train.py config/cifar10_fsq.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation PSNR of 24.19 dB and an FID of 163.00
(to statistics of ImageNet-64, where ours is to the validation images: they do not compare).
"""

dataset = "cifar10"
method = "fsq"
out_dir = "out/cifar10_fsq"
n_tokens = 64
vocab_size = 512
width = 128
n_heads = 4
n_layers = 4
mlp_ratio = 6
fsq_levels = "8 8 8"
max_steps = 250_000
batch_size = 256
lr = 3e-4
lr_schedule = "constant"
warmup_steps = 0
weight_decay = 1e-4
grad_clip = 0.0
eval_interval = 1000
log_interval = 100
