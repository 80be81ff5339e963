"""Tables and curves over runs and seeds, from what eval.py found; records of runs (*.jsonl).

A run is a dict: its row of the table, its config, its thinned log and, if it was just evaluated,
its pictures.
"""

import io
import json
import math
import os
import statistics
from collections import Counter

from PIL import Image

from configurator import UserError, settings_block
from plots import draw_curves, stack
from run import load_checkpoint, read_log, save, write

NO_PATHS = {"data_dir": "", "out_dir": ""}  # those of this machine mean nothing elsewhere
RECORDED = ("row", "config", "log")  # what --record keeps of a run
COLUMNS = {  # the key in a row, and how it is printed; docs/logged_metrics.md explains them
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
    "used": ("code_usage", "{:.0%}"),
    "perplexity": ("perplexity", "{:.0f}"),
    "steps": ("steps", "{:,.0f}"),
    "s/step": ("s_per_step", "{:.3f}"),
    "search": ("search", "{}"),
    "searched log p": ("search_log_px", "{:.2f}"),
    "searched PSNR": ("search_psnr", "{:.2f}"),
    "searched cm": ("search_cm", "{:.2f}"),
    "searched degrees": ("search_degrees", "{:.2f}"),
    "ms/code": ("search_ms", "{:.1f}"),
}
WITH_SPREAD = ("beta_elbo", "log_px", "psnr", "fid", "cm", "degrees")


def report(runs, curves="out/curves.png", per_run=False, record=""):
    """Print one table for all runs, draw their curves and keep a record; returns the rows."""
    runs = list({run["row"]["run"]: run for run in runs}.values())  # the later of equal names
    groups = group_by_seed(runs, per_run)
    print_table([summary([run["row"] for run in group]) for group in groups])
    if any("pictures" in run for run in runs):
        print("pictures in each folder: reconstructions.png, samples.png, codes.png, curves.png")
    if len(runs) > 1:
        names = [label([run["row"]["run"] for run in group]) for group in groups]
        names = [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
        logs = {n: [run["log"] for run in group] for n, group in zip(names, groups, strict=True)}
        save_picture(curves, draw_curves(logs))
        print(f"curves of all runs: {curves}")
        for name in ("samples.png", "codes.png"):  # of the first seed of each
            firsts = [run for run, *_ in groups if name in run.get("pictures", {})]
            if pages := {run["row"]["run"]: run["pictures"][name] for run in firsts}:
                save_picture(path := os.path.join(os.path.dirname(curves), name), stack(pages))
                print(f"{name} of all runs: {path}")
    if record:
        kept = [run | {"config": run["config"] | NO_PATHS} for run in runs]
        write_lines(record, ({key: run[key] for key in RECORDED} for run in kept))
    return [run["row"] for run in runs]


def group_by_seed(runs, per_run=False):
    """Lists of runs that have made the same number of steps and differ only in their seed and in
    settings that change no result. A seed counts once: its second run is in another group."""
    _, may_differ = settings_block(os.path.join(os.path.dirname(__file__), "train.py"))
    may_differ -= {"max_steps", "dtype"}
    may_differ |= {"seed", "overwrite", "step", "seconds"}  # overwrite: in old records
    groups, repeats = {}, Counter()
    for i, run in enumerate(runs):
        settings = sorted((k, v) for k, v in run["config"].items() if k not in may_differ)
        if run["config"].get("dataset") == "imagenet":  # any folder of images
            settings += [run["config"]["data_dir"], run["row"]["examples"]]
        key = i if per_run else repr([settings, [row["step"] for row in run["log"][-1:]]])
        same = key, run["config"]["seed"]
        groups.setdefault((key, repeats[same]), []).append(run)
        repeats[same] += 1
    return list(groups.values())


def label(names):
    """The name of a run or, of several, how their names begin and end."""
    start = os.path.commonprefix(names)
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}*{end}" if len(names) > 1 else start


