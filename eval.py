"""Evaluate checkpoints on the whole validation set: a table, eval.json, and pictures.

    python eval.py out/mnist_*             seeds of one run share a row (--per_run: a row for each)
    python eval.py docs/runs/short.jsonl   runs recorded with --record=FILE, without checkpoints
    python eval.py out/mnist_daps --search=64   also the best codes found in 64 decodings each

    model = load("out/glyphs_daps")
    codes = model.encode(images)        pixels in [0, 1], (N, C, height, width) -> (N, B) int64
    images = model.decode(codes).mean   and back

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

from configurator import UserError, configure  # isort: skip (first: it makes errors one line)

import glob
import json
import math
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

import fid
from build import build_model
from data import VAL_NOISE, cached, load_dataset, on_device, share, uniform_noise
from motion import motion_pictures
from plots import draw_codes, draw_curves, grid, images_per_row
from report import export, n_parameters, read_record, report, save_picture, thinned
from run import load_checkpoint, read_log, restore, setup_device, write

BATCH = 250  # examples evaluated at a time


def load(out_dir, checkpoint="best", device="cpu"):
    """The trained model of a run, ready for use; its settings are in model.config. It takes and
    returns pixels in [0, 1], and for motion frames as in the files: encode() takes (N, 32, 26)."""
    path = os.path.join(out_dir, f"{checkpoint}.pt")
    saved = load_checkpoint(path, ("config", "model", "step", "seconds", "x_shape"))
    try:
        model = build_model(saved["config"], saved["x_shape"])
    except AttributeError as error:
        raise UserError(f"{path} is of a version without the setting {error.name}") from None
    restore(path, saved, model=model)
    model.config = saved["config"] | {key: saved[key] for key in ("step", "seconds")}
    return model.to(device).eval().requires_grad_(False)


def load_data(model, data_dir=""):
    """The data set that a model was trained on."""
    config = model.config
    return load_dataset(config["dataset"], data_dir or config["data_dir"], config["image_size"])


# ---------------------------------------------------------------------------------------------
# metrics


def validation_noise(model, index, device):
    """The noise for the codes of validation examples, always the same: (n, 1, B)."""
    return uniform_noise(VAL_NOISE, 0, 0, index.to(device), (1, model.encoder.n_tokens))


def validation_codes(model, x, index, search=0):
    """Codes of validation examples x at index, and the KL of q to the prior: (N, B), (N,). They are
    drawn from q, always with the same noise. With search, they are the best found in so many
    decodings, and the KL is zero, as it is where there is no q."""
    if search:
        numbers = index.to(x.device)

        def noise(i, shape):
            return uniform_noise(VAL_NOISE, 0, i + 1, numbers, shape)

        return model.encode(x, search=search, noise=noise), x.new_zeros(len(x))
    noise = validation_noise(model, index, x.device)
    if model.discrete and model.has_kl:
        z, _, kl = model.encoder(x, 1, noise, with_kl=True)
        return z.squeeze(1), kl.squeeze(1)
    z = model.encode(x, noise=noise)
    return z, x.new_zeros(len(x)) if model.discrete else model.divergence(*model.moments(x))


@torch.no_grad()
def evaluate(model, data, beta, index, device, batch_size=BATCH, n_workers=0, search=0):
    """Means over the validation examples at index, with one code per x: metrics (a dict of floats,
    explained in docs/logged_metrics.md), and counts (B, V) of how often each position used each
    value. None where there is no q (VQ-VAE, FSQ, searched codes) or no discrete code. Processes
    share the work. The last batch is padded (not counted), so that compiled code sees one shape."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    was_training = model.training
    model.eval()
    n_tokens, vocab_size = model.encoder.n_tokens, model.encoder.vocab_size
    sums = torch.zeros(4 + len(data.error_names), dtype=torch.float64, device=device)
    counts = torch.zeros(n_tokens * vocab_size, dtype=torch.float64, device=device)
    offsets = torch.arange(n_tokens, device=device) * vocab_size
    index = index[share(len(index), rank, world_size)]
    for part, x, _ in data.val_batches(index, batch_size, n_workers):
        n = len(x)
        x = on_device(torch.cat([x, x[-1:].expand(batch_size - n, *x.shape[1:])]), device)
        part = torch.cat([part, part[-1:].expand(batch_size - n)])
        z, kl = validation_codes(model, x, part, search)  # (N, B), (N,)
        p = model.decode(z)
        mse = p.error(x).square().flatten(1).mean(dim=1).clamp_min(1e-10)  # (N,)
        values = (p.log_prob(x), kl, -10 * mse.log10(), torch.ones_like(mse), *data.errors(x, p))
        sums += torch.stack([t[:n].double().sum().to(device) for t in values])
        if model.discrete:
            used = (z + offsets)[:n].flatten()
            counts.index_add_(0, used, torch.ones_like(used, dtype=counts.dtype))
    if world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(counts)
    model.train(was_training)
    log_px, kl, psnr, _, *errors = (sums / sums[3]).tolist()
    counts = counts.view(n_tokens, vocab_size)
    marginal = counts / counts.sum(dim=1, keepdim=True)
    perplexity = torch.special.entr(marginal).sum(dim=1).exp().mean().item()
    has_kl = model.has_kl and not search
    metrics = {
        "beta_elbo": log_px - beta * kl if has_kl else None,
        "log_px": log_px,
        "kl": kl if has_kl else None,
        "psnr": psnr,
        "code_usage": (counts > 0).double().mean().item() if model.discrete else None,
        "perplexity": perplexity if model.discrete else None,
        **dict(zip(data.error_names, errors, strict=True)),
        "examples": int(sums[3]),
    }
    return metrics, counts if model.discrete else None


