"""How many passes parallel sampling takes while an autoregressive encoder learns.

    python experiments/passes.py out/passes_mnist.jsonl config/mnist_daps.py config/short.py
    python experiments/passes.py assets/passes.png out/passes_*.jsonl

The first trains with train.py and these arguments. Every 20 steps it also samples the codes of 8
examples in parallel and writes the passes, and how many tokens differ. The second draws such files.
"""

import json
import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch  # noqa: E402

from models import AutoregressiveEncoder  # noqa: E402
from plots import COLOURS, draw_plot  # noqa: E402
from sampler import ParallelSampler  # noqa: E402

EVERY, EXAMPLES = 20, 8


def record(path, argv):
    original, n_steps, parallel = AutoregressiveEncoder.sample, [0], ParallelSampler()

    @torch.no_grad()
    def sample(self, patches, noise, *choose):
        z = original(self, patches, noise, *choose)
        if self.training and n_steps[0] % EVERY == 0:
            context = self.tokens.context(patches[:EXAMPLES])
            ours, _, n_passes = parallel(self.tokens, context, noise[:EXAMPLES])
            row = {"step": n_steps[0], "passes": n_passes, "tokens": ours.numel()}
            row["differ"] = (ours != z[:EXAMPLES]).sum().item()
            with open(path, "a") as file:
                print(json.dumps(row), file=file)
        n_steps[0] += self.training
        return z

    AutoregressiveEncoder.sample = sample
    sys.argv = ["train.py", *argv]
    runpy.run_path(os.path.join(ROOT, "train.py"), run_name="__main__")


def draw(path, files):
    curves = []
    for colour, name in zip(COLOURS, files, strict=False):
        with open(name) as file:
            rows = [json.loads(line) for line in file]
        curves.append((colour, [(row["step"], row["passes"], 0) for row in rows]))
        n_tokens, n_differ = (sum(row[key] for row in rows) for key in ("tokens", "differ"))
        print(f"{name}: {colour}; {n_differ} of {n_tokens:,} tokens differ")
    draw_plot("Passes of the parallel sampler", curves, (0, 30)).save(path)


path, *arguments = sys.argv[1:]
draw(path, arguments) if path.endswith(".png") else record(path, arguments)
