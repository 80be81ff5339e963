"""python train.py config/mnist_fsq.py

MNIST in 64 bits: finite scalar quantisation.
Paper: validation PSNR 18.42 dB (Table 1, mean of 10 seeds), with lr 3e-4 (Table 5).
Ours: levels 8 * 8 * 4 = 256 (the paper gives none), no commitment loss (0.25 in the paper's table).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "fsq"
n_layers = 2
mlp_ratio = 7
