"""torchrun --nproc_per_node=2 train.py config/imagenet_grmck.py

ImageNet, 256 x 256, in 10,240 bits: Gumbel-Rao, autoregressive.
Paper: validation beta-ELBO 60.7k, PSNR 23.01 dB, FID 73.21 (Table 1, mean of 5 seeds), with
temperature 1 to 0.75, 10 Monte Carlo samples, beta 10 to 1, lr 1e-4 (Table 3).
Hardware: two GPUs (paper: 80 GB A100s). Memory grows with the square of the number of tokens
(docs/speed.md, Memory); --accumulate=4 processes a quarter of a batch at a time.
"""

base = "imagenet.py"
method = "grmck"
tau_final = 0.75
mc_samples = 10
beta_init = 10.0
beta_final = 1.0
lr = 1e-4
