"""python train.py config/mnist_daps.py config/paper.py --out_dir=out/mnist_daps_paper

Added to another config: Algorithm 1 as printed, with weights that are not centred and a gradient
step on eta, and for VQ-VAE a codebook trained by gradient.
tests/test_paper.py compares a step of it with a transcription of Algorithm 1.
"""

eta_update = "gradient"
centred = False
vq_ema = False
