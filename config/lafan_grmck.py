"""python train.py config/lafan_grmck.py

LAFAN1 motion, a second in 640 bits: Gumbel-Rao, autoregressive.
Paper: validation beta-ELBO -1008.12, PSNR 34.11 dB (Table 1, mean of 10 seeds), with temperature 1,
10 Monte Carlo samples, beta 2 to 0.01, lr 1e-4 to 1e-5 (Table 6).
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "grmck"
mc_samples = 10
beta_init = 2.0
lr = 1e-4
lr_final = 0.1  # of lr
