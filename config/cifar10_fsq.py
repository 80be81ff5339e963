"""python train.py config/cifar10_fsq.py

CIFAR-10 in 576 bits: finite scalar quantisation.
Paper: validation PSNR 24.19 dB, FID 163.00 (Table 1, mean of 10 seeds; for FID see cifar10.py),
with lr 3e-4 (Table 4).
Ours: levels 8 * 8 * 8 = 512 (the paper gives none), no commitment loss (0.25 in the paper's table).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "fsq"
n_layers = 4
mlp_ratio = 6
fsq_levels = "8 8 8"
