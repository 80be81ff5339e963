"""A prior over the codes of a trained run, by discrete flow matching, and samples from it.

    python prior.py out/mnist_daps                    train on the codes of a run; table, pictures
    python prior.py out/mnist_daps --sample=True      table and pictures of a trained prior
    python prior.py out/mnist_* --resume=True         train unfinished priors; one table of all
    python prior.py out/mnist_daps --max_steps=250000 --batch_size=64 --lr=1e-4
                                                      the authors' budget, for a GPU

    model, prior = load("out/mnist_daps"), load_prior("out/mnist_daps")
    images = model.decode(prior.sample(torch.tensor([3, 1, 4]))).mean

Codes move from uniform noise z_0 at t = 0 to data z_1 at t = 1 (Campbell et al. 2024, Gat et al.
2024): a network predicts z_1 from z_t, and sampling follows its predictions in small steps.
The first half of this file needs only torch.

Letters: N codes in a batch, B tokens per code, V values per token, H width.
"""

import json
import math
import os
import sys
import time
from collections import Counter
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from baselines import Gaussian
from checkpoint import (
    Log,
    StopSignal,
    as_bytes,
    check_same_run,
    claim,
    load_checkpoint,
    restore,
    setup_device,
    write,
)
from configurator import UserError, configure, require
from data import cached, digest, train_indices, uniform_noise
from eval import load, load_data, print_aligned, save_picture, validation_noise
from motion import FRAMES, film, joint_positions
from plots import grid, images_per_row

# ---------------------------------------------------------------------------------------------
# Settings. Config files and --key=value override them; --help lists them.

data_dir = ""  # where the data sets are; empty: the run's data_dir
resume = False  # continue from prior.pt, if there is one
overwrite = False  # replace the run's prior
sample = False  # do not train: table and pictures of the trained prior
# the network; the defaults are the authors'
n_layers = 2  # transformer blocks
width = 128  # H
n_heads = 4  # attention heads
# training
n_draws = 1  # codes drawn per training example; VQ-VAE and FSQ always give the same one
max_steps = 2000  # the authors: 250,000
batch_size = 128  # N; the authors: 64
lr = 2e-3  # peak rate of AdamW: warm-up, then a cosine down to 0; the authors: 1e-4, constant
label_dropout = 0.1  # share of codes whose label is hidden: guidance also needs p(z)
eval_interval = 500  # steps between validations, each of which saves prior.pt
# sampling
n_steps = 40  # Euler steps; the authors' dt is 1/40
guidance = 1.0  # 0: ignore labels; 1: p(z | label); above: more typical of the label
n_generated = 2000  # codes generated for the table
classifier_steps = 1000  # training steps of the classifier that judges them; 0: no classifier
# machine
seed = 0  # of parameters, batches and noise
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images

# ---------------------------------------------------------------------------------------------
# The flow. Each token of z_t is from z_1 with probability t, else from z_0, which is uniform:
#
#     p(z_t^i | z_1^i) = t [z_t^i = z_1^i] + (1 - t) / V,  independently for every position i.


def noisy(z_1, t, u, vocab_size):
    """z_t of codes z_1 (N, B) at times t (N,), decided by u (N, 2B), uniform in [0, 1)."""
    u_keep, u_noise = u.chunk(2, dim=1)
    z_0 = (u_noise * vocab_size).long().clamp_max(vocab_size - 1)
    return torch.where(u_keep < t.unsqueeze(1), z_1, z_0)


def posterior(logits, z_t, t):
    """log p(z_1^i | z_t) of every token: logits (N, B, V), z_t (N, B), t (N,) below 1 -> (N, B, V).

    By Bayes' rule, p(z_1^i | z_t) is proportional to p(z_1^i | z_t without i) p(z_t^i | z_1^i). The
    second factor is known: it favours z_1^i = z_t^i by 1 + V t / (1 - t) over other values. With it
    added here (ours, not the authors'), the network need not learn for every t how far to trust the
    token it sees, and the bound below stays finite as t -> 1.
    """
    trust = torch.log1p(logits.size(-1) * t / (1 - t)).to(logits.dtype)  # (N,)
    trust = trust.view(-1, 1, 1).expand(*z_t.shape, 1)
    return logits.scatter_add(-1, z_t.unsqueeze(-1), trust).log_softmax(dim=-1)


