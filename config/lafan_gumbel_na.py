"""python train.py config/lafan_gumbel_na.py

LAFAN1 motion, a second in 640 bits: straight-through Gumbel-Softmax, one pass.
Paper: validation beta-ELBO -1400.05, PSNR 27.89 dB (Table 1, mean of 10 seeds), with temperature 1
to 0.75, beta 3 to 0.01, lr 3e-4 (Table 6).
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "gumbel_na"
n_layers = 6
tau_final = 0.75
beta_init = 3.0
