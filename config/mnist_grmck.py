"""python train.py config/mnist_grmck.py

MNIST in 64 bits: Gumbel-Rao, autoregressive.
Paper: validation beta-ELBO -62.25, PSNR 16.78 dB (Table 1, mean of 10 seeds), with temperature 1 to
0.75, 100 Monte Carlo samples, beta 0.5 to 0.01, lr 3e-4 (Table 5).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "grmck"
tau_final = 0.75
