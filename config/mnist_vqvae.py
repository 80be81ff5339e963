"""python train.py config/mnist_vqvae.py

MNIST in 64 bits: VQ-VAE, code vectors by running means.
Paper: validation PSNR 18.45 dB (Table 1, mean of 10 seeds), with commitment 0.25, lr 3e-4
(Table 5).
Ours: running means, k-means start and revival of code vectors, which the paper does not mention.
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "vqvae"
n_layers = 2
mlp_ratio = 7
