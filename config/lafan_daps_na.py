"""python train.py config/lafan_daps_na.py

LAFAN1 motion, a second in 640 bits: DAPS, one pass.
Paper: validation beta-ELBO -1050.25, PSNR 32.90 dB (Table 1, mean of 10 seeds), with K = 16, ESS
target 0.33, beta 1 to 0.01, lr 3e-4 (Table 6). With K = 8: -1067 and 32.50 dB.
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "daps_na"
n_layers = 6
n_samples = 16
beta_init = 1.0
