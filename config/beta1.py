"""The plain ELBO, beta = 1 from first to last, on top of another config (the paper's second table).

    python train.py config/mnist_daps.py config/beta1.py --ess_target=0.75 --out_dir=out/mnist_beta1

Hardware: as the config before it.
Expect: the paper has -80.64 (DAPS, ess_target 0.75), -86.00 (DAPS-NA, 0.5), -93.72 (Gumbel,
tau_final 0.75), -80.80 (Gumbel-NA, 0.1), -101.86 (GR-MCK, 0.75), -114.61 (GR-MCK-NA, 0.75).
"""

beta_init = 1.0
beta_final = 1.0