def guided(log_p, log_p_free, guidance):
    """Classifier-free guidance: p(z_1^i | z_t, label)^g p(z_1^i | z_t)^(1 - g), normalised.

    Exact for g = 0 and 1, otherwise a heuristic: tilting the posteriors is not the same as tilting
    the distribution of the codes.
    """
    return (guidance * log_p + (1 - guidance) * log_p_free).log_softmax(dim=-1)


def step_probabilities(log_p, z_t, steps_left):
    """Probabilities of every token's next value, in a step of (1 - t) / steps_left: (N, B, V).

    A Markov chain whose tokens jump at rate 1 / (1 - t), each to a draw from p(z_1^i | z_t), has
    the marginals of z_t. In a step of length h, a token jumps with probability h / (1 - t), which
    is exact, 1 - exp(-integral of the rate), and 1 in the last step. The approximation is that
    posteriors are held fixed during a step: tokens that jump in the same step do not see each
    other. This error is of first order in h.
    """
    stay = F.one_hot(z_t, log_p.size(-1)).to(log_p.dtype)
    return stay + (log_p.exp() - stay) / steps_left


def bound_rate(log_p, z_1, z_t, t):
    """The integrand over t of a bound on -log p(z_1), in nats per unit of time: (N,) float64.

    Run backwards, the noise is a Markov chain too: from t to t - dt, a token is redrawn uniformly
    with probability dt / t. In its reversal, token i goes from x to y != x at the rate

        r(y) = sum_v p(z_1^i = v | z_t) p(y | v) / p(x | v) / (t V),

    where p(y | v) is that of the path above. Given z_1, the rate is r(y | z_1), with only v = z_1^i
    in the sum. The KL divergence of the paths given z_1, which end there, from the model's paths
    bounds -log p(z_1). It is the integral over t of the mean, over z_t ~ p(z_t | z_1), of

        sum_i sum_{y != x} r(y | z_1) log(r(y | z_1) / r(y)) - r(y | z_1) + r(y)

    and equals -log p(z_1) for exact posteriors. This chain has the marginals of the one we sample
    but more jumps. The bound for the latter (Shaul et al. 2024) is looser, for uniform codes by
    almost 1 nat per token: given z_1, its paths show which tokens have arrived; z_t does not.
    """
    V, t = log_p.size(-1), t.double().view(-1, 1, 1)
    equal, other = t + (1 - t) / V, (1 - t) / V  # p(x | v) for x = v and for x != v
    x = z_t.unsqueeze(-1)

    def rates(p):  # times t V
        return 1 + p.gather(-1, x) * (other / equal - 1) + p * (equal / other - 1)  # (N, B, V)

    r, r_given = rates(log_p.double().exp()), rates(F.one_hot(z_1, V).double())
    terms = r_given * (r_given / r).log() - r_given + r
    return terms.scatter(-1, x, 0.0).sum(dim=(1, 2)) / (t * V).flatten()


def draw(p, u):
    """A value from each row of p (M, V) by inverse CDF at u (M, 1), uniform in [0, 1): (M, 1)."""
    cdf = p.cumsum(dim=1)  # u is scaled by its last entry, 1 up to rounding: never past the end
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_max(p.size(1) - 1)


