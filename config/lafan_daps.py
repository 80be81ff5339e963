"""LAFAN1 motion, a second in 640 bits: autoregressive DAPS.

    python train.py config/lafan_daps.py

The paper's sizes, steps and schedules.
Hardware: made for one GPU.
Expect: the paper has a validation beta-ELBO of -949.78 and a PSNR of 36.81 dB (mean of 10 seeds).
"""

dataset = "lafan"
method = "daps"
out_dir = "out/lafan_daps"
n_tokens = 64
vocab_size = 1024
width = 128
n_heads = 4
n_layers = 2
mlp_ratio = 4
decoder_layers = 2
aligned = False
n_samples = 16
ess_target = 0.33
beta_init = 2.0
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
