"""python train.py config/cifar10_gumbel_na.py

CIFAR-10 in 576 bits: straight-through Gumbel-Softmax, one pass.
Paper: validation beta-ELBO 785.35, PSNR 24.27 dB, FID 162.04 (Table 1, mean of 10 seeds; for FID
see cifar10.py), with temperature 1 to 0.1, beta 6 to 0.01, lr 3e-4 (Table 4).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "gumbel_na"
n_layers = 4
mlp_ratio = 6
tau_final = 0.1
beta_init = 6.0
