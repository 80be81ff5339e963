"""python train.py config/cifar10_ppo.py

CIFAR-10 in 576 bits: PPO.
Paper: validation beta-ELBO 416.31, PSNR 23.30 dB, FID 176.29 (Table 1, mean of 10 seeds; for FID
see cifar10.py), but no hyperparameters.
Ours: network, K, beta and lr of DAPS; one update per batch, as for all methods (--ppo_epochs=4
for four), clip 0.2 (the authors' code: one sample, one update, a KL penalty).
Hardware: one GPU (paper: an RTX 3090).
"""

base = "cifar10.py"
method = "ppo"
beta_init = 6.0
