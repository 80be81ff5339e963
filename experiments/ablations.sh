#!/usr/bin/env bash
# The paper's ablations on a small budget: K and the size of the code on MNIST, 3,000 steps; on
# CIFAR-10, batches of 32, the size of the code in 1,500 steps, beta and ESS in 1,000.
cd "$(dirname "$0")/.."
. experiments/run.bash

for K in 2 4 8 16 32; do
  run "ablations/K_$K" mnist_daps_na config/short.py config/ours.py --n_samples=$K
done
for pair in 2,4900 4,3850 16,1950 32,1370; do # as many steps as fit in the time of 3,000 with K = 8
  K=${pair%,*}
  run "ablations/K_${K}_equal_time" mnist_daps_na config/short.py config/ours.py --n_samples=$K \
    --max_steps=${pair#*,}
done
for code in 4,4 4,16 8,16 8,256; do
  size="--n_tokens=${code%,*} --vocab_size=${code#*,}"
  run "ablations/daps_na_$code" mnist_daps_na config/short.py config/ours.py $size
  run "ablations/gumbel_na_$code" mnist_gumbel_na config/short.py $size --lr=3e-3
  run "ablations/vqvae_$code" mnist_vqvae config/short.py $size
done
cifar="config/short.py --batch_size=32 --max_steps=1500 --eval_examples=1000 --eval_interval=250"
for code in 4,512 16,512 64,64; do # 64 tokens of 512 values: experiments/cifar10.sh
  size="$cifar --n_tokens=${code%,*} --vocab_size=${code#*,}"
  ours="config/ours_64.py --beta_init=0.5"
  run "sizes/daps_na_$code" cifar10_daps_na $size $ours --lr=4e-3 --ess_target=0.75
  run "sizes/gumbel_na_$code" cifar10_gumbel_na $size $ours --lr=3e-3 --encoder_lr=0.25 --scale_lr=1
  run "sizes/vqvae_$code" cifar10_vqvae $size --lr=3e-3 --encoder_lr=0.1
done
short="config/short.py config/ours_64.py"
short+=" --batch_size=32 --max_steps=1000 --lr=4e-3 --eval_examples=1000"
for ess in 0.25 0.5 0.75; do
  for beta in 0.1 1.0 10.0; do
    run "beta_ess/beta_${beta}_ess_$ess" cifar10_daps_na $short \
      --beta_init=$beta --beta_final=$beta --ess_target=$ess
  done
done
for beta in 6.0 0.5; do # the paper's start and ours; the end is 0.01
  run "beta_ess/annealed_from_$beta" cifar10_daps_na $short --beta_init=$beta --ess_target=0.5
done
python eval.py out/ablations/* --curves=out/ablations.png --record=out/ablations.jsonl
python eval.py out/sizes/* --curves=out/sizes.png --record=out/sizes.jsonl
python eval.py out/beta_ess/* --curves=out/beta_ess.png --record=out/beta_ess.jsonl
