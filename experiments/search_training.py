"""Does it pay to train for the search? A finished run goes on for some minutes, in three ways.

    python experiments/search_training.py assets/mnist_daps --minutes=4 --seed=1

    daps    as before: K codes per example, eqs. (5) to (7)
    search  each example's code is searched for with `budget` decodings; the decoder learns from
            this code, and the encoder imitates it: weighted maximum likelihood with one weight
    sweep   K codes become K values of each token in turn, the other tokens fixed, weighted as in
            eq. (5); the token moves to one of them, drawn by these weights. The encoder imitates
            them, the decoder learns from the first and the last code

All take the same time, data, learning rates and weight decay. Before and after, validation
examples are coded by draws and by a search with 64 decodings.
"""

import math
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from configurator import UserError, configure
from daps import DAPS, draw, log_weights, solve_eta
from data import TRAIN_NOISE, on_device, uniform_noise
from eval import evaluate, load, load_data
from models import token_log_prob
from report import print_aligned
from run import setup_device
from search import search_codes

data_dir = ""  # where the data sets are; empty: the run's data_dir
ways = "none daps search sweep"  # none: as it is
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


def sweep_loss(model, x, beta, u):
    """The same with a sweep over tokens, decided by u (N, 2 K, B), uniform in [0, 1)."""
    logits, K = model.encoder.logits(x), model.n_samples  # (N, B, V)
    log_q, loss = logits.log_softmax(dim=-1), 0.0
    values = draw(logits.detach(), u[:, :K].transpose(1, 2).contiguous())  # (N, B, K)
    first, z = values[:, :, 0].clone(), values[:, :, 0].clone()  # (N, B)
    for t in range(z.size(1)):
        trials = z.unsqueeze(1).repeat(1, K, 1)  # (N, K, B)
        trials[:, :, t] = values[:, t]
        with torch.no_grad():
            reward = model.decoder.log_prob(x, trials)  # (N, K)
        log_q_t = log_q[:, t].gather(1, values[:, t])  # (N, K), with gradient
        eta = solve_eta(reward, log_q_t.detach(), beta, model.ess_target)
        log_w = log_weights(reward, log_q_t, eta, beta)  # (N, K)
        loss = loss - ((log_w.exp() - 1 / K) * log_q_t).sum(dim=1).mean()
        z[:, t] = values[:, t].gather(1, draw(log_w, u[:, K, t : t + 1])).squeeze(1)
    return loss - model.decoder.log_prob(x, torch.stack([first, z], dim=1)).mean()


def train(model, data, way):
    """Train for `minutes` of processor time; the number of steps."""
    config, step, started = model.config, 0, time.process_time()
    model.train().requires_grad_(True)
    model.log_eta.requires_grad_(False)
    model.encoder.head.log_scale.requires_grad_(config["scale_lr"] > 0)  # as in train.py
    decay = config["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay, fused=True)
    while (spent := (time.process_time() - started) / 60 / minutes) < 1:
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * spent)) / 2
        x = on_device(data.train_batch(seed, step, batch_size)[0], "cpu")
        K, B = model.noise_shape
        noise = uniform_noise(TRAIN_NOISE, seed, step, torch.arange(batch_size), (2 * K, B))
        if way == "search":
            loss = searched_loss(model, x)
        elif way == "sweep":
            loss = sweep_loss(model, x, config["beta_final"], noise)
        else:
            loss, _ = model(x, config["beta_final"], noise=noise[:, :K])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    model.eval().requires_grad_(False)
    return step


if __name__ == "__main__":
    _, runs = configure(globals(), sys.argv[1:])
    if not runs:
        raise UserError("name a run of daps_na: assets/mnist_daps")
    if unknown := set(ways.split()) - {"none", "daps", "search", "sweep"}:
        raise UserError(f"ways: there is no {unknown.pop()} in none, daps, search, sweep")
    setup_device("cpu")
    lines = [("run", "way", "steps", "log p(x|z)", "PSNR", "searched log p", "searched PSNR")]
    for run in runs:
        for way in ways.split():
            torch.manual_seed(seed)
            model = load(run)
            if not isinstance(model, DAPS) or model.encoder.autoregressive or model.decoder.window:
                raise UserError(f"{run}: must be a run of daps_na without a credit window")
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
