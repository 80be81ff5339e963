# Sourced by the scripts beside it, which can all be stopped at any time and run again: finished runs
# are skipped, the others resumed. Each run takes the threads of OMP_NUM_THREADS.
set -euo pipefail

run() { # run OUT CONFIG [FILE or SETTING ...]: train config/CONFIG.py into out/OUT
  local out=out/$1
  [ -f "$out/eval.json" ] && return
  python train.py "config/$2.py" "${@:3}" --out_dir="$out" --resume=True
}
