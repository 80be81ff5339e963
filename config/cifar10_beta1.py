"""python train.py config/cifar10_daps.py config/cifar10_beta1.py --out_dir=out/cifar10_beta1

Added to a run on CIFAR-10: beta goes down to 1 instead of 0.01.
Paper (Table 2, mean of 10 seeds; Table 4 gives the other settings, to be added):
    DAPS       ELBO  857.77  PSNR 25.27 dB  FID 158.61
    DAPS-NA          585.02       24.97         157.16
    Gumbel           405.18       23.51         172.68  --tau_final=0.75 --lr=3e-4
    Gumbel-NA        394.19       24.20         163.98
    GR-MCK          -211.33       21.98         184.65
    GR-MCK-NA       -780.04       20.90         183.46  --tau_final=0.75
Hardware: as for the run it is added to.
"""

beta_final = 1.0
