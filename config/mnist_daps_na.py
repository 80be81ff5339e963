"""python train.py config/mnist_daps_na.py

MNIST in 64 bits: DAPS, one pass.
Paper: validation beta-ELBO -46.96, PSNR 18.36 dB (Table 1, mean of 10 seeds), with K = 8, ESS
target 0.5, beta 0.5 to 0.01, lr 3e-4 (Table 5).
Hardware: one GPU (paper: an RTX 3090). On two CPU cores a step takes 0.04 to 0.07 s, 250,000
steps 3 to 5 hours; add config/short.py for 3,000 steps.
"""

base = "mnist.py"
method = "daps_na"
n_layers = 2
mlp_ratio = 6
ess_target = 0.5
