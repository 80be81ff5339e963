#!/usr/bin/env bash
# Short budgets (docs/results.md): MNIST, 3,000 steps of 256; CIFAR-10, 1,500 steps of 32. You can
# stop it and run it again: finished runs are skipped, others resumed. SEEDS="0 1 2" runs all seeds.
set -euo pipefail
cd "$(dirname "$0")/.."

run() { # run NAME CONFIG [SETTING ...], for each seed
  for seed in ${SEEDS:-0}; do
    local out=out/short/$1_s$seed
    [ -f "$out/eval.json" ] && continue
    python train.py "config/$2.py" config/short.py --seed="$seed" --out_dir="$out" --resume=True "${@:3}"
  done
}

mnist() { run "mnist_$1" "mnist_$1" config/ours.py "${@:2}"; }
cifar() { run "cifar10_$1" "cifar10_$1" config/ours.py --batch_size=32 --max_steps=1500 "${@:2}"; }

mnist daps_na
cifar daps_na --lr=4e-3 --beta_init=0.5 --eval_examples=1000
cifar gumbel_na --lr=3e-3 --eval_examples=1000
mnist gumbel_na --lr=3e-3
mnist vqvae
mnist fsq
cifar vqvae --lr=1e-3 --eval_examples=1000
mnist rloo_na

# What each change is worth: turn each one off, then all.
run worth_tied mnist_daps_na config/ours.py --tied=False
run worth_split mnist_daps_na config/ours.py --split_interval=0
run worth_centred mnist_daps_na config/ours.py --centred=False
run worth_eta mnist_daps_na config/ours.py --eta_update=gradient
run worth_paper mnist_daps_na config/paper.py
mnist daps

python eval.py out/short/* --curves=out/short.png
