"""Pictures, drawn with Pillow from images, counts and the rows of log.jsonl; no model is needed.

    draw_curves({"DAPS": [log_of_seed_0, log_of_seed_1], "VQ-VAE": [log]}).save("curves.png")

Every function returns a PIL image. Images and counts are arrays or tensors on any device.
"""

import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, GRID, PAPER = (40, 40, 40), (225, 225, 225), (255, 255, 255)
COLOURS = ((31, 90, 180), (214, 84, 32), (30, 140, 80), (140, 60, 160), (190, 150, 20))
COLOURS += ((20, 170, 190), (230, 60, 130), (110, 110, 110), (130, 80, 40), (130, 190, 60))
COLOURS += ((120, 160, 240), (250, 170, 120), (90, 20, 60), (0, 70, 70))

PANELS = (  # title, split and key in the log, how the axis is drawn
    ("validation log p(x|z)", "val", "log_px", {}),
    ("validation beta-ELBO", "val", "beta_elbo", {}),
    ("validation PSNR (dB)", "val", "psnr", {}),
    ("validation KL (nats)", "val", "kl", {}),
    ("log p(x|z): training - validation", "val", "gap", {}),
    ("validation perplexity of a token", "val", "perplexity", {}),
    ("ESS / K", "train", "ess", {"y_range": (0, 1)}),
    ("eta (log scale)", "train", "eta", {"log_scale": True}),
)
PANEL_SIZE, PANELS_PER_ROW = (360, 280), 4


@functools.cache
def font(size=13):
    return ImageFont.load_default(size)


def to_numpy(values):
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


# ---------------------------------------------------------------------------------------------
# images and codes


