"""python train.py config/mnist_ppo.py

MNIST in 64 bits: PPO.
Paper: validation beta-ELBO -104.66, PSNR 14.56 dB (Table 1, mean of 10 seeds), but no
hyperparameters.
Ours: network, K, beta and lr of DAPS; one update per batch, as for all methods (--ppo_epochs=4
for four), clip 0.2 (the authors' code: one sample, one update, a KL penalty).
Hardware: one GPU (paper: an RTX 3090); on two CPU cores, add config/short.py.
"""

base = "mnist.py"
method = "ppo"
