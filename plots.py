"""Pictures, drawn with Pillow from images, counts and the rows of log.jsonl; no model is needed.

    draw_curves({"DAPS": [log_of_seed_0, log_of_seed_1], "VQ-VAE": [log]}).save("curves.png")

Every draw function returns a PIL image. Images and counts are arrays or tensors on any device.
"""

import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

font = functools.cache(ImageFont.load_default)  # called with a size
INK, GRID, PAPER = (40, 40, 40), (225, 225, 225), (255, 255, 255)
COLOURS = [(31, 90, 180), (214, 84, 32), (30, 140, 80), (140, 60, 160)]
COLOURS += [(190, 150, 20), (20, 170, 190), (230, 60, 130), (110, 110, 110)]
# Lighter and darker: 24 curves differ in colour.
COLOURS += [tuple((c + 255 * light) // 2 for c in rgb) for light in (1, 0) for rgb in COLOURS]

PANELS = (  # title, split and key in the log, how the axis is drawn
    ("validation log p(x|z)", "val", "log_px", {}),
    ("validation beta-ELBO", "val", "beta_elbo", {}),
    ("validation PSNR (dB)", "val", "psnr", {}),
    ("validation KL (nats)", "val", "kl", {}),
    ("training log p(x|z)", "train", "reward", {}),
    ("validation perplexity of a token", "val", "perplexity", {}),
    ("ESS / K", "train", "ess", {"y_range": (0, 1)}),
    ("eta (log scale)", "train", "eta", {"log_scale": True}),
)
PANEL_SIZE = (360, 280)  # four in a row


def to_numpy(values):
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def grid(images, columns, gap=4):
    """Images (n, 1 or 3, height, width) in [0, 1] as one picture; tiny ones at twice their size."""
    pixels = (to_numpy(images) * 255).round().clip(0, 255).astype(np.uint8)
    if pixels.shape[3] < 64:
        pixels = pixels.repeat(2, axis=2).repeat(2, axis=3)
    border = ((0, -len(pixels) % columns), (0, 0), (gap, 0), (gap, 0))  # and fill the last row
    pixels = np.pad(pixels, border, constant_values=255).transpose(0, 2, 3, 1)
    rows = [np.hstack(pixels[i : i + columns]) for i in range(0, len(pixels), columns)]
    page = np.pad(np.vstack(rows), ((0, gap), (0, gap), (0, 0)), constant_values=255)
    return Image.fromarray(page.squeeze(2) if page.shape[2] == 1 else page)


def stack(pages, margin=24):
    """Pictures {label: page} one above the other, each below its label."""
    strips, width = [], max(page.width for page in pages.values())
    for label, page in pages.items():
        strip = Image.new("RGB", (width, margin + page.height), PAPER)
        ImageDraw.Draw(strip).text((6, margin / 2), label, INK, font(13), anchor="lm")
        strip.paste(page, (0, margin))
        strips.append(strip)
    return Image.fromarray(np.vstack(strips))


def images_per_row(image_width):
    """How many images fit a row of 512 pixels, but at least 4 and at most 16."""
    return max(4, min(16, 512 // image_width))


def draw_codes(counts, columns=4, cell=8):
    """How often each position used each value, counts (B, V): one square per position with a cell
    for each of the V values, darker if used more often. Of long codes, the first 16 tokens."""
    n_tokens, counts = len(counts), to_numpy(counts)[:16]
    side = math.isqrt(counts.shape[1] - 1) + 1  # cells
    step_x, step_y = max(side * cell, 120) + 24, side * cell + 40
    rows, columns = -(-len(counts) // columns), min(columns, len(counts))
    page = Image.new("RGB", (columns * step_x + 24, rows * step_y + 16), PAPER)
    pen = ImageDraw.Draw(page)
    for i, count in enumerate(counts):
        left, top = 24 + i % columns * step_x, 30 + i // columns * step_y
        pen.text((left, top - 20), f"token {i + 1}: {(count > 0).mean():.0%} used", INK, font(13))
        for v, share in enumerate(count / max(count.max(), 1)):
            x, y = left + v % side * cell, top + v // side * cell
            colour = tuple(round(255 + (c - 255) * math.sqrt(share)) for c in COLOURS[0])
            pen.rectangle((x, y, x + cell - 1, y + cell - 1), fill=colour, outline=GRID)
    return stack({f"the first 16 of {n_tokens} tokens": page}) if n_tokens > 16 else page


def mean_curve(logs, split, key, log_scale=False):
    """[(step, mean, standard deviation), ...] at the steps where all logs have a finite value; with
    log_scale, of log10 of the values. The deviation is over n - 1, and 0 for a single log."""
    runs = [{row["step"]: row.get(key) for row in log if row["split"] == split} for log in logs]
    steps = sorted(set().union(*runs))
    values = np.array([[run.get(step) for step in steps] for run in runs], float)  # None -> nan
    values[~np.isfinite(values) | (log_scale & (values <= 0))] = np.nan
    values = np.log10(values) if log_scale else values
    deviations = values.std(axis=0, ddof=1) if len(logs) > 1 else np.zeros(len(steps))
    curve = zip(steps, values.mean(axis=0).tolist(), deviations.tolist(), strict=True)
    return [point for point in curve if math.isfinite(point[1])]


def ticks(low, high, n, whole=False):
    """About n round numbers from low to high; with whole, only whole numbers."""
    power = 10.0 ** math.floor(math.log10((high - low) / n))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs((high - low) / s - n))
    step = max(step, 1) if whole else step
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw_plot(title, curves, y_range=None, log_scale=False, x_label="step"):
    """Curves over steps: (colour, [(step, mean, deviation), ...]) each, drawn as a line with a band
    of one deviation on each side. With log_scale, values are logarithms to base 10."""
    width, height = (4 * side for side in PANEL_SIZE)  # reduced at the end, for smooth lines
    page = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(page, "RGBA")  # blends translucent colours
    pen.text((width / 2, 64), title, INK, font(60), anchor="mm")
    points = [point for _, curve in curves for point in curve]
    if not points:
        pen.text((width / 2, height / 2), "nothing logged", INK, font(52), anchor="mm")
        return page.reduce(4)
    last_step = max(1, *(step for step, _, _ in points))
    edges = y_range or [mean + d for _, mean, deviation in points for d in (-deviation, deviation)]
    low, high = min(edges), max(edges)
    if log_scale:
        low, high = math.floor(low), math.floor(high) + 1  # whole decades
    margin = max(0.05 * (high - low), 1e-3 * max(abs(low), abs(high))) or 0.5
    low, high = low - margin, high + margin
    left, top, right, bottom = 280, 128, width - 120, height - 176

    def pixel(step, value):
        y = bottom - (bottom - top) * (value - low) / (high - low)
        return left + (right - left) * step / last_step, min(max(y, top), bottom)

    for value in ticks(low, high, 5, whole=log_scale):
        (_, y), label = pixel(0, value), 10.0**value if log_scale else value
        pen.line((left, y, right, y), GRID, 4)
        pen.text((left - 24, y), f"{label:,.7g}", INK, font(52), anchor="rm")
    for step in ticks(0, last_step, 3, whole=True):
        x, _ = pixel(step, low)
        pen.line((x, top, x, bottom), GRID, 4)
        pen.text((x, bottom + 48), f"{step:,.7g}", INK, font(52), anchor="mm")
    pen.text(((left + right) / 2, height - 48), x_label, INK, font(52), anchor="mm")
    pen.rectangle((left, top, right, bottom), outline=INK, width=4)
    for colour, curve in curves:
        upper = [pixel(step, mean + deviation) for step, mean, deviation in curve]
        lower = [pixel(step, mean - deviation) for step, mean, deviation in curve]
        pen.polygon(upper + lower[::-1], (*colour, 50))
    for colour, curve in curves:
        line = [pixel(step, mean) for step, mean, _ in curve]
        pen.line(line, colour, 8, joint="curve")
        pen.circle(line[-1], 14, colour)
    return page.reduce(4)


def draw_curves(groups, margin=66):
    """PANELS in two rows above a legend, for {label: [log, ...]}, where a log is the rows of one
    log.jsonl. Several logs, of different seeds, are drawn as their mean and a band."""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(groups))]
    panels = []
    for title, split, key, axis in PANELS:
        curves = [mean_curve(logs, split, key, "log_scale" in axis) for logs in groups.values()]
        shown = [pair for pair in zip(colours, curves, strict=True) if pair[1]]
        panels.append(draw_plot(title, shown, **axis))

    several = any(len(logs) > 1 for logs in groups.values())
    note = "line: mean over seeds; band: one standard deviation" if several else ""
    width, column = 4 * PANEL_SIZE[0], 60 + max(font(13).getlength(label) for label in groups)
    columns = max(1, int((width - 2 * margin) // column))
    bottom = 20 * -(-len(groups) // columns)  # of the labels
    legend = Image.new("RGB", (width, bottom + 20 * several + 20), PAPER)
    pen = ImageDraw.Draw(legend)
    for i, (label, colour) in enumerate(zip(groups, colours, strict=True)):
        x, y = margin + i % columns * column, 20 * (i // columns) + 10
        pen.line((x, y, x + 30, y), colour, 4)
        pen.text((x + 38, y), label, INK, font(13), anchor="lm")
    pen.text((margin, bottom + 10), note, INK, font(13), anchor="lm")
    return Image.fromarray(np.vstack([np.hstack(panels[:4]), np.hstack(panels[4:]), legend]))
