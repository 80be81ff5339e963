"""python train.py config/lafan_daps.py

LAFAN1 motion, a second in 640 bits: autoregressive DAPS.
Paper: validation beta-ELBO -949.78, PSNR 36.81 dB (Table 1, mean of 10 seeds), with K = 16, ESS
target 0.33, beta 2 to 0.01, lr 3e-4 (Table 6). With K = 8: -985 and 35.19 dB.
Method and ESS target are train.py's defaults.
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
n_samples = 16
beta_init = 2.0
