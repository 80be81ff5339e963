"""How long the robot of control.py follows motions of the validation files, and how closely.

    python experiments/robot.py assets/lafan_daps --n_starts=16

For each file, motions start at evenly spaced segments: as they are ("true"), decoded from their
codes by each run and, with --commanded=RUN, as the policy of a run writes them, given the second
before, the path that was taken and what the file is called. Open loop is the joints' controllers
alone, without plans. Each trial is a line in a file of results (--results); trials that are there
are not repeated.
"""

import functools
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from configurator import UserError, configure
from control import FALLEN, Plan, follow, load_robot, score
from data import DATA_DIR, load_dataset
from eval import reconstruct
from motion import LAFAN_VAL
from policy import centre_of_mass, load_policy, load_run, phrase, seen_from, start
from report import print_aligned, write_lines
from run import read_log, setup_device

files = " ".join(LAFAN_VAL)  # which
commanded = ""  # a run with a policy, see policy.py
n_starts = 4  # motions of each file
seconds = 10.0  # of each motion
n_samples = 128  # K, plans per update
n_updates = 1  # times per step that plans are drawn and averaged
ess_target = 0.1  # effective sample size, as a share of K
eta = 0.0  # a fixed temperature; 0: solved for ess_target
seed = 0  # of the noise
results = "out/robot.jsonl"  # one line per trial
data_dir = DATA_DIR  # with lafan1/h1 and lafan1/h1.xml
cached_run, cached_policy = functools.cache(load_run), functools.cache(load_policy)
PLANS = ("n_samples", "n_updates", "ess_target", "eta", "seed", "seconds")  # a trial's settings


def starts(data, name):
    """The segments (n,) of each motion of a file."""
    n, index = -(-int(30 * seconds) // 32), data.segments["val"].by_clip[LAFAN_VAL.index(name)]
    index = index[1:]  # the first second is a history
    n = min(n, len(index))
    for i in range(n_starts):
        first = i * (len(index) - n) // max(n_starts - 1, 1)
        yield first, index[first : first + n]


def moving(data, name, part, source):
    """The frames (n, 26) of these segments: true, decoded by a run, or commanded."""
    segments = data.segments["val"]
    frames = segments.frames(part)
    kind, _, run = source.rpartition(" ")
    if kind == "commanded":
        history = segments.frames(part[:1] - 1)[0]
        path = centre_of_mass(seen_from(*start(history), frames.flatten(0, 1)))[:, :2]
        frames, _ = cached_policy(run).rollout(history, phrase(name), path)
    elif source != "true":
        frames = segments.to_world(reconstruct(cached_run(run), data, part, "cpu")[1], part)
    return frames.reshape(-1, 26)[: int(30 * seconds) + 1].double().numpy()


def trial(robot, frames, planned):
    plan = Plan(n_samples, n_updates if planned else 0, ess_target=ess_target, eta=eta)
    done, wanted, ess = follow(robot, frames, plan, seed)
    upright, cm, degrees = score(done, wanted)
    found = {"upright": upright, "fell": bool(done[-1, 2] < FALLEN), "cm": cm, "degrees": degrees}
    return found | {"ess": float(ess.mean()) if planned else None}


if __name__ == "__main__":
    settings, runs = configure(globals(), sys.argv[1:])
    setup_device("cpu")
    torch.set_num_threads(1)
    unknown = set(files.split()) - set(LAFAN_VAL)
    if unknown:
        raise UserError(f"files: there is no {unknown.pop()} in {', '.join(LAFAN_VAL)}")
    data = load_dataset("lafan", data_dir)
    robot = load_robot(os.path.join(os.path.expanduser(data_dir), "lafan1", "h1.xml"))
    shared = [settings[key] for key in PLANS]
    rows = read_log(results)
    write_lines(results, rows)  # without a last line that was cut off
    known = {json.dumps(row["key"]): row for row in rows}
    lines = [("file", "motion", "control", "n", "upright", "seconds", "cm", "degrees")]
    with open(results, "a") as file:
        for name in files.split():
            for source in ("true", *runs, *([f"commanded {commanded}"] if commanded else [])):
                for control in ("open loop", "planned"):
                    rows = []
                    for first, part in starts(data, name):
                        key = [name, source, control, first, *shared]
                        if json.dumps(key) not in known:
                            frames = moving(data, name, part, source)
                            row = {"key": key, **trial(robot, frames, control == "planned")}
                            print(json.dumps(row), file=file, flush=True)
                            known[json.dumps(key)] = row
                        rows.append(known[json.dumps(key)])
                    share = sum(not row["fell"] for row in rows) / len(rows)
                    means = (
                        statistics.mean(r[k] for r in rows) for k in ("upright", "cm", "degrees")
                    )
                    cells = (f"{share:.0%}", *(f"{mean:.1f}" for mean in means))
                    lines.append((name, source, control, str(len(rows)), *cells))
                    print(lines[-1], flush=True)
    print_aligned(lines, n_left=3)
