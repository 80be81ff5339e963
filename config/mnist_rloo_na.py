"""python train.py config/mnist_rloo_na.py

MNIST in 64 bits: REINFORCE with leave-one-out baseline, one pass.
Paper: not included.
Ours: network, K, beta and lr of DAPS-NA.
Hardware: one GPU; on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "rloo_na"
n_layers = 2
mlp_ratio = 6
