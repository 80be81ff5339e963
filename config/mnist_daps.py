"""python train.py config/mnist_daps.py

MNIST in 64 bits: autoregressive DAPS.
Paper: validation beta-ELBO -46.54, PSNR 18.23 dB (Table 1, mean of 10 seeds), with K = 8, ESS
target 0.33, beta 0.5 to 0.01, lr 3e-4 (Table 5).
Method, K, ESS target and beta are train.py's defaults.
Hardware: one GPU (paper: an RTX 3090). On two CPU cores a step takes 0.13 s, 250,000 steps 9 hours;
add config/short.py for 3,000 steps.
"""

base = "mnist.py"
