"""python train.py config/mnist_daps.py config/beta1.py --ess_target=0.75 --out_dir=out/mnist_beta1

Added to a run on MNIST: the plain ELBO, beta = 1 from the first step to the last.
DAPS-NA gains three nats from --ess_target=0.75, too, and is then level with DAPS (docs/results.md).
Paper (Table 2, mean of 10 seeds; Table 5 gives the other settings, to be added as above):
    DAPS       ELBO  -80.64  PSNR 17.13 dB  --ess_target=0.75
    DAPS-NA          -86.00       16.54
    Gumbel           -93.72       15.68     --tau_final=0.75
    Gumbel-NA        -80.80       17.21
    GR-MCK          -101.86       14.83
    GR-MCK-NA       -114.61       14.21     --tau_final=0.75
Hardware: as for the run it is added to.
"""

beta_init = 1.0
beta_final = 1.0
