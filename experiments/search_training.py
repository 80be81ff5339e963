"""Does it pay to train for the search? A finished run goes on for some minutes, in two ways.

    python experiments/search_training.py assets/mnist_daps --minutes=4 --seed=1

    daps    as before: K codes per example, eqs. (5) to (7)
    search  each example's code is searched for with `budget` decodings; the decoder learns from
            this code, and the encoder imitates it: weighted maximum likelihood with one weight

Both take the same time, data, learning rates and weight decay. Before and after, validation
examples are coded by draws and by a search with 64 decodings.
"""

import math
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from configurator import UserError, configure
from daps import DAPS
from data import TRAIN_NOISE, on_device, uniform_noise
from eval import evaluate, load, load_data
from models import token_log_prob
from report import print_aligned
from run import setup_device
from search import search_codes

data_dir = ""  # where the data sets are; empty: the run's data_dir
minutes = 4.0  # of training, for each way
budget = 32  # decodings per example, in training
batch_size = 256  # N
lr = 1e-3  # at the start; a cosine down to zero
seed = 0  # of batches and noise
n_examples = 2000  # for validation


def searched_loss(model, x):
    """-log q(z|x) - log p(x|z) of searched codes z, mean over x."""
    model.eval()
    z = search_codes(model, x, budget)  # (N, B)
    model.train()
    log_q = token_log_prob(model.encoder.proposals(x, z), z).sum(dim=1)  # (N,)
    return -(log_q + model.decoder.log_prob(x, z.unsqueeze(1)).squeeze(1)).mean()


def train(model, data, way):
    """Train for `minutes`; the number of steps."""
    config, step, started = model.config, 0, time.process_time()
    model.train().requires_grad_(True)
    model.log_eta.requires_grad_(False)
    decay = config["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay, fused=True)
    while (spent := (time.process_time() - started) / 60 / minutes) < 1:
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * spent)) / 2
        x = on_device(data.train_batch(seed, step, batch_size)[0], "cpu")
        if way == "search":
            loss = searched_loss(model, x)
        else:
            numbers = torch.arange(batch_size)
            noise = uniform_noise(TRAIN_NOISE, seed, step, numbers, model.noise_shape)
            loss, _ = model(x, config["beta_final"], noise=noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    model.eval().requires_grad_(False)
    return step


if __name__ == "__main__":
    _, runs = configure(globals(), sys.argv[1:])
    if not runs:
        raise UserError("name a run of daps or daps_na: assets/mnist_daps")
    setup_device("cpu")
    lines = [("run", "way", "steps", "log p(x|z)", "PSNR", "searched log p", "searched PSNR")]
    for run in runs:
        for way in ("none", "daps", "search"):
            torch.manual_seed(seed)
            model = load(run)
            if not isinstance(model, DAPS):
                raise UserError(f"{run}: the method must be daps or daps_na")
            data = load_data(model, data_dir)
            n_steps = train(model, data, way) if way != "none" else 0
            row = [run, way, f"{n_steps}"]
            for decodings in (0, 64):
                index = data.val_index(n_examples)
                found, _ = evaluate(model, data, 0.0, index, "cpu", 50, search=decodings)
                row += [f"{found['log_px']:.2f}", f"{found['psnr']:.2f}"]
            lines.append(row)
            print(row, flush=True)
    print_aligned(lines, n_left=2)
