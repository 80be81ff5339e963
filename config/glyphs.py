"""python train.py

What `python train.py` reads when it is given no config file: autoregressive DAPS on glyphs in 64
bits, with our changes for short budgets. Three to six minutes on two CPU cores.
"""

base = "ours.py"
dataset = "glyphs"
max_steps = 2000
batch_size = 128
lr = 6e-3
lr_final = 0.0  # a cosine, down to zero
eval_interval = 250
log_interval = 10
