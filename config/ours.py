"""python train.py config/mnist_daps.py config/short.py config/ours.py

Our changes to the paper for short budgets, added to another config. The query of token t sees patch
t (autoregressive methods); rarely used values become copies of common ones; and, if each token has
its own region of x, DAPS weights it by log p of a window around it. docs/differences.md, "For
short budgets", has more. For codes of 64 tokens, add config/ours_64.py instead.
"""

aligned = True
credit_window = 3
split_interval = 50
