"""Shared by all runs config/lafan_*.py, which name it as their base.

LAFAN1 motion on the Unitree H1, 32 frames in 64 tokens of 1,024 values: 640 bits.
Paper, "Training": 250,000 steps of 256 segments, Adam with weight decay, lr 3e-4, with cosine decay
"when appropriate" (here: where Table 6 has two rates). Its results are means over 10 seeds of the
best validation value of each.
Paper, "LAFAN Trajectory Hyperparameters": the code and the network. n_layers is that of its
autoregressive methods; the others set their own. Its generative model uses the settings of the
recognition model, which may mean 6 blocks where that has 6; ours has 2 for all methods.
Not in the paper: the size of the weight decay; the schedule of beta and temperature between the
two values it gives (exponential, as in the authors' code for beta).
Ours: 384 principal components of a segment, six per token, for the paper's 121 features per frame,
which it does not define: docs/motion.md. For minutes on a CPU, see experiments/motion.sh.
"""

dataset = "lafan"
n_tokens = 64
vocab_size = 1024
width = 128
n_layers = 2
