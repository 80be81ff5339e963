#!/usr/bin/env bash
# CIFAR-10, 1,500 steps of 32 images, 576 bits. SEEDS="0 1" for two seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  cifar() { # cifar OUT METHOD LR [FILE or SETTING ...]
    run "cifar10/$1_s$seed" "cifar10_$2" config/short.py --batch_size=32 --max_steps=1500 \
      --eval_examples=1000 --lr="$3" --seed="$seed" "${@:4}"
  }
  ours="config/ours.py --tied=False --beta_init=0.5"
  cifar daps_na daps_na 4e-3 $ours
  cifar gumbel_na gumbel_na 3e-3
  cifar gumbel_na_splits gumbel_na 3e-3 --split_interval=50
  cifar vqvae vqvae 1e-3
  cifar tied daps_na 4e-3 $ours --tied=True
  cifar tied_no_splits daps_na 4e-3 $ours --tied=True --split_interval=0
  cifar tied_ess_0.7 daps_na 4e-3 $ours --tied=True --ess_target=0.7
  cifar whole_codes daps_na 4e-3 $ours --credit_window=0
  cifar daps daps 4e-3 $ours
done
python eval.py out/cifar10/* --curves=out/cifar10.png
