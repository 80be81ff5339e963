#!/usr/bin/env bash
# MNIST, 16,000 steps of 256 digits, four methods also for longer, 64 bits. SEEDS="0 1 2": three seeds.
# assets/mnist_daps is daps_na_32000_s0: python eval.py RUN --export_to=assets/mnist_daps
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  mnist() { # mnist OUT METHOD LR [FILE or SETTING ...]
    run "mnist/$1_s$seed" "mnist_$2" config/long.py --max_steps=16000 --lr="$3" --seed="$seed" \
      "${@:4}"
  }
  mnist daps_na daps_na 6e-3
  mnist daps_na_32000 daps_na 6e-3 --max_steps=32000
  mnist daps daps 6e-3 --aligned=True
  mnist daps_28000 daps 6e-3 --aligned=True --max_steps=28000
  mnist fsq fsq 6e-3
  mnist fsq_32000 fsq 6e-3 --max_steps=32000
  mnist vqvae vqvae 6e-3
  mnist vqvae_32000 vqvae 6e-3 --max_steps=32000
  mnist gumbel_na gumbel_na 3e-3
  mnist daps_na_decay_1e-4 daps_na 6e-3 --weight_decay=1e-4
  mnist daps_na_ours_decay_1e-4 daps_na 6e-3 config/ours.py --weight_decay=1e-4
  mnist fsq_decay_1e-4 fsq 6e-3 --weight_decay=1e-4
  mnist vqvae_decay_1e-4 vqvae 6e-3 --weight_decay=1e-4
  mnist gumbel_na_decay_1e-4 gumbel_na 3e-3 --weight_decay=1e-4
  mnist rloo_na rloo_na 6e-3
  mnist gumbel gumbel 3e-3 --aligned=True
  mnist gumbel_plain gumbel 3e-3
  mnist reinmax_na reinmax_na 3e-3
  mnist gaussian gaussian 3e-3
  mnist ppo ppo 3e-3 --aligned=True
  mnist ppo_4 ppo 3e-3 --aligned=True --ppo_epochs=4
  mnist rloo rloo 6e-3 --aligned=True
  mnist grmck_na grmck_na 3e-3 --mc_samples=10 # 100 take 5.6 times as long
  mnist grmck grmck 3e-3 --aligned=True --mc_samples=10
done
python eval.py out/mnist/* --curves=out/mnist.png --record=out/mnist.jsonl
