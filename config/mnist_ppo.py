"""python train.py config/mnist_ppo.py

MNIST in 64 bits: PPO.
Paper: validation beta-ELBO -104.66, PSNR 14.56 dB (Table 1, mean of 10 seeds), but no
hyperparameters.
Ours: network, K, beta and lr of DAPS; 4 updates per batch, clip 0.2 (train.py's defaults; the
authors' code: one sample, one update, a KL penalty).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "ppo"
