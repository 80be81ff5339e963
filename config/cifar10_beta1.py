"""CIFAR-10 with beta down to 1 instead of 0.01, on top of another config (paper: second table).

    python train.py config/cifar10_daps.py config/cifar10_beta1.py --out_dir=out/cifar10_beta1

The paper also changes, as --key=value: for Gumbel-Rao in one pass tau_final to 0.75, for Gumbel
tau_final to 0.75, lr to 3e-4 and lr_final to 3e-5.
Hardware: as the config before it.
Expect: the paper has 857.77 (DAPS), 585.02 (DAPS-NA), -211.33 (GR-MCK), -780.04 (GR-MCK-NA),
405.18 (Gumbel), 394.19 (Gumbel-NA).
"""

beta_final = 1.0
