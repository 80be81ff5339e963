#!/usr/bin/env bash
# LAFAN1, 1,000 steps of 16 segments, 640 bits.
cd "$(dirname "$0")/.."
. experiments/run.bash

ours="config/ours_64.py --beta_init=0.5"
motion() { # motion OUT METHOD LR [FILE or SETTING ...]
  run "motion/$1" "lafan_$2" config/short.py --batch_size=16 --max_steps=1000 --lr="$3" "${@:4}"
}
motion daps_na daps_na 4e-3 $ours
motion gumbel_na gumbel_na 3e-3 $ours --encoder_lr=0.25 --scale_lr=1
motion fsq fsq 3e-3
motion no_scale daps_na 4e-3 $ours --scale_lr=0
motion gumbel_na_no_scale gumbel_na 3e-3 $ours --encoder_lr=0.25 --scale_lr=0
motion splits daps_na 2e-3 config/ours.py
motion daps_na_plain daps_na 2e-3
motion gumbel_na_plain gumbel_na 1e-3
python eval.py out/motion/* --curves=out/motion.png --record=out/motion.jsonl