def summary(group):
    """One row for a group of rows: mean and standard deviation of every number that all have and
    that may differ (sizes do not, the step of the best checkpoint may)."""
    if len(group) == 1:
        return group[0]
    row = group[0] | {"n": len(group), "run": label([row["run"] for row in group])}
    for key in group[0].keys() - {"run"}:
        values = [other.get(key) for other in group]
        if None in values:  # such as FID, if it was not computed for all
            row[key] = None
        elif isinstance(values[0], float) or len(set(values)) > 1:
            row[key] = statistics.mean(values)
            if math.isfinite(row[key]):  # unless a seed has diverged
                row[f"{key} std"] = statistics.stdev(values)
    return row


def print_table(rows):
    """Print rows, with the columns that any of them has, without the folder that all are in."""
    start = os.path.commonprefix([row["run"] for row in rows]).rfind("/") + 1 if rows[1:] else 0
    rows = [row | {"run": row["run"][start:]} for row in rows]

    def cell(row, key, form):
        spread = row.get(f"{key} std") if key in WITH_SPREAD else None
        text = "-" if row.get(key) is None else form.format(row[key])
        return f"{text} +- {form.format(spread)}" if spread else text

    columns = {k: c for k, c in COLUMNS.items() if any(row.get(c[0]) is not None for row in rows)}
    table = [list(columns), *([cell(row, *column) for column in columns.values()] for row in rows)]
    print_aligned(table, n_left=2)


def print_aligned(lines, n_left):
    """Lines of cells, the first n_left columns aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'<' if i < n_left else '>'}{w}}}" for i, w in enumerate(widths))
    for line in lines:
        print(form.format(*line).rstrip())


def thinned(log, n_train=40):
    """The rows of a log that curves need: all of validation, and up to n_train of training."""
    stride = len(log) // n_train + 1
    return [row for i, row in enumerate(log) if row["split"] == "val" or i % stride == 0]


def write_lines(path, rows):
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_record(path):
    """The runs in a file written with --record."""
    with open(path, encoding="utf-8") as file:
        try:
            return [{key: run[key] for key in RECORDED} for run in map(json.loads, file)]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a record, as --record=FILE writes it") from None


def save_picture(path, content):
    """Write a picture, an animation given as a list of frames, or text."""
    buffer = io.BytesIO()
    if isinstance(content, list):
        ms = [(30, 30, 40)[i % 3] for i in range(len(content))]  # GIFs count in steps of 10
        options = dict(append_images=content[1:], duration=ms, loop=0)
        content[0].save(buffer, "GIF", save_all=True, **options)
    elif isinstance(content, Image.Image):
        content.save(buffer, "PNG")
    write(path, buffer.getvalue() or content)


def export(out_dir, checkpoint, target):
    """Save the model of a run for others, and its curves: no optimizer, no path of this machine."""
    saved = load_checkpoint(os.path.join(out_dir, f"{checkpoint}.pt"))
    saved.pop("optimizer", None)
    saved["config"] |= NO_PATHS
    save(os.path.join(target, "best.pt"), saved)
    log = thinned(read_log(os.path.join(out_dir, "log.jsonl")))
    write_lines(os.path.join(target, "log.jsonl"), log)


def n_parameters(model):
    """Number of parameters of the recognition and the generative model, the latter with the code
    vectors. Eta, a value function and the scale of the logits are not counted."""
    learned = dict(model.named_parameters())
    if hasattr(model, "codebook"):
        learned["codebook"] = model.codebook  # a buffer if it is a running mean
    sizes = {"encoder": 0, "decoder": 0}
    for name, p in learned.items():
        if not name.startswith(("log_eta", "value.")) and not name.endswith("log_scale"):
            part = "encoder" if name.startswith(("encoder.", "posterior.")) else "decoder"
            sizes[part] += p.numel()
    return sizes["encoder"], sizes["decoder"]
