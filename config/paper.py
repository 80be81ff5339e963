"""python train.py config/mnist_daps.py config/paper.py --out_dir=out/mnist_daps_paper

Added to another config: Algorithm 1 as printed, with weights that are not centred, a gradient step
on eta, plain queries, logits from their own table, one weight per code, no splitting of values, a
random start, one learning rate, and for VQ-VAE a codebook trained by gradient.
tests/test_paper.py compares a step of it with a transcription of Algorithm 1.
"""

eta_update = "gradient"
centred = False
aligned = False
tied = False
credit_window = 0
split_interval = 0
kmeans_start = False
encoder_lr = 1.0
scale_lr = 0.0
vq_ema = False
ppo_epochs = 1
