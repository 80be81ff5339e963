"""python train.py config/lafan_grmck_na.py

LAFAN1 motion, a second in 640 bits: Gumbel-Rao, one pass.
Paper: validation beta-ELBO -1530.51, PSNR 26.93 dB (Table 1, mean of 10 seeds), with temperature 1,
10 Monte Carlo samples, beta 1 to 0.01, lr 3e-4 (Table 6).
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "grmck_na"
n_layers = 6
mc_samples = 10
beta_init = 1.0
