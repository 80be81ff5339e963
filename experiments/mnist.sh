#!/usr/bin/env bash
# The README's table: MNIST, 16,000 steps of 256 digits, 64 bits. You can stop it and run it again:
# finished runs are skipped, others resumed. About nine hours on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")/.."

run() { # run METHOD LR SEED [SETTING ...]
  local out=out/mnist16k/$1_s$3
  [ -f "$out/eval.json" ] && return
  python train.py "config/mnist_$1.py" config/short.py config/ours.py --max_steps=16000 \
    --lr="$2" --seed="$3" --eval_interval=2000 --out_dir="$out" --resume=True "${@:4}"
}

for seed in 0 1 2; do
  run daps_na 6e-3 $seed
  run vqvae 6e-3 $seed
  run fsq 6e-3 $seed
  run gumbel_na 3e-3 $seed
done
run rloo_na 6e-3 0
run reinmax_na 1.5e-3 0
run gaussian 3e-3 0
run gumbel 3e-3 0
for seed in 0 1 2; do
  run daps 6e-3 $seed
done
run ppo 3e-3 0
python eval.py out/mnist16k/* --curves=out/mnist16k.png