def one_line(metrics):
    """The metrics shown during training, as text."""
    names = {"beta-ELBO": "beta_elbo", "log p(x|z)": "log_px", "KL": "kl", "PSNR": "psnr"}
    shown = {name: metrics[key] for name, key in names.items() if metrics[key] is not None}
    return "  ".join(f"{name} {value:8.2f}" for name, value in shown.items())


@torch.no_grad()
def fid_score(model, data, inception, device, n_workers=0):
    """FID between reconstructions and the validation images, whose moments are cached."""
    index = data.val_index()

    def images(reconstructed):
        for part, x, _ in data.val_batches(index, BATCH, n_workers):
            x = on_device(x, device)
            yield model.decode(validation_codes(model, x, part)[0]).mean if reconstructed else x

    name = f"fid_{data.key('val')}_{fid.FID_SHA256[:8]}.pt"
    truth = cached(name, lambda: fid.image_moments(inception, images(False)))
    return fid.frechet_distance(*fid.image_moments(inception, images(True)), *truth)


# ---------------------------------------------------------------------------------------------
# pictures


@torch.no_grad()
def draw_pictures(model, data, device, search=0):
    """Pictures of reconstructions and of samples from the uniform prior, by file name. With search,
    also images above their reconstructions by drawn and by searched codes."""
    columns = 1 if data.name == "lafan" else images_per_row(data.shape[2])
    with torch.random.fork_rng(devices=[device] if "cuda" in device else []):  # the same every time
        torch.manual_seed(0)
        samples = model.sample(6 * columns).mean
    if data.name == "lafan":
        reconstructions = partial(reconstruct, model, data, device=device)
        return motion_pictures(data.segments["val"], reconstructions, samples)

    def rows(*stacks):  # a row of each in turn
        parts = zip(*(images.split(columns) for images in stacks), strict=True)
        return grid(torch.cat([images for row in parts for images in row]), columns)

    columns, pictures = min(columns, data.n_val), {"samples.png": grid(samples, columns)}
    index = data.val_index(columns * min(4, data.n_val // columns))  # whole rows
    x, drawn = reconstruct(model, data, index, device)
    if search:
        searched = reconstruct(model, data, index, device, search)[1]
        pictures["reconstructions_search.png"] = rows(x, drawn, searched)
    return pictures | {"reconstructions.png": rows(x, drawn)}


def reconstruct(model, data, index, device, search=0):
    """Validation examples and the decoder's means for one code of each."""
    x = on_device(data.read("val", index)[0], device)
    return x, model.decode(validation_codes(model, x, index, search)[0]).mean


def evaluate_run(
    out_dir, checkpoint="best", data_dir="", device="cpu", n_workers=0, inception=None, search=0
):
    """Evaluate a run and write eval.json and pictures to its folder. Returns it as in report.py."""
    if checkpoint == "best" and not os.path.exists(os.path.join(out_dir, "best.pt")):
        checkpoint = "last"
    model = load(out_dir, checkpoint, device)
    data, config = load_data(model, data_dir), model.config
    beta, index = config["beta_final"], data.val_index()
    metrics, counts = evaluate(model, data, beta, index, device, n_workers=n_workers)
    if data.shape[0] == 3:  # in colour
        metrics["fid"] = inception and fid_score(model, data, inception, device, n_workers)
    search = search if model.discrete else 0
    if search:
        started = time.perf_counter()
        found, _ = evaluate(model, data, beta, index, device, 50, n_workers, search)
        metrics |= {f"search_{k}": found[k] for k in ("log_px", "psnr", *data.error_names)}
        metrics["search_ms"] = (time.perf_counter() - started) / len(index) * 1000
        metrics["search"] = search
    bits = config["n_tokens"] * math.log2(config["vocab_size"])
    row = {"run": os.path.normpath(out_dir), "method": config["method"], "bits": bits, **metrics}
    row |= dict(zip(("encoder", "decoder"), n_parameters(model), strict=True))
    row |= {"steps": config["step"], "s_per_step": config["seconds"] / config["step"]}
    write(os.path.join(out_dir, "eval.json"), json.dumps(row, indent=2))
    pictures = draw_pictures(model, data, device, search)
    log = read_log(os.path.join(out_dir, "log.jsonl"))
    pictures["curves.png"] = draw_curves({row["run"]: [log]})
    if counts is not None:
        pictures["codes.png"] = draw_codes(counts)
    for name, picture in pictures.items():
        save_picture(os.path.join(out_dir, name), picture)
    return {"row": row, "config": config, "log": thinned(log), "pictures": pictures}


def evaluate_runs(sources, fid_weights="", curves="", per_run=False, record="", **options):
    """Evaluate runs with these options, or read them from records (*.jsonl), and report on all."""
    inception = fid.load_inception(fid_weights, options["device"]) if fid_weights else None
    runs = []
    for source in sources:
        if source.endswith(".jsonl"):
            runs += read_record(source)
        elif len(sources) > 1 and not glob.glob(os.path.join(glob.escape(source), "*.pt")):
            print(f"{source} is not a run: left out")  # python eval.py out/*
        else:
            runs.append(evaluate_run(source, inception=inception, **options))
    if not runs:
        raise UserError(f"none of these is a run: {', '.join(sources)}")
    if any("fid" in run["row"] and "pictures" in run for run in runs) and not inception:
        print(f"FID: needs --fid_weights=path to {fid.FID_WEIGHTS}, from {fid.FID_URL}")
    return report(runs, curves, per_run, record)


if __name__ == "__main__":
    checkpoint = "best"  # best: highest validation beta-ELBO, or log p(x|z) if it has none; last
    data_dir = ""  # where the data sets are; empty: the run's data_dir
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
    n_workers = 8  # imagenet, lafan: processes that read ahead, at most one per core
    search = 0  # decodings per example to spend on better codes; 0: none
    fid_weights = ""  # file with the weights of Inception, for FID; empty: no FID
    export_to = ""  # a folder for the model alone, to share: without optimizer and local paths
    curves = "out/curves.png"  # file for the curves of several runs in one picture
    per_run = False  # a row for every run, even if only seeds differ
    record = ""  # a file (*.jsonl) to add the rows, settings and curves of these runs to

    settings, out_dirs = configure(globals(), sys.argv[1:], may_be_zero=("n_workers",))
    if not out_dirs:
        raise UserError("name at least one run: python eval.py out/glyphs_daps")
    if record and not record.endswith(".jsonl"):
        raise UserError(f"record is {record!r}, must end in .jsonl")
    settings["device"] = setup_device(device)
    if settings.pop("export_to"):
        if len(out_dirs) > 1 or os.path.exists(os.path.join(export_to, "last.pt")):
            raise UserError("export_to takes one run, and a folder that holds none")
        export(out_dirs[0], checkpoint, export_to)
    known = [record] if os.path.exists(record) else []  # the runs that it holds are kept
    evaluate_runs(known + out_dirs, **settings)
