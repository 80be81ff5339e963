"""Shared by all runs config/cifar10_*.py, which name it as their base.

CIFAR-10 in 64 tokens of 512 values: 576 bits.
Paper, "Training": 250,000 steps of 256 images, Adam with weight decay, lr 3e-4, with cosine decay
"when appropriate" (here: where Table 4 has two rates). Its results are means over 10 seeds of the
best validation value of each.
Paper, "CIFAR-10 Vision Hyperparameters": the code and the network. n_layers and mlp_ratio are those
of its autoregressive methods; the others set their own.
Not in the paper: the size of the weight decay; the schedule of beta and temperature between the
two values it gives (exponential, as in the authors' code for beta); what FID is measured against
(the authors' code: statistics of ImageNet-64, ours: the validation images; not comparable).
"""

dataset = "cifar10"
n_tokens = 64
vocab_size = 512
width = 128
n_layers = 2
