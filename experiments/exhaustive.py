"""What limits a run, its encoder or its decoder: log p(x|z) of codes as they are drawn, of the
likeliest code, of the best of 64 draws, and of an exhaustive search that starts from the draw and
tries every value of one token after the other, three times over.

    python experiments/exhaustive.py assets/mnist_daps

Letters: N examples, B tokens per code, V values per token.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from configurator import UserError, configure
from data import on_device
from eval import load, load_data
from report import print_aligned
from run import setup_device

data_dir = ""  # where the data sets are; empty: the run's data_dir
n_examples = 1000  # the first of training and of validation
n_rounds = 3  # over all tokens


@torch.no_grad()
def four_ways(model, x):
    """log p(x|z) of drawn, likeliest, best of 64 and searched codes of x (N, ...): (4, N)."""

    def log_px(z):  # (N, C, B) -> (N, C)
        return model.decode(z).log_prob(x.unsqueeze(1))

    z, V = model.encode(x), model.encoder.vocab_size  # (N, B)
    draws = model.encoder(x, 64)[0] if model.has_kl else z.unsqueeze(1)
    codes = z, model.encode(x, mode=True)
    found = [log_px(code.unsqueeze(1)).squeeze(1) for code in codes] + [log_px(draws).amax(dim=1)]
    for t in list(range(z.size(1))) * n_rounds:
        trials = z.unsqueeze(1).repeat(1, V, 1)  # (N, V, B)
        trials[:, :, t] = torch.arange(V)
        best, z[:, t] = log_px(trials).max(dim=1)
    return torch.stack([*found, best])


if __name__ == "__main__":
    _, runs = configure(globals(), sys.argv[1:])
    if not runs:
        raise UserError("name at least one run: python experiments/exhaustive.py assets/mnist_daps")
    setup_device("cpu")
    lines = [("run", "examples", "drawn", "mode", "best of 64", "exhaustive")]
    for run in runs:
        torch.manual_seed(0)
        model = load(run)
        if not model.discrete:
            raise UserError(f"{run}: the code of a Gaussian VAE is not discrete")
        data = load_data(model, data_dir)
        for split, n in (("train", data.n_train), ("val", data.n_val)):
            parts = torch.arange(min(n_examples, n)).split(20)
            batches = (on_device(data.read(split, part)[0], "cpu") for part in parts)
            means = torch.cat([four_ways(model, x) for x in batches], dim=1).mean(dim=1)
            lines.append((run, split, *(f"{mean:.2f}" for mean in means.tolist())))
    print_aligned(lines, n_left=2)
