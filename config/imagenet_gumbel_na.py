"""torchrun --nproc_per_node=2 train.py config/imagenet_gumbel_na.py

ImageNet, 256 x 256, in 10,240 bits: straight-through Gumbel-Softmax, one pass.
Paper: validation beta-ELBO 85.2k, PSNR 24.49 dB, FID 51.66 (Table 1, mean of 5 seeds), with
temperature 1 to 0.1, beta 50 to 1, lr 3e-4 (Table 3).
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
method = "gumbel_na"
n_layers = 6
tau_final = 0.1
beta_init = 50.0
beta_final = 1.0
