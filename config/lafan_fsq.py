"""python train.py config/lafan_fsq.py

LAFAN1 motion, a second in 640 bits: finite scalar quantisation.
Paper: validation PSNR 36.19 dB (Table 1, mean of 10 seeds), with lr 3e-4 (Table 6).
Ours: levels 8 * 8 * 4 * 4 = 1,024 (the paper gives none), no commitment loss (0.25 in the paper's
table). Also 7 layers instead of the paper's 6: FSQ has no embedding table in its decoder, and would
be 8 % smaller than DAPS with 6 layers; with 7 it is 4 % larger.
Hardware: one GPU (paper: a 40 GB A100).
"""

base = "lafan.py"
method = "fsq"
n_layers = 7
fsq_levels = "8 8 4 4"
