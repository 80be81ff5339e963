"""python train.py config/mnist_daps.py config/short.py config/ours.py

What is ours and not the paper's, on top of another config, as train.py's defaults have it: the
query of token t sees patch t (autoregressive methods), logits are products with the decoder's
vectors, values that are hardly used copy busy ones, and, where the decoder has a place for every
token, DAPS gives each token the credit for its surroundings. README, "Differences from the paper".
"""

aligned = True
tied = True
credit_window = 3
split_interval = 50
