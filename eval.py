"""Evaluate checkpoints on the whole validation set: a table, eval.json, and pictures.

    python eval.py out/glyphs_daps out/mnist_daps
    python eval.py out/mnist_*          runs that differ only in their seed share a row: mean and
                                        standard deviation (--per_run=True: a row for each)
    python eval.py docs/runs/short.jsonl    runs that others recorded with --record=FILE: their
                                            table and curves, without checkpoints or data

From Python, load("out/glyphs_daps") returns a model with encode(x), decode(z) and sample(n).

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import json
import math
import os
import statistics
import sys
from collections import Counter

import torch
import torch.distributed as dist
from PIL import Image

import fid
from baselines import Gaussian, Quantised
from checkpoint import as_bytes, load_checkpoint, read_log, restore, setup_device, write
from configurator import UserError, configure, require
from data import DATA_DIR, VAL_NOISE, cached, load_dataset, uniform_noise
from models import build_model, n_parameters
from motion import FRAMES, LAFAN_VAL, film, frames_to_csv, joint_positions, side_by_side
from plots import draw_codes, draw_curves, grid, images_per_row, stack, with_gap


def load(out_dir, checkpoint="best", device="cpu"):
    """The trained model of a run, ready for use; its settings are in model.config. Its inputs and
    outputs are standardised: x = (pixels in [0, 1] - model.data_mean) / model.data_std."""
    path = os.path.join(out_dir, f"{checkpoint}.pt")
    saved = load_checkpoint(path, ("data_mean", "data_std", "x_shape", "seconds"))
    try:
        model = build_model(saved["config"], saved["x_shape"])
    except KeyError as error:
        raise UserError(f"{path} was written by a version without the setting {error}") from None
    restore(path, saved, model=model)
    for key in ("data_mean", "data_std"):
        model.register_buffer(key, saved[key], persistent=False)
    model.x_shape = tuple(saved["x_shape"])
    model.config = saved["config"] | {key: saved[key] for key in ("step", "seconds")}
    return model.to(device).eval().requires_grad_(False)


def load_data(model, data_dir=""):
    """The data set that a model was trained on, standardised as in training, on its device."""
    config = model.config
    data_dir = data_dir or config["data_dir"] or DATA_DIR
    data = load_dataset(config["dataset"], data_dir, config["image_size"])
    if model.x_shape != tuple(data.shape):
        found = f"those of {data.name} in {data_dir} are {tuple(data.shape)}"
        raise UserError(f"the run was trained on examples of shape {model.x_shape}, {found}")
    data = data.to(model.data_mean.device)  # a copy
    data.mean, data.std = model.data_mean, model.data_std
    return data


def export(out_dir, checkpoint, target):
    """Save the model of a run without its optimizer, and its curves, for others to load: a third of
    the size, and no path of this machine."""
    saved = load_checkpoint(os.path.join(out_dir, f"{checkpoint}.pt"))
    saved.pop("optimizer", None)
    saved["config"] |= NO_PATHS
    write(os.path.join(target, "best.pt"), as_bytes(torch.save, saved))
    write_lines(os.path.join(target, "log.jsonl"), thinned(read_log(log_path(out_dir))))


NO_PATHS = {"data_dir": "", "out_dir": ""}  # those of this machine mean nothing elsewhere
RECORDED = ("row", "config", "log")  # what --record keeps of a run


def log_path(out_dir):
    return os.path.join(out_dir, "log.jsonl")


def thinned(log, n_train=40):
    """The rows of a log that curves need: all of validation, and up to n_train of training."""
    stride = len(log) // n_train + 1
    rows = enumerate(with_gap(log))
    return [row for i, row in rows if row["split"] == "val" or i % stride == 0]


def write_lines(path, rows):
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_record(path):
    """The runs in a file written with --record: a list of what evaluate_run returns."""
    try:
        with open(path, encoding="utf-8") as file:
            runs = [{key: run[key] for key in RECORDED} for run in map(json.loads, file)]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        runs = []
    if not runs:
        raise UserError(f"{path} is not a record of runs, as --record=FILE writes it")
    return runs


# ---------------------------------------------------------------------------------------------
# metrics


def validation_noise(model, n, rank=0, world_size=1, device="cpu"):
    """The noise for the codes of the n validation examples, always the same: (n, 1, B)."""
    shape = (1, model.encoder.n_tokens)
    return uniform_noise(VAL_NOISE, 0, 0, n, shape, rank, world_size, device)


@torch.no_grad()
def evaluate(model, data, beta, batch_size, device, limit=0, n_workers=0):
    """Means over the validation set, or `limit` examples of it, with one code z ~ q(z|x) per x:
    metrics (a dict of floats, explained in docs/logged_metrics.md), and counts (B, V) of how often
    each position used each value. None where there is no q (VQ-VAE, FSQ) or no discrete code.

    Processes share the work. The last batch is padded with repeats, which are not counted, so
    compiled code sees one shape.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    was_training = model.training
    model.eval()
    n_tokens, vocab_size = model.encoder.n_tokens, model.encoder.vocab_size
    has_kl, discrete = not isinstance(model, Quantised), not isinstance(model, Gaussian)
    sums = torch.zeros(4 + len(data.error_names), dtype=torch.float64, device=device)
    counts = torch.zeros(n_tokens * vocab_size, dtype=torch.float64, device=device)
    offsets = torch.arange(n_tokens, device=device) * vocab_size
    noise = validation_noise(model, len(data.val_index(limit)), rank, world_size, device)
    for x, index in data.val_batches(batch_size, rank, world_size, limit, n_workers):
        n = len(x)
        if n == 0:  # none of the files could be decoded
            continue
        index = torch.cat([index, index[-1:].expand(batch_size - n)])
        x = torch.cat([x, x[-1:].expand(batch_size - n, *data.shape)])
        x = data.standardise(x)
        index = index.to(device, non_blocking=True)
        z, kl = model.encode(x, with_kl=True, noise=noise[index])  # (N, B), (N,)
        p = model.decode(z)
        error = (data.unit(p.mean) - data.unit(x)).square()
        mse = error.flatten(1).mean(dim=1).clamp_min(1e-10)  # (N,)
        kl = kl if has_kl else torch.zeros_like(mse)
        values = (p.log_prob(x), kl, -10 * mse.log10(), torch.ones_like(mse))
        values += data.errors(x, p.mean)
        sums += torch.stack([t[:n].double().sum().to(device) for t in values])
        if discrete:
            used = (z + offsets)[:n].flatten()
            counts.index_add_(0, used, torch.ones_like(used, dtype=counts.dtype))
    if world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(counts)
    model.train(was_training)
    if sums[3] == 0:
        raise UserError(f"{data.name}: no validation example could be read")
    log_px, kl, psnr, _, *errors = (sums / sums[3]).tolist()
    counts = counts.view(n_tokens, vocab_size)
    marginal = counts / counts.sum(dim=1, keepdim=True)
    perplexity = torch.special.entr(marginal).sum(dim=1).exp().mean().item()
    metrics = {
        "beta_elbo": log_px - beta * kl if has_kl else None,
        "log_px": log_px,
        "kl": kl if has_kl else None,
        "psnr": psnr,
        "code_usage": (counts > 0).double().mean().item() if discrete else None,
        "perplexity": perplexity if discrete else None,
        **dict(zip(data.error_names, errors, strict=True)),
        "examples": int(sums[3]),
    }
    return metrics, counts if discrete else None


