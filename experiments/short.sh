#!/usr/bin/env bash
# MNIST in 3,000 steps, and what each of our changes is worth there. SEEDS="0 1 2" for three seeds.
cd "$(dirname "$0")/.."
. experiments/run.bash

for seed in ${SEEDS:-0}; do
  short() { run "short/$1_s$seed" "$2" config/short.py --seed="$seed" "${@:3}"; }
  short daps_na mnist_daps_na config/ours.py
  short daps mnist_daps config/ours.py
  short rloo_na mnist_rloo_na config/ours.py
  short ppo mnist_ppo config/ours.py
  short gumbel_na mnist_gumbel_na --lr=3e-3
  short gumbel_na_tau_0.5 mnist_gumbel_na --lr=3e-3 --tau_final=0.5
  short gumbel_na_tau_1 mnist_gumbel_na --lr=3e-3 --tau_final=1.0
  short vqvae mnist_vqvae
  short fsq mnist_fsq
  short gumbel mnist_gumbel --lr=3e-3 --aligned=True
  short reinmax_na mnist_reinmax_na --lr=3e-3
  short reinmax_na_tau_1.3 mnist_reinmax_na --lr=3e-3 --tau_final=1.3
  short grmck_na_m10 mnist_grmck_na --lr=3e-3 --mc_samples=10
  short grmck_m10 mnist_grmck --lr=3e-3 --aligned=True --mc_samples=10
  short no_splits mnist_daps_na config/ours.py --split_interval=0
  short not_centred mnist_daps_na config/ours.py --centred=False
  short eta_by_gradient mnist_daps_na config/ours.py --eta_update=gradient
  short paper mnist_daps_na config/paper.py
  short not_aligned mnist_daps config/ours.py --aligned=False
done
python eval.py out/short/* --curves=out/short.png --record=out/short.jsonl
