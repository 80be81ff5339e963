#!/usr/bin/env bash
# CIFAR-10, 1,500 steps of 32 images, and 10,000 for six runs, 576 bits. SEEDS="0 1" for two seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  cifar() { # cifar OUT METHOD LR [FILE or SETTING ...]
    run "cifar10/$1_s$seed" "cifar10_$2" config/short.py --batch_size=32 --max_steps=1500 \
      --eval_examples=1000 --eval_interval=250 --lr="$3" --seed="$seed" "${@:4}"
  }
  ours="config/ours_64.py --beta_init=0.5"
  gumbel="gumbel_na 3e-3 $ours --encoder_lr=0.25 --scale_lr=1"
  cifar daps_na daps_na 4e-3 $ours
  cifar daps_na_ess_0.75 daps_na 4e-3 $ours --ess_target=0.75
  cifar gumbel_na $gumbel
  cifar vqvae vqvae 1e-3
  for lr in 3e-4 1e-3 3e-3; do cifar "fsq_$lr" fsq "$lr"; done
  # three learning rates of each, with a slow encoder; two of them stand above
  for lr in 2e-3 8e-3; do cifar "daps_na_ess_0.75_$lr" daps_na "$lr" $ours --ess_target=0.75; done
  for lr in 1.5e-3 6e-3; do cifar "gumbel_na_$lr" $gumbel --lr="$lr"; done
  for lr in 1.5e-3 3e-3 6e-3; do cifar "vqvae_slow_$lr" vqvae "$lr" --encoder_lr=0.1; done
  for lr in 3e-3 6e-3 1.2e-2; do cifar "fsq_slow_$lr" fsq "$lr" --encoder_lr=0.1; done
  cifar daps daps 4e-3 $ours
  long="--max_steps=10000 --eval_interval=500"
  cifar daps_na_10000 daps_na 4e-3 $ours $long
  cifar daps_na_ess_0.75_10000 daps_na 4e-3 $ours $long --ess_target=0.75
  cifar gumbel_na_10000 $gumbel $long
  cifar vqvae_slow_10000 vqvae 3e-3 $long --encoder_lr=0.1
  cifar fsq_slow_10000 fsq 6e-3 $long --encoder_lr=0.1
  cifar plain_10000 daps_na 2e-3 $long
  cifar no_scale daps_na 4e-3 $ours --scale_lr=0
  cifar gumbel_na_no_scale $gumbel --scale_lr=0
  cifar whole_codes daps_na 4e-3 $ours --credit_window=0
  cifar gumbel_na_tau_1 $gumbel --tau_final=1.0
  cifar gumbel_na_plain gumbel_na 3e-3
  cifar gumbel_na_splits gumbel_na 3e-3 --split_interval=50
  cifar splits daps_na 4e-3 config/ours.py --beta_init=0.5
done
python eval.py out/cifar10/* --curves=out/cifar10.png --record=out/cifar10.jsonl
