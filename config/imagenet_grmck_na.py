"""torchrun --nproc_per_node=2 train.py config/imagenet_grmck_na.py

ImageNet, 256 x 256, in 10,240 bits: Gumbel-Rao, one pass.
Paper: validation beta-ELBO 21.4k, PSNR 21.85 dB, FID 99.15 (Table 1, mean of 5 seeds), with
temperature 1 to 0.1, 10 Monte Carlo samples, beta 10 to 1, lr 3e-4 (Table 3).
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
method = "grmck_na"
n_layers = 6
tau_final = 0.1
mc_samples = 10
beta_init = 10.0
beta_final = 1.0
