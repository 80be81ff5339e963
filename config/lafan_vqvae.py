"""python train.py config/lafan_vqvae.py

LAFAN1 motion, a second in 640 bits: VQ-VAE, code vectors by running means.
Paper: validation PSNR 31.04 dB (Table 1, mean of 10 seeds), with commitment 0.5, lr 3e-4 (Table 6).
Ours: running means, k-means start and revival of code vectors, which the paper does not mention.
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "vqvae"
n_layers = 6
commitment = 0.5
