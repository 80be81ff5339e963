"""python train.py config/mnist_daps.py config/paper.py --out_dir=out/mnist_daps_paper

The paper's choice wherever ours differs, on top of another config: Algorithm 1 as printed, with
weights that are not centred, a gradient step on eta, plain queries, a codebook trained by gradient.
tests/test_daps.py holds a step with it against a transcription of Algorithm 1.
"""

eta_update = "gradient"
centred = False
aligned = False
vq_ema = False
ppo_epochs = 1