def one_line(metrics):
    """The metrics shown during training, as text."""
    names = {"beta-ELBO": "beta_elbo", "log p(x|z)": "log_px", "KL": "kl", "PSNR": "psnr"}
    shown = {name: metrics[key] for name, key in names.items() if metrics[key] is not None}
    return "  ".join(f"{name} {value:8.2f}" for name, value in shown.items())


@torch.no_grad()
def fid_score(model, data, inception, batch_size, device, n_workers=0):
    """FID between reconstructions and the validation images themselves, both rounded to 8 bits.
    Moments of the images are cached."""
    noise = validation_noise(model, data.n_val, device=device)

    def images():
        for x, _ in data.val_batches(batch_size, n_workers=n_workers):
            yield data.unit(data.standardise(x))

    def reconstructions():
        for x, index in data.val_batches(batch_size, n_workers=n_workers):
            z = model.encode(data.standardise(x), noise=noise[index])
            yield data.unit(model.decode(z).mean)

    name = f"fid_{data.key()}_{fid.FID_SHA256[:8]}.pt"
    truth = cached(name, lambda: fid.image_moments(inception, images()))
    return fid.frechet_distance(*fid.image_moments(inception, reconstructions()), *truth)


# ---------------------------------------------------------------------------------------------
# pictures


