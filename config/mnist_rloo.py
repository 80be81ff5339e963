"""python train.py config/mnist_rloo.py

MNIST in 64 bits: REINFORCE with leave-one-out baseline, autoregressive.
Paper: not included.
Ours: network, K, beta and lr of DAPS.
Hardware: one GPU; on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "rloo"
