"""python train.py config/mnist_daps.py config/short.py config/aligned.py

On top of an autoregressive run: the decoder's query of token t also sees the encoder's output for
patch t. One-pass methods ignore it: their token t always does.
Paper: does not have it, so its runs leave it off. It is ours, the default of train.py, and part of
the short-budget tables in the README.
Hardware: as the run below it.
"""

aligned = True
