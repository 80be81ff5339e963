"""python train.py config/mnist_gaussian.py

MNIST in 64 bits: Gaussian VAE with two float32 numbers.
Paper: mentioned as a weak baseline, without results or hyperparameters.
Ours: network of VQ-VAE, beta and lr of DAPS.
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "gaussian"
n_layers = 2
mlp_ratio = 7
