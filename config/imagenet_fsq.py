"""ImageNet, 256 x 256, in 10,240 bits: finite scalar quantisation.

    torchrun --nproc_per_node=2 train.py config/imagenet_fsq.py

The paper's sizes, steps and schedules, but for mlp_ratio, 5 instead of 4: FSQ has no table of
embeddings in its decoder, and would be 8 % smaller than the other models.
Hardware: made for two GPUs.
Expect: the paper has a validation PSNR of 24.24 dB and an FID of 54.54.
"""

dataset = "imagenet"
method = "fsq"
out_dir = "out/imagenet_fsq"
n_tokens = 1024
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 5
fsq_levels = "8 8 4 4"
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
