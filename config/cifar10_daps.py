"""python train.py config/cifar10_daps.py

CIFAR-10 in 576 bits: autoregressive DAPS.
Paper: validation beta-ELBO 1185.51, PSNR 25.21 dB, FID 157.27 (Table 1, mean of 10 seeds; for FID
see cifar10.py), with K = 8, ESS target 0.33, beta 6 to 0.01, lr 3e-4 (Table 4).
Method, K and ESS target are train.py's defaults.
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
beta_init = 6.0
