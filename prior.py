"""A prior over the codes of a trained run, by discrete flow matching, and samples from it.

    python prior.py out/mnist_daps                train on the codes of a run, draw samples
    python prior.py out/mnist_daps --guidance=2   the prior is there: only draw samples

    model, prior = load("out/mnist_daps"), load_prior("out/mnist_daps")
    images = model.decode(prior.sample(torch.tensor([3, 1, 4]))).mean

Letters: N codes in a batch, B tokens per code, V values per token, H width.
"""

import os
import sys

import torch
from tqdm import tqdm

from configurator import UserError, configure, settings_block
from data import cached, digest, on_device, train_indices, uniform_noise
from eval import BATCH, load, load_data, validation_noise
from flow import Flow, cross_entropy, spread
from motion import FRAMES, film, joint_positions
from plots import grid, images_per_row
from report import save_picture
from run import check_same_run, fit, load_checkpoint, restore, setup_device

# ---------------------------------------------------------------------------------------------
# Settings. Config files and --key=value override them; --help lists them.

n_layers = 2  # transformer blocks; the authors' number, as is that of width
width = 128  # H
search = 0  # learn the best codes found in so many decodings each; 0: drawn ones
batch_size = 128  # N; the authors: 64
lr = 2e-3  # peak rate of AdamW: warm-up, then a cosine down to 0; the authors: 1e-4, constant
label_dropout = 0.1  # share of codes whose label is hidden: guidance also needs p(z)
seed = 0  # of parameters, batches and noise
# may differ when a prior is continued (max_steps stretches the schedule)
max_steps = 2000  # the authors: 250,000
eval_interval = 500  # steps between validations, each of which saves prior.pt
n_steps = 40  # Euler steps of sampling; the authors' dt is 1/40
guidance = 1.0  # 0: ignore labels; 1: p(z | label); above: more typical of the label
data_dir = ""  # where the data sets are; empty: the run's data_dir
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
n_workers = 8  # imagenet, lafan: processes that read ahead, at most one per core
# ---------------------------------------------------------------------------------------------
# codes and prior of a run, kept in its folder

CODE_NOISE, FLOW_NOISE, FLOW_VAL_NOISE = 16, 17, 18  # streams of randomness, next to data.py's


def digest_of_model(out_dir):
    with open(os.path.join(out_dir, "best.pt"), "rb") as file:
        return digest(file.read())


