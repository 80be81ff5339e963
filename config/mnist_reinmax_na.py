"""python train.py config/mnist_reinmax_na.py

MNIST in 64 bits: ReinMax, one pass.
Paper: not included.
Ours: network, beta and lr of Gumbel-NA, temperature 1 throughout.
Hardware: one GPU; on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "reinmax_na"
n_layers = 2
mlp_ratio = 6