def grid(images, columns, gap=4):
    """Images (n, 1 or 3, height, width) in [0, 1] in a grid with this many columns. Images narrower
    than 64 pixels are drawn at twice their size."""
    pixels = (to_numpy(images) * 255).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    n, height, width, channels = pixels.shape
    scale = 2 if width < 64 else 1
    height, width = height * scale, width * scale
    rows = -(-n // columns)
    mode = "L" if channels == 1 else "RGB"
    page = Image.new(mode, (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for i, image in enumerate(pixels):
        tile = Image.fromarray(image.squeeze(2) if channels == 1 else image)
        corner = (gap + i % columns * (width + gap), gap + i // columns * (height + gap))
        page.paste(tile.resize((width, height), Image.Resampling.NEAREST), corner)
    return page


def stack(pages, margin=24):
    """Pictures {label: page} one above the other, each below its label."""
    width = max(page.width for page in pages.values())
    height = sum(page.height + margin for page in pages.values())
    whole, top = Image.new("RGB", (width, height), PAPER), 0
    for label, page in pages.items():
        ImageDraw.Draw(whole).text((6, top + margin / 2), label, INK, font(), anchor="lm")
        whole.paste(page.convert("RGB"), (0, top + margin))
        top += page.height + margin
    return whole


def images_per_row(image_width):
    """How many images fit a row of 512 pixels, but at least 4 and at most 16."""
    return max(4, min(16, 512 // image_width))


def draw_codes(counts, columns=4, cell=8):
    """How often each position used each value, counts (B, V): one square per position with a cell
    for each of the V values, darker if used more often. For long codes, the first 16 tokens."""
    counts = to_numpy(counts)[:16]
    side = math.isqrt(counts.shape[1] - 1) + 1  # cells
    step_x, step_y = max(side * cell, 120) + 24, side * cell + 40
    rows = -(-len(counts) // columns)
    page = Image.new("RGB", (min(columns, len(counts)) * step_x + 24, rows * step_y + 16), PAPER)
    pen = ImageDraw.Draw(page)
    for i, count in enumerate(counts):
        left, top = 24 + i % columns * step_x, 30 + i // columns * step_y
        used = (count > 0).mean()
        pen.text((left, top - 20), f"token {i + 1}: {used:.0%} used", INK, font())
        for v, share in enumerate(count / max(count.max(), 1)):
            x, y = left + v % side * cell, top + v // side * cell
            colour = tuple(round(255 + (c - 255) * math.sqrt(share)) for c in COLOURS[0])
            pen.rectangle((x, y, x + cell - 1, y + cell - 1), fill=colour, outline=GRID)
    return page


# ---------------------------------------------------------------------------------------------
# axes


def ticks(low, high, n=5):
    """About n round numbers from low to high."""
    exponent = math.floor(math.log10((high - low) / n))
    step = min((m * 10**exponent for m in (1, 2, 5, 10)), key=lambda s: abs((high - low) / s - n))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, max(0, -exponent)) for k in range(first, last + 1)]


def log_ticks(low, high):
    """log10 of 1, 2, 5, 10, 20, ... from low to high; over many decades, only powers of ten."""
    digits = (1, 2, 5) if high - low < 3 else (1,)
    stride = math.ceil((high - low) / 8)  # decades between labels
    powers = (k for k in range(math.floor(low), math.ceil(high) + 1) if k % stride == 0)
    values = [k + math.log10(digit) for k in powers for digit in digits]
    return [value for value in values if low <= value <= high]


def tick_labels(values):
    """Evenly spaced ticks as text: one unit for all, and enough decimals to tell them apart."""
    largest = max(map(abs, values))
    step = values[1] - values[0] if len(values) > 1 else largest or 1
    scale, unit = (1, "") if largest < 1e5 else (1e3, "k") if largest < 1e6 else (1e6, "M")
    decimals = max(0, -math.floor(math.log10(step / scale) + 1e-9))
    if largest >= 1e9 or decimals > 5:
        return [f"{value:.3g}" for value in values]
    return [f"{value / scale:,.{decimals}f}{unit if value else ''}" for value in values]


def axis_range(values, log_scale):
    """The lowest and the highest value, with a margin wide enough for ticks of four digits."""
    low, high = min(values), max(values)
    if log_scale:
        low, high = math.floor(low), math.floor(high) + 1  # whole decades
    margin = max(0.05 * (high - low), 1e-3 * max(abs(low), abs(high))) or 0.5
    return low - margin, high + margin


# ---------------------------------------------------------------------------------------------
# curves


def points_of(log, split, key, log_scale=False):
    """{step: value} of a log's values for this key, as log10 on a log scale. Missing (None) and
    non-finite values are left out."""
    rows = ((row["step"], row.get(key)) for row in log if row["split"] == split)
    points = {step: value for step, value in rows if value is not None and math.isfinite(value)}
    if log_scale:
        return {step: math.log10(value) for step, value in points.items() if value > 0}
    return points


def with_gap(log, n=20):
    """A log with one more key in its validation rows: by how much log p(x|z) was higher in the last
    n training rows before them, unless they have it already. A growing gap is overfitting."""
    rewards, rows = [], []
    for row in log:
        if row["split"] == "train" and row.get("reward") is not None:
            rewards.append(row["reward"])
        elif rewards and row.get("log_px") is not None:
            row = {"gap": float(np.mean(rewards[-n:])) - row["log_px"]} | row
        rows.append(row)
    return rows


def mean_and_deviation(runs):
    """Runs {step: value} -> a list of (step, mean, standard deviation) at the steps all runs have.

    The standard deviation is over n - 1; for a single run it is 0.
    """
    curve = []
    for step in sorted(set.intersection(*map(set, runs))) if runs else []:
        values = [run[step] for run in runs]
        deviation = np.std(values, ddof=1) if len(runs) > 1 else 0
        curve.append((step, float(np.mean(values)), float(deviation)))
    return curve


def draw_plot(title, curves, y_range=None, log_scale=False, size=PANEL_SIZE):
    """Curves over steps: (colour, [(step, mean, deviation), ...]) each, drawn as a line with a band
    of one deviation on each side. With log_scale, values are logarithms to base 10."""
    page = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((size[0] / 2, 16), title, INK, font(15), anchor="mm")
    curves = [(colour, curve) for colour, curve in curves if curve]
    if not curves:
        pen.text((size[0] / 2, size[1] / 2), "nothing logged", INK, font(), anchor="mm")
        return page
    points = [point for _, curve in curves for point in curve]
    last_step = max(1, *(step for step, _, _ in points))
    edges = [mean + sign * deviation for _, mean, deviation in points for sign in (-1, 1)]
    low, high = axis_range(y_range or edges, log_scale)
    left, top, right, bottom = 66, 32, size[0] - 26, size[1] - 44

    def pixel(step, value):
        x = left + (right - left) * step / last_step
        return x, min(max(bottom - (bottom - top) * (value - low) / (high - low), top), bottom)

    values = log_ticks(low, high) if log_scale else ticks(low, high)
    labels = [f"{10**v:,.5g}" for v in values] if log_scale else tick_labels(values)
    for value, label in zip(values, labels, strict=True):
        _, y = pixel(0, value)
        pen.line((left, y, right, y), GRID)
        pen.text((left - 6, y), label, INK, font(), anchor="rm")
    steps = [step for step in ticks(0, last_step, 4) if step == int(step)]
    for step, label in zip(steps, tick_labels(steps), strict=True):
        x, _ = pixel(step, low)
        pen.line((x, top, x, bottom), GRID)
        pen.text((x, bottom + 12), label, INK, font(), anchor="mm")
    pen.text(((left + right) / 2, size[1] - 12), "step", INK, font(), anchor="mm")
    pen.rectangle((left, top, right, bottom), outline=INK)
    for colour, curve in curves:
        if any(deviation for *_, deviation in curve):
            upper = [pixel(step, mean + deviation) for step, mean, deviation in curve]
            lower = [pixel(step, mean - deviation) for step, mean, deviation in curve]
            paint(page, colour, "polygon", upper + lower[::-1], fill=50)  # translucent
    for colour, curve in curves:
        line = [pixel(step, mean) for step, mean, _ in curve]
        paint(page, colour, "line", line, fill=255, width=8, joint="curve")
        pen.circle(line[-1], 3, colour)
    return page


def paint(page, colour, shape, points, **options):
    """Draw a line or a polygon with smooth edges: at four times the size, then reduced."""
    mask = Image.new("L", (4 * page.width, 4 * page.height))
    draw = getattr(ImageDraw.Draw(mask), shape)
    draw([(4 * x, 4 * y) for x, y in points], **options)
    page.paste(colour, mask=mask.reduce(4))


def draw_curves(groups):
    """Validation and training metrics over steps: PANELS in two rows and a legend below.

    groups: {label: [log, ...]}, where a log is the list of rows of one log.jsonl. Every label has a
    colour. Several logs (of different seeds) are drawn as their mean and a band of one standard
    deviation, at the steps that all of them have; on a log scale, both are of logarithms.
    """
    width, height = PANEL_SIZE
    groups = {label: [with_gap(log) for log in logs] for label, logs in groups.items()}
    panels = []
    for title, split, key, options in PANELS:
        curves = []
        for i, logs in enumerate(groups.values()):
            runs = [points_of(log, split, key, options.get("log_scale")) for log in logs]
            curves.append((COLOURS[i % len(COLOURS)], mean_and_deviation(runs)))
        panels.append(draw_plot(title, curves, **options))
    several = any(len(logs) > 1 for logs in groups.values())
    note = "line: mean over seeds; band: one standard deviation" if several else ""
    legend = draw_legend(list(groups), PANELS_PER_ROW * width, note)
    page = Image.new("RGB", (PANELS_PER_ROW * width, 2 * height + legend.height), PAPER)
    for i, panel in enumerate(panels):
        page.paste(panel, (i % PANELS_PER_ROW * width, i // PANELS_PER_ROW * height))
    page.paste(legend, (0, 2 * height))
    return page


def draw_legend(labels, width, note="", row_height=20, margin=66):
    """Labels next to their colours, in as many columns as fit; a note below."""
    room = width - 2 * margin
    labels = [shortened(label, room - 60) for label in labels]
    column = 60 + max((font().getlength(label) for label in labels), default=0)
    columns = max(1, int(room // column))
    rows = -(-len(labels) // columns)
    page = Image.new("RGB", (width, (rows + bool(note)) * row_height + 20), PAPER)
    pen = ImageDraw.Draw(page)
    for i, label in enumerate(labels):
        x, y = margin + i % columns * column, (i // columns + 0.5) * row_height
        pen.line((x, y, x + 30, y), COLOURS[i % len(COLOURS)], 4)
        pen.text((x + 38, y), label, INK, font(), anchor="lm")
    pen.text((margin, (rows + 0.5) * row_height), note, INK, font(), anchor="lm")
    return page


def shortened(text, width):
    """The text, or as much of its end as fits: the end of a long path tells runs apart."""
    n = len(text)
    while n and font().getlength(text[-n:]) > width:
        n -= 1
    return text if n == len(text) else f"...{text[-n:]}"


def draw_bars(rows, width=920, height=40, left=150):
    """{label: {part: milliseconds}} as one bar per label, split into the shares of its parts."""
    parts = list(next(iter(rows.values())))
    legend = draw_legend(parts, width, margin=8)
    page = Image.new("RGB", (width, height * len(rows) + legend.height), PAPER)
    pen = ImageDraw.Draw(page)
    for i, (label, times) in enumerate(rows.items()):
        total, x, top = sum(times.values()), left, i * height + 6
        middle = top + (height - 12) / 2
        pen.text((8, middle), f"{label}, {total:,.0f} ms", INK, font(), anchor="lm")
        for part, colour in zip(parts, COLOURS, strict=False):
            end = x + (width - left - 10) * times[part] / total
            pen.rectangle((x, top, end, top + height - 12), colour)
            if end - x > 40:
                share = f"{times[part] / total:.0%}"
                pen.text(((x + end) / 2, middle), share, PAPER, font(), anchor="mm")
            x = end
    page.paste(legend, (0, height * len(rows) + 6))
    return page