class Prior(nn.Module):
    """p(z | label): a bidirectional transformer that predicts z_1 from z_t, t and the label; t and
    the label are added to every token. The label n_labels means no label."""

    def __init__(self, n_tokens, vocab_size, n_labels, width=128, n_heads=4, n_layers=2):
        super().__init__()
        self.n_tokens, self.vocab_size, self.n_labels = n_tokens, vocab_size, n_labels
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(n_tokens, width))
        self.label = nn.Embedding(n_labels + 1, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        size = (width, n_heads, 4 * width)
        options = dict(dropout=0.0, batch_first=True, norm_first=True)
        blocks = (nn.TransformerEncoderLayer(*size, **options) for _ in range(n_layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)
        for weight in (self.embed.weight, self.positions, self.label.weight):
            nn.init.normal_(weight, std=0.1)  # 1 and 0.02 learn more slowly

    def forward(self, z_t, t, labels):
        """log p(z_1^i | z_t, label): z_t (N, B), t (N,) below 1, labels (N,) -> (N, B, V)."""
        context = self.label(labels) + self.time(t.float().unsqueeze(1))  # (N, H)
        h = self.embed(z_t) + self.positions + context.unsqueeze(1)  # (N, B, H)
        return posterior(self.head(self.norm(self.blocks(h))), z_t, t)  # (N, B, V)

    @torch.no_grad()
    def sample(self, labels, guidance=1.0, n_steps=40, generator=None, with_path=False):
        """Codes (N, B) for labels (N,), or N codes without label if labels is the number N;
        with_path: z_t at all times, (n_steps + 1, N, B). n_steps evaluations, twice if guided."""
        device = self.positions.device
        if isinstance(labels, int):
            labels = torch.full((labels,), self.n_labels)
        labels = torch.as_tensor(labels, dtype=torch.long, device=device)
        if not ((labels >= 0) & (labels <= self.n_labels)).all():
            raise ValueError(f"labels must be 0 ... {self.n_labels - 1}, or {self.n_labels}: none")
        none = torch.full_like(labels, self.n_labels)
        shape = (len(labels), self.n_tokens)
        path = [torch.randint(self.vocab_size, shape, generator=generator, device=device)]
        for k in range(n_steps):
            z, t = path[-1], torch.full(shape[:1], k / n_steps, device=device)
            log_p = self(z, t, none if guidance == 0 else labels)  # (N, B, V)
            if guidance not in (0, 1):
                log_p = guided(log_p, self(z, t, none), guidance)
            p = step_probabilities(log_p, z, n_steps - k).flatten(0, 1)  # (N * B, V)
            u = torch.rand(len(p), 1, generator=generator, device=device)
            path.append(draw(p, u).view(shape))
        return torch.stack(path) if with_path else path[-1]


def spread(u):
    """Times in [0, 1), one for each of u (N,), uniform and stratified over the batch."""
    return ((torch.arange(len(u), device=u.device) + u) / len(u)).clamp_max(1 - 1e-6)


def cross_entropy(prior, z_1, t, labels, u):
    """Training loss in nats per token: a scalar with gradient. u (N, 2B) decides z_t."""
    log_p = prior(noisy(z_1, t, u, prior.vocab_size), t, labels)
    return F.nll_loss(log_p.flatten(0, 1), z_1.flatten())


@torch.no_grad()
def flow_bits(prior, z, labels, generator, n):
    """The bound in bits per code, mean over codes z given labels, from n draws of z_t, and its
    standard error. Integrated over u with t = 1 - u^2, dt = 2 u du: with t uniform, rare jumps at
    rate 1 / (1 - t) would make the variance infinite."""
    rows = torch.cat([torch.randperm(len(z), generator=generator) for _ in range(0, n, len(z))])[:n]
    u = spread(torch.rand(n, generator=generator, dtype=torch.float64)).clamp_min(1e-4)
    bits = []
    for part in torch.arange(n).split(max(1, 2**21 // (prior.n_tokens * prior.vocab_size))):
        noise = torch.rand(len(part), 2 * prior.n_tokens, generator=generator)
        values = (z[rows[part]], 1 - u[part].square(), noise, labels[rows[part]])
        z_1, t, noise, y = (value.to(prior.positions.device) for value in values)
        z_t = noisy(z_1, t, noise, prior.vocab_size)
        rate = bound_rate(prior(z_t, t, y), z_1, z_t, t)
        bits.append(rate.cpu() * 2 * u[part] / math.log(2))
    bits = torch.cat(bits)
    return bits.mean().item(), (bits.std() / n**0.5).item()


# ---------------------------------------------------------------------------------------------
# Codes and priors of a run, kept in its folder.

CODE_NOISE, FLOW_NOISE, FLOW_VAL_NOISE = 16, 17, 18  # streams of randomness, next to data.py's


def digest_of_model(out_dir):
    with open(os.path.join(out_dir, "best.pt"), "rb") as file:
        return digest(file.read())


def load_prior(out_dir, device="cpu"):
    """The prior of a run, ready for use; its settings are in prior.config."""
    path = os.path.join(out_dir, "prior.pt")
    saved = load_checkpoint(path, ("size", "codes_of", "seconds"))
    prior = Prior(**saved["size"])
    restore(path, saved, model=prior)
    if saved["codes_of"] != digest_of_model(out_dir):
        raise UserError(f"{path}: best.pt has changed since; add --overwrite=True to train again")
    prior.config = saved["config"] | {key: saved[key] for key in ("step", "seconds")}
    return prior.to(device).eval().requires_grad_(False)


@torch.no_grad()
def load_codes(out_dir, model, data, n_draws, seed, size=250):
    """Codes (n, B) and labels (n,), int64, of the training and validation sets: z_train, y_train,
    z_val, y_val. If there are no labels, y is 0.

    They are drawn from q(z|x) once and kept in codes.pt. Each training example has n_draws codes,
    drawn in successive epochs; for image folders, each is of a different crop.
    """
    path = os.path.join(out_dir, "codes.pt")
    source = [digest_of_model(out_dir), data.key(), n_draws, seed]
    with suppress(Exception):  # not there yet, or damaged
        codes = torch.load(path, weights_only=True)
        if codes.pop("source") == source:
            return {key: value.long() for key, value in codes.items()}
        print(f"{path} is of another best.pt, data set, n_draws or seed: encoding again")
    n, n_tokens = n_draws * data.n_train, model.encoder.n_tokens
    labels = {split: getattr(data, f"y_{split}", None) for split in ("train", "val")}
    found = {"z_train": [], "y_train": [], "z_val": [], "y_val": []}
    bar = tqdm(total=n + data.n_val, desc="codes", leave=False, disable=None)

    def add(split, x, index, noise):
        z = model.encode(data.standardise(x), noise=noise).cpu()
        y = torch.zeros(len(z)) if labels[split] is None else labels[split][index]
        found[f"z_{split}"].append(z.int())
        found[f"y_{split}"].append(y.int())
        bar.update(len(z))

    last = -(-n // size)
    for step, x in enumerate(data.train_batches(seed, 0, last, size, 0, 1, n_workers)):
        noise = uniform_noise(CODE_NOISE, seed, step, size, (1, n_tokens), device=device)
        add("train", x, train_indices(data.n_train, seed, step, size), noise)
    noise = validation_noise(model, data.n_val, device=device)
    for x, index in data.val_batches(size, n_workers=n_workers):
        add("val", x, index, noise[index.to(device)])
    bar.close()
    codes = {key: torch.cat(values) for key, values in found.items()}
    codes |= {key: codes[key][:n] for key in ("z_train", "y_train")}  # cut the last batch
    write(path, as_bytes(torch.save, {**codes, "source": source}))
    return {key: value.long() for key, value in codes.items()}


def evenly(n, limit):
    """At most `limit` of n rows, evenly spaced: neighbours may have the same label."""
    limit = max(1, min(n, limit))
    return torch.arange(limit) * n // limit


def train(out_dir, n_tokens, vocab_size, n_labels, codes, stop):
    """Train a prior to max_steps, saved in prior.pt and prior.jsonl."""
    path, log_path = (os.path.join(out_dir, f"prior.{ending}") for ending in ("pt", "jsonl"))
    size = dict(n_tokens=n_tokens, vocab_size=vocab_size, n_labels=n_labels)
    size |= dict(width=width, n_heads=n_heads, n_layers=n_layers)
    torch.manual_seed(seed)
    prior = Prior(**size).to(device)
    optimizer = torch.optim.AdamW(prior.parameters(), fused=True)
    step, seconds = 0, 0.0
    if resume and os.path.exists(path):
        load_prior(out_dir)  # of the same best.pt?
        saved = load_checkpoint(path)
        check_same_run(out_dir, settings, saved["config"], MAY_DIFFER, saved["step"])
        restore(path, saved, model=prior, optimizer=optimizer)
        step, seconds = saved["step"], saved["seconds"]
    elif os.path.exists(path):
        os.remove(path)
    log, model_digest = Log(log_path, step), digest_of_model(out_dir)
    n = len(codes["z_train"])
    subset = evenly(len(codes["z_val"]), 2**15 // n_tokens)
    z_val, y_val = (codes[key][subset].to(device) for key in ("z_val", "y_val"))
    u_val = uniform_noise(FLOW_VAL_NOISE, 0, 0, len(z_val), (2 * n_tokens + 1,), device=device)
    bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None)
    started, stop.advice = time.perf_counter(), ""
    while step < max_steps:
        rate = min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * step / max_steps)) / 2
        optimizer.param_groups[0]["lr"] = lr * rate
        index = train_indices(n, seed, step, batch_size)
        u = uniform_noise(FLOW_NOISE, seed, step, batch_size, (2 * n_tokens + 2,), device=device)
        z_1, labels = (codes[key][index].to(device) for key in ("z_train", "y_train"))
        labels = torch.where(u[:, 1] < label_dropout, prior.n_labels, labels)
        loss = cross_entropy(prior, z_1, spread(u[:, 0]), labels, u[:, 2:])
        loss.backward()
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update()
        if step % 50 == 0:
            log.add({"step": step, "split": "train", "loss": loss.item()})
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if step % eval_interval == 0 or step == max_steps or stop.number:
            seconds += time.perf_counter() - started
            if step % eval_interval == 0 or step == max_steps:
                with torch.no_grad():
                    value = cross_entropy(prior, z_val, spread(u_val[:, 0]), y_val, u_val[:, 1:])
                log.add({"step": step, "split": "val", "loss": value.item()})
                bar.write(f"step {step:6d}  val cross-entropy {value:.4f} nats per token")
            log.sync()
            state = {"model": prior.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "seconds": seconds, "config": settings}
            state |= {"size": size, "codes_of": model_digest}
            write(path, as_bytes(torch.save, state))
            started = time.perf_counter()
        if stop.number:
            bar.close()
            stop.exit(f"at step {step}; the same command with --resume=True continues from here")
    bar.close()
    stop.advice = "the prior is trained; --sample=True makes table and pictures"


# ---------------------------------------------------------------------------------------------
# Evaluation and samples


def marginal_bits(codes, n_labels, vocab_size):
    """Bits per validation code with independent positions: by their marginals in training, and by
    the marginals of each label. Counts are smoothed, towards uniform and towards the marginals of
    all labels; the amount is the best for the validation codes."""
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(-1, 1, 1)
    z, y, z_val, y_val = codes.values()
    bits = torch.zeros(2, len(weights))
    for i in range(z.size(1)):
        counts = torch.zeros(max(n_labels, 1), vocab_size)
        counts.index_put_((y, z[:, i]), torch.ones(len(z)), accumulate=True)
        p = (counts.sum(dim=0) + weights / vocab_size) / (len(z) + weights)  # (4, 1, V)
        p_given = (counts + weights * p) / (counts.sum(dim=1, keepdim=True) + weights)
        bits[0] -= p[:, 0, z_val[:, i]].log2().mean(dim=1)
        bits[1] -= p_given[:, y_val, z_val[:, i]].log2().mean(dim=1)
    return bits.amin(dim=1).tolist()


def marginal_samples(codes, labels, generator):
    """Codes (N, B) for labels (N,) with independent positions: every token is taken from some
    training code with this label."""
    z = torch.empty(len(labels), codes["z_train"].size(1), dtype=torch.long)
    for label in labels.unique():
        known, where = codes["z_train"][codes["y_train"] == label], labels == label
        rows = torch.randint(len(known), z[where].shape, generator=generator)
        z[where] = known[rows, torch.arange(z.size(1))]
    return z


def load_classifier(data, n_labels, size=128):
    """A small convolutional classifier of the real images; trained once and cached."""
    channels, side, layers = data.shape[0], data.shape[1], []
    while side > 7:
        wider = min(128, max(32, 2 * channels))
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.ReLU()]
        channels, side = wider, (side + 1) // 2
    layers += [nn.Flatten(), nn.Linear(channels * side**2, 256), nn.ReLU(), nn.Dropout(0.5)]
    torch.manual_seed(0)
    net = nn.Sequential(*layers, nn.Linear(256, n_labels)).to(device)

    def fit():
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batches = data.train_batches(0, 0, classifier_steps, size, 0, 1, n_workers)
        bar = tqdm(batches, "classifier", classifier_steps, leave=False, disable=None)
        for step, x in enumerate(bar):
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / classifier_steps)
            y = data.y_train[train_indices(data.n_train, 0, step, size)].long().to(device)
            F.cross_entropy(net(data.standardise(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    net.load_state_dict(cached(f"classifier_{data.key()}_{classifier_steps}.pt", fit))
    return net.eval().requires_grad_(False)


def generate(prior, labels, with_path=False):
    """Codes for labels (N,), sampled by the settings, the same every time."""
    generator, size = torch.Generator(device).manual_seed(seed), prior.n_tokens * prior.vocab_size
    options = (guidance, n_steps, generator, with_path)
    parts = [prior.sample(part, *options) for part in labels.split(max(1, 2**22 // size))]
    return torch.cat(parts, dim=-2)


@torch.no_grad()
def measure(prior, model, data, codes, classifier):
    """The numbers of TABLE, for prior.json."""
    z, _, z_val, y_val = codes.values()
    n_tokens, n_labels, generator = prior.n_tokens, prior.n_labels, torch.Generator().manual_seed(0)
    row = {"step": prior.config["step"], "bits": n_tokens * math.log2(prior.vocab_size)}
    row["bits_marginals"], given_label = marginal_bits(codes, n_labels, prior.vocab_size)
    options, none = (generator, 2**17 // n_tokens), torch.full_like(y_val, n_labels)
    row["bits_flow"], row["bits_flow_error"] = flow_bits(prior, z_val, none, *options)
    if n_labels:
        row["bits_marginals_label"] = given_label
        row["bits_flow_label"], _ = flow_bits(prior, z_val, y_val, *options)
    subset = evenly(len(z_val), 2**15 // n_tokens)
    z_subset, y_subset = z_val[subset], y_val[subset]
    for t in TIMES:
        u = torch.rand(len(z_subset), 2 * n_tokens, generator=generator)
        values = (z_subset, torch.full((len(u),), t), y_subset, u)
        parts = zip(*(value.to(device).split(64) for value in values), strict=True)
        losses = [cross_entropy(prior, *part).item() * len(part[0]) for part in parts]
        row[f"ce_{t:g}"] = sum(losses) / len(u)

    labels = y_val[evenly(len(y_val), n_generated)]  # as frequent as in the validation set
    started = time.perf_counter()
    generated = generate(prior, labels).cpu()
    row["codes_per_second"] = len(labels) / (time.perf_counter() - started)
    row["evaluations"] = n_steps * (1 if guidance in (0, 1) else 2)
    new = Counter(map(tuple, generated.tolist()))
    known = {code for part in z.split(10_000) for code in map(tuple, part.tolist()) if code in new}
    row["copies"] = sum(new[code] for code in known) / len(labels)
    if classifier is None:
        return row

    def accuracy(images, y):
        """The share of images that the classifier assigns their label y. For binary data, images
        are made binary too: each pixel is 1 if its mean is above 1/2."""
        images = (x.round() if data.white == 1 else x for x in images)
        found = torch.cat([classifier(x).argmax(dim=1).cpu() for x in images])
        return (found == y).double().mean().item()

    def decoded(z):
        return (model.decode(part.to(device)).mean for part in z.split(250))

    real = (data.standardise(x) for x, _ in data.val_batches(250, n_workers=n_workers))
    row["accuracy_real"] = accuracy(real, y_val)
    row["accuracy_reconstructed"] = accuracy(decoded(z_val), y_val)
    drawn = marginal_samples(codes, labels, generator)
    row["accuracy_marginals"] = accuracy(decoded(drawn), labels)
    row["accuracy_flow"] = accuracy(decoded(generated), labels)
    return row


TIMES = (0.0, 0.25, 0.5, 0.75, 0.9)
TABLE = (
    ("steps of training", "step", "{:,}"),
    ("bits per code: B log2 V", "bits", "{:g}"),
    ("  independent positions", "bits_marginals", "{:.2f}"),
    ("  flow, at most", "bits_flow", "{:.2f}"),
    ("  independent positions, given the label", "bits_marginals_label", "{:.2f}"),
    ("  flow, given the label, at most", "bits_flow_label", "{:.2f}"),
    *((f"cross-entropy in nats per token, t = {t:g}", f"ce_{t:g}", "{:.3f}") for t in TIMES),
    ("accuracy of a classifier: real images", "accuracy_real", "{:.1%}"),
    ("  reconstructions", "accuracy_reconstructed", "{:.1%}"),
    ("  independent positions, given the label", "accuracy_marginals", "{:.1%}"),
    ("  flow, given the label", "accuracy_flow", "{:.1%}"),
    ("generated codes that are training codes", "copies", "{:.1%}"),
    ("network evaluations per code", "evaluations", "{}"),
    ("codes per second", "codes_per_second", "{:.0f}"),
)


def print_table(rows):
    """A column for each run."""
    lines = [("", *(row["run"] for row in rows))]
    for title, key, form in TABLE:
        lines.append((title, *(form.format(row[key]) if key in row else "-" for row in rows)))
    print_aligned(lines, n_left=1)


@torch.no_grad()
def draw_pictures(prior, model, data):
    """labels.png: a row for each label, a real image and generated ones; without labels, only
    generated ones. steps.png: z_t decoded from t = 0 to t = 1, a row per code."""
    is_motion, n_labels = len(data.shape) == 2, prior.n_labels

    def decode(z):
        return data.unit(model.decode(z.to(device)).mean).cpu()

    def draw_codes(z, columns):
        if not is_motion:
            return grid(decode(z), columns)
        frames = data.frames(model.decode(z.to(device)).mean)
        rows = [(str(i + 1), joint_positions(one)) for i, one in enumerate(frames)]
        return film(rows, range(0, FRAMES, 4))

    n = 1 if is_motion else 10
    path = generate(prior, torch.arange(n) * n_labels // n, with_path=True)  # (n_steps + 1, n, B)
    times = torch.linspace(0, n_steps, 11).round().long()
    steps = draw_codes(path[times].transpose(0, 1).flatten(0, 1), len(times))
    n = 1 if is_motion else images_per_row(data.shape[2])
    if not n_labels:
        return {
            "labels.png": draw_codes(generate(prior, torch.zeros(6 * n).long()), n),
            "steps.png": steps,
        }
    # Many labels are laid out in three blocks side by side, at most 63 of them.
    blocks, n = (3, min(n, 8)) if n_labels > 20 else (1, n)
    labels = data.y_val.long().unique()
    labels = labels[evenly(len(labels), 63)]
    first = torch.stack([(data.y_val == label).nonzero()[0, 0] for label in labels])
    images = decode(generate(prior, labels.repeat_interleave(n))).unflatten(0, (len(labels), n))
    height = -(-len(labels) // blocks)
    page = torch.ones(blocks * height, n + 3, *data.shape)
    real, kept = data.val_examples(first)
    page[: len(labels), 0][kept] = data.unit(data.standardise(real)).cpu()
    page[: len(labels), 2:-1] = images
    page = page.unflatten(0, (blocks, height)).transpose(0, 1).flatten(0, 2)
    return {"labels.png": grid(page, blocks * (n + 3)), "steps.png": steps}


MAY_DIFFER = {"data_dir", "resume", "overwrite", "sample", "max_steps", "eval_interval", "n_steps"}
MAY_DIFFER |= {"guidance", "n_generated", "classifier_steps", "device", "n_workers"}

if __name__ == "__main__":
    settings, out_dirs = configure(globals(), sys.argv[1:])
    counts = "n_layers width n_heads n_draws max_steps batch_size eval_interval n_steps n_generated"
    require(
        settings,
        (f"{counts} lr", lambda v: v > 0, "positive"),
        ("guidance classifier_steps seed n_workers", lambda v: v >= 0, "zero or more"),
        ("seed", lambda v: v < 2**32, "below 2**32"),
        ("label_dropout", lambda v: 0 <= v < 1, "in [0, 1)"),
        ("width", lambda v: v % n_heads == 0, "a multiple of n_heads"),
    )
    if not out_dirs:
        raise UserError("name at least one run: python prior.py out/glyphs_daps")
    device = setup_device(device)
    stop, rows, locks = StopSignal(), [], []
    for out_dir in out_dirs:
        stop.advice = "the same command with --resume=True continues"
        model = load(out_dir, "best", device)
        if isinstance(model, Gaussian):
            raise UserError(f"{out_dir}: the code of a Gaussian VAE is not discrete")
        data = load_data(model, data_dir)
        path = os.path.join(out_dir, "prior.pt")
        locks.append(claim(out_dir, [path], resume or sample, overwrite))
        config = load_prior(out_dir).config if sample else settings
        codes = load_codes(out_dir, model, data, config["n_draws"], config["seed"])
        y = getattr(data, "y_train", None)
        n_labels = 0 if y is None else int(y.max()) + 1
        if not sample:
            train(out_dir, model.encoder.n_tokens, model.encoder.vocab_size, n_labels, codes, stop)
        prior = load_prior(out_dir, device)
        classifier = load_classifier(data, n_labels) if n_labels and classifier_steps else None
        row = {"run": os.path.normpath(out_dir), "method": model.config["method"]}
        row |= {"guidance": guidance, **measure(prior, model, data, codes, classifier)}
        write(os.path.join(out_dir, "prior.json"), json.dumps(row, indent=2) + "\n")
        for name, picture in draw_pictures(prior, model, data).items():
            save_picture(os.path.join(out_dir, name), picture)
        rows.append(row)
    print_table(rows)
    print("pictures in each folder: labels.png, steps.png")
