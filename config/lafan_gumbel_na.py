"""LAFAN1 motion, a second in 640 bits: straight-through Gumbel-Softmax, one pass.

    python train.py config/lafan_gumbel_na.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation beta-ELBO of -1400.05 and a PSNR of 27.89 dB (mean of 10 seeds).
"""

dataset = "lafan"
method = "gumbel_na"
out_dir = "out/lafan_gumbel_na"
n_tokens = 64
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 6
mlp_ratio = 4
decoder_layers = 2
tau_init = 1.0
tau_final = 0.75
beta_init = 3.0
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
