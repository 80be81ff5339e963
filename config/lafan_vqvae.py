"""LAFAN1 motion, a second in 640 bits: VQ-VAE, code vectors by running means.

    python train.py config/lafan_vqvae.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation PSNR of 31.04 dB (mean of 10 seeds).
"""

dataset = "lafan"
method = "vqvae"
out_dir = "out/lafan_vqvae"
n_tokens = 64
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
decoder_layers = 2
commitment = 0.5
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
