#!/usr/bin/env bash
# The README's table: MNIST, 16,000 steps of 256 digits, 64 bits. SEEDS="0 1 2" for three seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  mnist() { # mnist METHOD LR [FILE or SETTING ...]
    run "mnist/$1_s$seed" "mnist_$1" config/short.py --max_steps=16000 --eval_interval=2000 \
      --lr="$2" --seed="$seed" "${@:3}"
  }
  mnist daps_na 6e-3 config/ours.py
  mnist vqvae 6e-3
  mnist fsq 6e-3
  mnist gumbel_na 3e-3
  mnist daps 6e-3 config/ours.py
  mnist rloo_na 6e-3 config/ours.py
  mnist gumbel 3e-3
  mnist reinmax_na 1.5e-3
  mnist gaussian 3e-3
  mnist ppo 3e-3 config/ours.py
done
python eval.py out/mnist/* --curves=out/mnist.png
