"""torchrun --nproc_per_node=2 train.py config/imagenet_fsq.py

ImageNet, 256 x 256, in 10,240 bits: finite scalar quantisation.
Paper: validation PSNR 24.24 dB, FID 54.54 (Table 1, mean of 5 seeds), with lr 3e-4 (Table 3).
Ours: levels 8 * 8 * 4 * 4 = 1,024 (the paper gives none), no commitment loss (0.25 in the paper's
table). Also mlp_ratio 5 instead of the paper's 4: FSQ has no embedding table in its decoder, and
would otherwise be 8 % smaller than DAPS.
Hardware: two GPUs (paper: 80 GB A100s).
"""

base = "imagenet.py"
method = "fsq"
n_layers = 6
mlp_ratio = 5
fsq_levels = "8 8 4 4"