def load_codes(out_dir, model, data, search=0, seed=0, n_workers=0):
    """Codes (n, B), int16 if they fit, and labels (n,), 0 if there are none: z_train, y_train,
    z_val, y_val. They are drawn once, for image folders of one random crop each, and kept in
    codes_*.pt. With search, they are the best found in so many decodings."""
    n, shape, device = data.n_train, (1, model.encoder.n_tokens), next(model.parameters()).device
    dtype = torch.int16 if model.encoder.vocab_size <= 2**15 else torch.int32

    def batches():
        steps, numbers, index = range(-(-n // BATCH)), torch.arange(BATCH), data.val_index()
        for step, batch in enumerate(data.train_batches(seed, steps, BATCH, n_workers=n_workers)):
            yield "train", *batch, uniform_noise(CODE_NOISE, seed, step, numbers.to(device), shape)
        for part, *batch in data.val_batches(index, BATCH, n_workers):
            yield "val", *batch, validation_noise(model, part, device)

    def encode():
        codes = {"z_train": [], "y_train": [], "z_val": [], "y_val": []}
        torch.manual_seed(seed)  # for the search
        for split, x, y, noise in tqdm(batches(), "codes", leave=False, disable=None):
            options = {"search": search} if search else {"noise": noise}  # what the prior learns
            z = model.encode(on_device(x, device), **options)
            codes[f"z_{split}"].append(z.to("cpu", dtype))
            codes[f"y_{split}"].append(y)
        codes = {key: torch.cat(parts) for key, parts in codes.items()}
        return codes | {key: codes[key][:n] for key in ("z_train", "y_train")}

    key = f"{digest_of_model(out_dir)}_{data.key('train', 'val')}_{search}_{seed}"
    return cached(os.path.abspath(os.path.join(out_dir, f"codes_{key}.pt")), encode)


def load_prior(out_dir, device="cpu", kind=Flow, name="prior"):
    """The prior (or policy) of a run, ready for use; its settings are in prior.config."""
    path = os.path.join(out_dir, f"{name}.pt")
    saved = load_checkpoint(path, ("config", "model", "step", "size", "codes_of"))
    prior = kind(**saved["size"])
    restore(path, saved, model=prior)
    if saved["codes_of"] != digest_of_model(out_dir):
        raise UserError(f"{path}: best.pt has changed since; delete {path} to train another {name}")
    prior.config = saved["config"] | {"step": saved["step"]}
    return prior.to(device).eval().requires_grad_(False)


def train(out_dir, codes, size):
    """Train a prior of this size to max_steps; its curve is in prior.jsonl."""
    torch.manual_seed(seed)
    prior = Flow(**size).to(device)

    def batch(split, rows, stream, seed, step):
        """Codes, times, labels, and noise that decides which labels are hidden, and z_t."""
        z_1, y = (codes[f"{letter}_{split}"][rows].to(device).long() for letter in "zy")
        numbers = torch.arange(len(rows), device=device)
        u = uniform_noise(stream, seed, step, numbers, (2 * prior.n_tokens + 2,))
        return z_1, spread(u[:, 0]), y, u[:, 1], u[:, 2:]

    def loss_at(step):
        rows = train_indices(len(codes["z_train"]), seed, step, batch_size)
        z_1, t, labels, u_label, u = batch("train", rows, FLOW_NOISE, seed, step)
        labels = torch.where(u_label < label_dropout, prior.n_labels, labels)
        return cross_entropy(prior, z_1, t, labels, u)

    # Validation codes may be sorted by label: in random order, every label has all times.
    generator, n = torch.Generator().manual_seed(0), 2**15 // prior.n_tokens
    order = torch.randperm(len(codes["z_val"]), generator=generator)[:n]

    @torch.no_grad()
    def validate():
        z_1, t, labels, _, u = batch("val", order, FLOW_VAL_NOISE, 0, 0)
        return cross_entropy(prior, z_1, t, labels, u).item()

    form, saved = "cross-entropy {:.4f} nats per token", dict(size=size)
    saved["codes_of"] = digest_of_model(out_dir)
    fit(os.path.join(out_dir, "prior.pt"), prior, settings, loss_at, validate, form, **saved)


def generate(prior, labels, guidance=1.0, n_steps=40, seed=0):
    """Codes for labels (N,), in parts that fit in memory; the same for the same seed."""
    generator = torch.Generator(prior.positions.device).manual_seed(seed)
    parts = labels.split(max(1, 2**22 // (prior.n_tokens * prior.vocab_size)))
    return torch.cat([prior.sample(part, guidance, n_steps, generator) for part in parts])


def draw_samples(prior, model, data, y_val):
    """For each label a real image and generated ones; without labels, generated ones."""

    def decode(labels):
        return model.decode(generate(prior, labels, guidance, n_steps, seed)).mean.cpu()

    if data.name == "lafan":
        rows = enumerate(decode(torch.zeros(6).long()))
        return film([(f"{i + 1}", joint_positions(x)) for i, x in rows], range(0, FRAMES, 4))
    columns = images_per_row(data.shape[2])
    if not prior.n_labels:
        return grid(decode(torch.zeros(6 * columns).long()), columns)
    labels = y_val.unique()[:63]
    first = torch.stack([(y_val == label).nonzero()[0, 0] for label in labels])
    side_by_side, columns = (3, min(columns, 8)) if prior.n_labels > 20 else (1, columns)
    samples = decode(labels.repeat_interleave(columns)).unflatten(0, (-1, columns))
    real = on_device(data.read("val", first)[0], "cpu").unsqueeze(1)  # (labels, 1, *shape)
    rows = torch.cat([real, torch.ones_like(real), samples, torch.ones_like(real)], dim=1)
    return grid(rows.flatten(0, 1), side_by_side * (columns + 3))


if __name__ == "__main__":
    settings, out_dirs = configure(globals(), sys.argv[1:], may_be_zero=("guidance", "n_workers"))
    if width % 4 or label_dropout >= 1 or seed >= 2**32:
        raise UserError("width must be a multiple of 4, label_dropout below 1, seed below 2**32")
    if not out_dirs:
        raise UserError("name at least one run: python prior.py out/glyphs_daps")
    device, (_, may_differ) = setup_device(device), settings_block(__file__)
    for out_dir in out_dirs:
        model = load(out_dir, device=device)
        if not model.discrete:
            raise UserError(f"{out_dir}: the code of a Gaussian VAE is not discrete")
        data, path = load_data(model, data_dir), os.path.join(out_dir, "prior.pt")
        if os.path.exists(path):
            check_same_run(path, settings, load_prior(out_dir).config, may_differ, step=0)
        codes = load_codes(out_dir, model, data, search, seed, n_workers)
        size = dict(n_tokens=model.encoder.n_tokens, vocab_size=model.encoder.vocab_size)
        size |= dict(n_labels=data.n_labels, width=width, n_layers=n_layers)
        train(out_dir, codes, size)
        page = draw_samples(load_prior(out_dir, device), model, data, codes["y_val"])
        save_picture(os.path.join(out_dir, "labels.png"), page)
        print(f"samples: {os.path.join(out_dir, 'labels.png')}")
