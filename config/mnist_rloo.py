"""python train.py config/mnist_rloo.py

MNIST in 64 bits: REINFORCE with leave-one-out baseline, autoregressive.
Paper: does not have it.
Ours: network, K, beta and lr of DAPS.
Hardware: one GPU; on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "rloo"
