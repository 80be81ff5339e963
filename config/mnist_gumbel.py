"""python train.py config/mnist_gumbel.py

MNIST in 64 bits: straight-through Gumbel-Softmax, autoregressive.
Paper: validation beta-ELBO -68.07, PSNR 16.30 dB (Table 1, mean of 10 seeds), with temperature 1,
beta 0.5 to 0.01, lr 3e-4 (Table 5).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "gumbel"
