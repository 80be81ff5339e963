#!/usr/bin/env bash
# LAFAN1, 640 bits a second, 2 layers (fsq: 3, to match sizes), in the time of 750 steps of DAPS-NA.
cd "$(dirname "$0")/.."
. experiments/run.bash

motion() { # motion METHOD LAYERS STEPS LR [FILE or SETTING ...]
  run "motion/$1" "lafan_$1" config/short.py --batch_size=32 --n_layers="$2" --max_steps="$3" \
    --lr="$4" --eval_interval=400 "${@:5}"
}
ours="config/ours_64.py --beta_init=0.1"
motion daps_na 2 750 4e-3 $ours --n_samples=4 --ess_target=0.6 --credit_window=1 --encoder_lr=0.4 \
  --eval_interval=250
motion gumbel_na 2 1240 3e-3 $ours --encoder_lr=0.25 --scale_lr=1
motion fsq 3 1570 3e-3
motion vqvae 2 1600 3e-3
python eval.py out/motion/* --search=64 --curves=out/motion.png --record=out/motion.jsonl
