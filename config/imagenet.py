"""Shared by all runs config/imagenet_*.py, which name it as their base.

ImageNet, 256 x 256, in 1,024 tokens of 1,024 values: 10,240 bits.
Paper, "Training": 300,000 steps of 64 images, Adam with weight decay, lr 3e-4. Its results are
means over 5 seeds of the best validation value of each.
Paper, "ImageNet-256 Vision Hyperparameters": the code and the network. n_layers is that of its
autoregressive methods; the others set their own.
Not in the paper: the size of the weight decay; the schedule of beta and temperature between the
two values it gives (exponential, as in the authors' code for beta); what FID is measured against
(ours: the validation images).
"""

dataset = "imagenet"
n_tokens = 1024
vocab_size = 1024
width = 128
n_layers = 2
max_steps = 300_000
batch_size = 64
eval_interval = 2000
eval_examples = 2000