def reconstruct(model, data, index, device):
    """The validation examples at this index that can be read, and the decoder's means for one code
    of each."""
    x, kept = data.val_examples(index)
    x = data.standardise(x)
    noise = validation_noise(model, data.n_val, device=device)[index][kept]
    return x, model.decode(model.encode(x, noise=noise)).mean


@torch.no_grad()
def draw_pictures(model, data, device):
    """Pictures of reconstructions and of samples from the uniform prior, by file name."""
    is_motion = data.name == "lafan"
    columns = 1 if is_motion else images_per_row(data.shape[2])
    with torch.random.fork_rng(devices=[device] if "cuda" in device else []):  # the same every time
        torch.manual_seed(0)
        samples = model.sample(6 * columns).mean
    if is_motion:
        return draw_motion(model, data, device, data.frames(samples))
    samples = grid(data.unit(samples), columns)
    columns = min(columns, data.n_val)
    index = data.val_index(min(4, data.n_val // columns) * columns)
    x, mean = reconstruct(model, data, index, device)
    n = len(x) // columns * columns  # whole rows
    rows = zip(x[:n].split(columns), mean[:n].split(columns), strict=True)
    pairs = grid(data.unit(torch.cat([image for row in rows for image in row])), columns)
    return {"reconstructions.png": pairs, "samples.png": samples}


def draw_motion(model, data, device, samples):
    """Stick figures: a segment of each validation file above its reconstruction, and samples. Also
    the first validation file, decoded segment by segment: all of it as CSV, its start as GIF."""

    def in_the_world(index):
        origin = data.val.origin(index)
        return [data.frames(x, origin) for x in reconstruct(model, data, index, device)]

    files = data.val.by_clip  # the segments of each validation file
    middles = torch.stack([segments[len(segments) // 2] for segments in files])
    rows = []
    for name, true, ours in zip(LAFAN_VAL, *in_the_world(middles), strict=True):
        rows.append((name.replace("_subject", "\nsubject "), joint_positions(true)))
        rows.append(("decoded", joint_positions(ours)))
    drawn = [(f"sample {i + 1}", joint_positions(f)) for i, f in enumerate(samples)]
    true, ours = (frames.flatten(0, 1) for frames in in_the_world(files[0]))
    return {
        "reconstructions.png": film(rows, range(0, FRAMES, 4)),
        "samples.png": film(drawn, range(0, FRAMES, 4)),
        "motion.csv": frames_to_csv(ours),
        "motion.gif": side_by_side(true[:224], ours[:224]),
    }


def save_picture(path, content):
    """Write a picture, an animation given as a list of frames, or text."""
    if isinstance(content, list):
        first, *rest = content
        options = dict(save_all=True, append_images=rest, duration=33, loop=0)
        content = as_bytes(lambda page, file: page.save(file, "GIF", **options), first)
    elif isinstance(content, Image.Image):
        content = as_bytes(Image.Image.save, content, "PNG")
    write(path, content)


# ---------------------------------------------------------------------------------------------
# the report


def evaluate_run(out_dir, checkpoint, data_dir, device, batch_size, n_workers, inception=None):
    """Evaluate a run and write eval.json and pictures to its folder. Returns its row of the table,
    its config, its thinned log and its pictures."""
    model = load(out_dir, checkpoint, device)
    data = load_data(model, data_dir)
    config = model.config
    options = (batch_size, device)
    metrics, counts = evaluate(model, data, config["beta_final"], *options, n_workers=n_workers)
    if data.shape[0] == 3:  # in colour
        ready = inception is not None
        metrics["fid"] = fid_score(model, data, inception, *options, n_workers) if ready else None
    encoder_size, decoder_size = n_parameters(model)
    row = {
        "run": os.path.normpath(out_dir),
        "method": config["method"],
        "bits": config["n_tokens"] * math.log2(config["vocab_size"]),
        **metrics,
        "encoder": encoder_size,
        "decoder": decoder_size,
        "steps": config["step"],
        "s_per_step": config["seconds"] / config["step"],
    }
    write(os.path.join(out_dir, "eval.json"), json.dumps(row, indent=2))
    pictures, log = draw_pictures(model, data, device), read_log(log_path(out_dir))
    pictures["curves.png"] = draw_curves({row["run"]: [log]})
    if counts is not None:
        pictures["codes.png"] = draw_codes(counts)
    for name, picture in pictures.items():
        save_picture(os.path.join(out_dir, name), picture)
    if skipped := data.n_val - metrics["examples"]:
        print(f"{out_dir}: {skipped} files could not be decoded and were left out")
    return {"row": row, "config": config, "log": thinned(log), "pictures": pictures}


def report(
    sources,
    checkpoint="best",
    data_dir="",
    device="cpu",
    batch_size=250,
    n_workers=0,
    fid_weights="",
    curves="out/curves.png",
    per_run=False,
    record="",
):
    """Evaluate runs, or read them from records (*.jsonl), and print one table for all."""
    try:
        inception = fid.load_inception(fid_weights, device) if fid_weights else None
    except ValueError as error:
        raise UserError(error) from None
    runs = []
    for source in map(str, sources):
        if source.endswith(".jsonl"):
            runs += read_record(source)
        else:
            options = (device, batch_size, n_workers, inception)
            runs.append(evaluate_run(source, checkpoint, data_dir, *options))
    runs = list({run["row"]["run"]: run for run in runs}.values())  # the later of equal names
    groups = group_by_seed(runs, per_run)
    print_table([summary([run["row"] for run in group]) for group in groups])
    if inception is None and any("fid" in run["row"] for run in runs):
        print(f"FID: needs --fid_weights=path to {fid.FID_WEIGHTS}, from {fid.FID_URL}")
    if any("pictures" in run for run in runs):
        print("pictures in each folder: reconstructions.png, samples.png, codes.png, curves.png")
    if len(runs) > 1:
        logs = {label(group): [run["log"] for run in group] for group in groups}
        save_picture(curves, draw_curves(logs))
        print(f"curves of all runs: {curves}")
        for name in ("samples.png", "codes.png"):  # of the first seed of each
            firsts = [run for run, *_ in groups if name in run.get("pictures", {})]
            if firsts:
                path = os.path.join(os.path.dirname(curves), name)
                pages = {run["row"]["run"]: run["pictures"][name] for run in firsts}
                save_picture(path, stack(pages))
                print(f"{name} of all runs: {path}")
    if record:
        runs = [run | {"config": run["config"] | NO_PATHS} for run in runs]
        write_lines(record, ({key: run[key] for key in RECORDED} for run in runs))
    return [run["row"] for run in runs]


def group_by_seed(runs, per_run=False):
    """Lists of runs that have made the same number of steps and differ only in their seed and in
    settings that change no result (or, with eval_interval, only which steps can be the best). A
    seed counts once: its second run is in another group.
    """
    no_matter = {"seed", "out_dir", "data_dir", "resume", "overwrite", "wandb_log", "n_workers"}
    no_matter |= {"log_interval", "eval_interval"}
    no_matter |= {"step", "seconds"}  # of the best checkpoint
    groups, repeats = {}, Counter()
    for i, run in enumerate(runs):
        settings = sorted((k, v) for k, v in run["config"].items() if k not in no_matter)
        key = i if per_run else repr([settings, [row["step"] for row in run["log"][-1:]]])
        groups.setdefault((key, repeats[key, run["config"]["seed"]]), []).append(run)
        repeats[key, run["config"]["seed"]] += 1
    return list(groups.values())


def label(group):
    """The name of a run or, of several, the first one's and their number."""
    first = group[0]["row"]["run"]
    return first if len(group) == 1 else f"{first} (n = {len(group)})"


def summary(group):
    """One row for a group of rows: mean and standard deviation of every number that all have and
    that may differ (sizes do not, the step of the best checkpoint may)."""
    if len(group) == 1:
        return group[0]
    row = group[0] | {"n": len(group), "run": os.path.commonprefix([r["run"] for r in group]) + "*"}
    for key in group[0].keys() - {"run"}:
        values = [other.get(key) for other in group]
        if None in values:  # such as FID, if it was not computed for all
            row[key] = None
        elif isinstance(values[0], float) or len(set(values)) > 1:
            row[key] = statistics.mean(values)
            if math.isfinite(row[key]):  # unless a seed has diverged
                row[f"{key} std"] = statistics.stdev(values)
    return row


COLUMNS = {
    "run": ("run", "{}"),
    "method": ("method", "{}"),
    "n": ("n", "{}"),
    "bits": ("bits", "{:g}"),
    "beta-ELBO": ("beta_elbo", "{:.2f}"),
    "log p(x|z)": ("log_px", "{:.2f}"),
    "KL": ("kl", "{:.2f}"),
    "PSNR": ("psnr", "{:.2f}"),
    "FID": ("fid", "{:.2f}"),
    "cm": ("cm", "{:.2f}"),
    "degrees": ("degrees", "{:.2f}"),
    "values used": ("code_usage", "{:.1%}"),
    "perplexity": ("perplexity", "{:.1f}"),
    "encoder": ("encoder", "{:,}"),
    "decoder": ("decoder", "{:,}"),
    "steps": ("steps", "{:,.0f}"),
    "s/step": ("s_per_step", "{:.3f}"),
}


def print_table(rows):
    """Print rows, with the columns that any of them has; mean +- standard deviation."""

    def cell(row, key, form):
        if row.get(key) is None:
            return "-"
        spread = row.get(f"{key} std", 0)
        return form.format(row[key]) + (f" +- {form.format(spread)}" if spread else "")

    columns = {k: column for k, column in COLUMNS.items() if any(column[0] in row for row in rows)}
    table = [list(columns), *([cell(row, *column) for column in columns.values()] for row in rows)]
    print_aligned(table, n_left=2)


def print_aligned(lines, n_left):
    """Lines of cells, the first n_left columns aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        aligned = [c.ljust(w) if i < n_left else c.rjust(w) for i, (c, w) in enumerate(cells)]
        print("  ".join(aligned).rstrip())


if __name__ == "__main__":
    checkpoint = "best"  # best: highest validation beta-ELBO, or log p(x|z) if it has none; last
    data_dir = ""  # where the data sets are; empty: the run's data_dir
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
    batch_size = 250  # examples at a time
    n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images
    fid_weights = ""  # file with the weights of Inception, for FID; empty: no FID
    export_to = ""  # a folder for the model alone, to share: without optimizer and local paths
    curves = "out/curves.png"  # file for the curves of several runs in one picture
    per_run = False  # a row for every run, even if only seeds differ
    record = ""  # a file (*.jsonl) for the rows, settings and curves of these runs

    settings, out_dirs = configure(globals(), sys.argv[1:])
    if not out_dirs:
        raise UserError("name at least one run: python eval.py out/glyphs_daps")
    require(
        settings,
        ("batch_size", lambda v: v >= 1, "at least 1"),
        ("n_workers", lambda v: v >= 0, "zero or more"),
    )
    if record and not record.endswith(".jsonl"):
        raise UserError(f"record is {record!r}, must end in .jsonl")
    settings["device"] = setup_device(device)
    if settings.pop("export_to"):
        if len(out_dirs) > 1:
            raise UserError(f"export_to takes one run; found {len(out_dirs)}")
        if os.path.realpath(export_to) == os.path.realpath(out_dirs[0]):
            raise UserError(f"export_to is {export_to!r}, must be another folder than the run's")
        export(out_dirs[0], checkpoint, export_to)
    report(out_dirs, **settings)
