"""torchrun --nproc_per_node=2 train.py config/imagenet_vqvae.py

ImageNet, 256 x 256, in 10,240 bits: VQ-VAE, code vectors by running means.
Paper: validation PSNR 23.83 dB, FID 65.01 (Table 1, mean of 5 seeds), with commitment 0.25, lr 3e-4
(Table 3).
Ours: running means, k-means start and revival of code vectors, which the paper does not mention.
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
method = "vqvae"
n_layers = 6
