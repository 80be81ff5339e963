"""Shared by all runs config/mnist_*.py, which name it as their base.

MNIST, binarised, in 8 tokens of 256 values: 64 bits.
Paper, "Training": 250,000 steps of 256 images, Adam with weight decay, lr 3e-4. Its results are
means over 10 seeds of the best validation value of each.
Paper, "MNIST Vision Hyperparameters": the code and the network. n_layers and mlp_ratio are those of
its autoregressive methods; the others set their own.
Not in the paper: the size of the weight decay; the schedule of beta and temperature between the
two values it gives (exponential, as in the authors' code for beta).
"""

dataset = "mnist"
