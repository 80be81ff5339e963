"""python train.py config/mnist_daps_na.py config/long.py

Added to a run on MNIST: 32,000 steps, enough for DAPS-NA to pass the paper's beta-ELBO and match
its best PSNR, with weight decay 0.05, which may gain a nat (docs/trials.md has a pair of runs).
Paper: nothing at this length; after 250,000 steps, config/mnist_daps_na.py has beta-ELBO -46.96 and
PSNR 18.36 dB, where 32,000 steps of this run end at -44.19 and 18.49.
Hardware: one CPU core, 74 minutes with config/mnist_daps_na.py.
"""

base = "short.py"
max_steps = 32_000
weight_decay = 0.05
eval_interval = 2000
