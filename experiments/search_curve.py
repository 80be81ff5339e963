"""PSNR against decodings: how much a search improves the codes of trained runs, on equal terms.

    python experiments/search_curve.py out/short/*_s0 --picture=out/search_curves.png

Letters: N examples in a batch, B tokens per code.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

from configurator import UserError, configure  # noqa: E402
from eval import evaluate, load, load_data  # noqa: E402
from plots import COLOURS, PAPER, draw_plot, font  # noqa: E402
from report import print_aligned, save_picture  # noqa: E402
from run import setup_device  # noqa: E402

data_dir = ""  # where the data sets are; empty: the run's data_dir
n_examples = 500  # validation examples
budgets = "1 4 16 64 256 1024"  # decodings per example
picture = ""  # file for the picture; empty: none


def curve(run):
    """[(decodings, log p(x|z), PSNR, ms per example)]; 0 decodings: codes as they are drawn."""
    model = load(run)
    if not model.discrete:
        raise UserError(f"{run}: the code of a Gaussian VAE is not discrete")
    data, rows = load_data(model, data_dir), []
    for budget in (0, *map(int, budgets.split())):
        started, index = time.perf_counter(), data.val_index(n_examples)
        found, _ = evaluate(model, data, 0.0, index, "cpu", batch_size=50, search=budget)
        ms = (time.perf_counter() - started) / len(index) * 1000
        rows.append((budget, found["log_px"], found["psnr"], ms))
    return rows


if __name__ == "__main__":
    settings, runs = configure(globals(), sys.argv[1:])
    if not runs:
        raise UserError("name at least one run: python experiments/search_curve.py out/glyphs_daps")
    if not all(map(str.isdecimal, budgets.split())):
        raise UserError(f"budgets is {budgets!r}, must be whole numbers")
    setup_device("cpu")
    torch.set_num_threads(1)
    lines, panels = [("run", "decodings", "log p(x|z)", "PSNR", "ms")], {}
    for run in runs:
        name, rows = os.path.basename(os.path.normpath(run)), curve(run)
        lines += [
            (name, str(b), f"{lp:.2f}", f"{psnr:.2f}", f"{ms:.1f}") for b, lp, psnr, ms in rows
        ]
        panels[name] = [(float(np.log2(b)), psnr, 0.0) for b, _, psnr, _ in rows if b]
    print_aligned(lines, n_left=1)
    if picture:
        pairs = list(zip(COLOURS, panels.values(), strict=False))
        plot = draw_plot("PSNR (dB) of searched codes", pairs, x_label="log2 of decodings")
        page = Image.new("RGB", (plot.width + 120, plot.height), PAPER)
        page.paste(plot)
        for i, (name, colour) in enumerate(zip(panels, COLOURS, strict=False)):
            ImageDraw.Draw(page).text((plot.width, 40 + 20 * i), name, colour, font(13))
        save_picture(picture, page)
