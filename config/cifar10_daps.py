"""CIFAR-10 in 576 bits: autoregressive DAPS.

    python train.py config/cifar10_daps.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation beta-ELBO of 1185.51, a PSNR of 25.21 dB and an FID of 157.27
(to statistics of ImageNet-64, where ours is to the validation images: they do not compare).
"""

dataset = "cifar10"
method = "daps"
out_dir = "out/cifar10_daps"
n_tokens = 64
vocab_size = 512
width = 128
n_heads = 4
n_layers = 2
mlp_ratio = 4
aligned = False
n_samples = 8
ess_target = 0.33
beta_init = 6.0
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
