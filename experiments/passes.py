"""How many passes parallel sampling takes while an autoregressive encoder learns: more than pay off
(docs/speed.md), so train.py samples token by token.

    python experiments/passes.py out/passes_mnist.jsonl config/mnist_daps.py config/short.py
    python experiments/passes.py assets/passes.png out/passes_*.jsonl

The first trains with train.py and these arguments. Every 20 steps it also samples the codes of 8
examples in parallel and writes the passes, and how many tokens differ. The second draws such files.
Steps are counted from the start of the program, which must be that of the run.
"""

import json
import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch  # noqa: E402

from daps import draw as draw_tokens  # noqa: E402
from models import AutoregressiveEncoder  # noqa: E402
from plots import COLOURS, draw_plot  # noqa: E402

EVERY, EXAMPLES = 20, 8


def one_pass(tokens, context, z, noise):
    """What noise (N, K, B) draws for every token of codes z (N, L, B), given those before it:
    (N, K, B). L is K, or 1 for codes that do not differ."""
    logits, (N, L, B) = tokens.logits(context, z), z.shape  # (N, L, B, V)
    u = noise.view(N, L, -1, B).transpose(2, 3).contiguous()  # (N, L, B, K / L)
    return draw_tokens(logits, u).transpose(2, 3).reshape(noise.shape).contiguous()


class ParallelSampler:
    """Jacobi iteration (Song et al. 2021; Wiggers and Hoogeboom 2020): draw every token given the
    ones before it in the codes of the last pass, until a pass changes nothing.

    Given the noise, a token depends only on those before it, so pass i makes the first i tokens
    final: the codes are those that a sampler draws token by token, after B + 1 passes at the latest
    and, where a token matters little for most others, after a few. The CPU waits for each pass.
    """

    def __call__(self, tokens, context, noise):
        """Codes (N, K, B) of a TokenDecoder and the number of passes. The first is for one code per
        example: it sees no tokens, only unknown ones."""
        N, _, B = noise.shape
        z = torch.full((N, 1, B), tokens.vocab_size, device=noise.device)  # as before token 0
        z = one_pass(tokens, context, z, noise)
        for n_passes in range(2, B + 2):
            last, z = z, one_pass(tokens, context, z, noise)
            if torch.equal(last, z) or n_passes > B:
                break
        return z, n_passes


def record(path, argv):
    original, n_steps, parallel = AutoregressiveEncoder.sample, [0], ParallelSampler()

    @torch.no_grad()
    def sample(self, patches, noise, *choose):
        z = original(self, patches, noise, *choose)
        if self.training and n_steps[0] % EVERY == 0:
            context = self.tokens.context(patches[:EXAMPLES])
            ours, n_passes = parallel(self.tokens, context, noise[:EXAMPLES])
            row = {"step": n_steps[0], "passes": n_passes, "tokens": ours.numel()}
            row["differ"] = (ours != z[:EXAMPLES]).sum().item()
            with open(path, "a" if n_steps[0] else "w") as file:
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


if __name__ == "__main__":
    path, *arguments = sys.argv[1:] or [""]
    if not path.endswith((".jsonl", ".png")):
        sys.exit(__doc__)
    draw(path, arguments) if path.endswith(".png") else record(path, arguments)
