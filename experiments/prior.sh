#!/usr/bin/env bash
# Generation: a prior over the codes of runs of experiments/mnist.sh, which come first.
cd "$(dirname "$0")/.."
. experiments/run.bash

runs=$(echo out/mnist/{daps_na_ours_decay_1e-4,fsq_decay_1e-4,vqvae_decay_1e-4}_s0)
python prior.py $runs --max_steps=6000 --guidance=2
for guidance in 1 2; do
  python experiments/generation.py $runs --guidance=$guidance
done
