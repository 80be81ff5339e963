"""torchrun --nproc_per_node=2 train.py config/imagenet_daps_na.py

ImageNet, 256 x 256, in 10,240 bits: DAPS, one pass.
Paper: validation beta-ELBO 78.8k, PSNR 24.40 dB, FID 57.43 (Table 1, mean of 5 seeds), with ESS
target 0.25, beta 50 to 1, lr 3e-4 (Table 3). K is not given; ours is 8, as for DAPS.
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
method = "daps_na"
n_layers = 6
ess_target = 0.25
beta_init = 50.0
beta_final = 1.0
