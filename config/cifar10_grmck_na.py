"""python train.py config/cifar10_grmck_na.py

CIFAR-10 in 576 bits: Gumbel-Rao, one pass.
Paper: validation beta-ELBO 61.96, PSNR 22.71 dB, FID 172.65 (Table 1, mean of 10 seeds; for FID see
cifar10.py), with temperature 1 to 0.1, 100 Monte Carlo samples, beta 3 to 0.01, lr 3e-4 (Table 4).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "grmck_na"
n_layers = 4
mlp_ratio = 6
tau_final = 0.1
beta_init = 3.0
