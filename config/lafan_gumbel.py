"""python train.py config/lafan_gumbel.py

LAFAN1 motion, a second in 640 bits: straight-through Gumbel-Softmax, autoregressive.
Paper: validation beta-ELBO -998.49, PSNR 34.51 dB (Table 1, mean of 10 seeds), with temperature 1,
beta 2 to 0.01, lr 1e-4 to 1e-5 (Table 6).
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "gumbel"
beta_init = 2.0
lr = 1e-4
lr_final = 0.1  # of lr
