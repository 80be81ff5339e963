#!/usr/bin/env bash
# The paper's second table, beta = 1: MNIST, 16,000 steps of 256 digits, 64 bits. SEEDS="0 1": two seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  beta1() { # beta1 METHOD LR [SETTING ...]
    run "beta1/$1_s$seed" "mnist_$1" config/long.py config/beta1.py --max_steps=16000 --lr="$2" \
      --seed="$seed" "${@:3}"
  }
  beta1 daps_na 6e-3
  beta1 gumbel_na 3e-3
  beta1 rloo_na 6e-3
  beta1 gumbel 3e-3 --aligned=True --tau_final=0.75
  beta1 grmck_na 3e-3 --tau_final=0.75 --mc_samples=10
  beta1 daps 6e-3 --aligned=True --ess_target=0.75
done
python eval.py out/beta1/* --curves=out/beta1.png --record=out/beta1.jsonl
