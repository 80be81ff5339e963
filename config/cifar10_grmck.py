"""python train.py config/cifar10_grmck.py

CIFAR-10 in 576 bits: Gumbel-Rao, autoregressive.
Paper: validation beta-ELBO 217.45, PSNR 22.69 dB, FID 179.88 (Table 1, mean of 10 seeds; for FID
see cifar10.py), with temperature 1 to 0.75, 100 Monte Carlo samples, beta 3 to 0.01, lr 3e-4
(Table 4).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "grmck"
tau_final = 0.75
beta_init = 3.0
