"""python train.py config/mnist_daps.py config/short.py config/ours.py

Our changes to the paper, added to another config; they are on in train.py's defaults. The query of
token t sees patch t (autoregressive methods), logits are products with the decoder's vectors,
rarely used values become copies of common ones, and, if each token has its own region of x, DAPS
weights it by the window around that region. See docs/differences.md, "For short budgets".
For codes of 64 tokens, config/ours_64.py is better; longer ones are untested.
"""

aligned = True
tied = True
credit_window = 3
split_interval = 50
