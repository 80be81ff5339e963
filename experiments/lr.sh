#!/usr/bin/env bash
# The learning rate of each method: four rates at 3,000 steps on MNIST. At beta = 1, three rates and
# three last temperatures of Gumbel-NA.
cd "$(dirname "$0")/.."
. experiments/run.bash

for lr in 1.5e-3 3e-3 6e-3 1.2e-2; do
  for method in vqvae fsq gumbel_na reinmax_na gaussian gumbel; do
    run "lr/${method}_$lr" "mnist_$method" config/short.py --lr="$lr"
  done
  for method in daps_na rloo_na gumbel_na daps ppo; do
    run "lr/${method}_ours_$lr" "mnist_$method" config/short.py config/ours.py --lr="$lr"
  done
done
for pair in 1.5e-3,0.1 3e-3,0.1 6e-3,0.1 3e-3,0.5 3e-3,1.0; do
  run "lr/gumbel_na_beta1_$pair" mnist_gumbel_na config/short.py config/beta1.py \
    --lr=${pair%,*} --tau_final=${pair#*,}
done
python eval.py out/lr/* --curves=out/lr.png --record=out/lr.jsonl
