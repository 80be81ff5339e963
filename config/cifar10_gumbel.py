"""python train.py config/cifar10_gumbel.py

CIFAR-10 in 576 bits: straight-through Gumbel-Softmax, autoregressive.
Paper: validation beta-ELBO 704.92, PSNR 23.74 dB, FID 169.87 (Table 1, mean of 10 seeds; for FID
see cifar10.py), with temperature 1, beta 6 to 0.01, lr 1e-4 to 1e-5 (Table 4).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "gumbel"
beta_init = 6.0
lr = 1e-4
lr_final = 0.1  # of lr
