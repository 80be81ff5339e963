"""python train.py config/mnist_grmck_na.py

MNIST in 64 bits: Gumbel-Rao, one pass.
Paper: validation beta-ELBO -68.52, PSNR 16.22 dB (Table 1, mean of 10 seeds), with temperature 1 to
0.1, 100 Monte Carlo samples, beta 0.5 to 0.01, lr 3e-4 (Table 5).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "grmck_na"
n_layers = 2
mlp_ratio = 6
tau_final = 0.1
