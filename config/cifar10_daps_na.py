"""python train.py config/cifar10_daps_na.py

CIFAR-10 in 576 bits: DAPS, one pass.
Paper: validation beta-ELBO 977.39, PSNR 25.02 dB, FID 156.33 (Table 1, mean of 10 seeds; for FID
see cifar10.py), with K = 8, ESS target 0.33, beta 6 to 0.01, lr 3e-4 (Table 4).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "daps_na"
n_layers = 4
mlp_ratio = 6
beta_init = 6.0
