"""torchrun --nproc_per_node=2 train.py config/imagenet_daps.py

ImageNet, 256 x 256, in 10,240 bits: autoregressive DAPS.
Paper: validation beta-ELBO 87.0k, PSNR 24.66 dB, FID 48.65 (Table 1, mean of 5 seeds), with K = 8,
ESS target 0.25, beta 50 to 1, lr 3e-4 (Table 3).
Method and K are train.py's defaults.
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
ess_target = 0.25
beta_init = 50.0
beta_final = 1.0
