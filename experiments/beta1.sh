#!/usr/bin/env bash
# The paper's second table, beta = 1: MNIST, 16,000 steps of 256 digits, 64 bits. SEEDS="0 1": two seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  beta1() { # beta1 OUT METHOD LR [SETTING ...]
    run "beta1/$1_s$seed" "mnist_$2" config/long.py config/beta1.py --max_steps=16000 --lr="$3" \
      --seed="$seed" "${@:4}"
  }
  beta1 daps daps 6e-3 --aligned=True --ess_target=0.75
  beta1 daps_na_ess_0.75 daps_na 6e-3 --ess_target=0.75
  beta1 daps_na daps_na 6e-3
  beta1 rloo_na rloo_na 6e-3
  beta1 gumbel_na gumbel_na 3e-3
  beta1 gumbel gumbel 3e-3 --aligned=True --tau_final=0.75
  beta1 grmck_na grmck_na 3e-3 --tau_final=0.75 --mc_samples=10
done
python eval.py out/beta1/* --curves=out/beta1.png --record=out/beta1.jsonl
