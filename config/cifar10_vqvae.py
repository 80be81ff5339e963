"""python train.py config/cifar10_vqvae.py

CIFAR-10 in 576 bits: VQ-VAE, code vectors by running means.
Paper: validation PSNR 24.19 dB, FID 164.30 (Table 1, mean of 10 seeds; for FID see cifar10.py),
with commitment 0.25, lr 3e-4 (Table 4).
Ours: running means, k-means start and revival of code vectors, which the paper does not mention.
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "vqvae"
n_layers = 4
mlp_ratio = 6
