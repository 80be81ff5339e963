"""Pictures: round ticks, correct means and bands, and no log that crashes them."""

import math
import statistics

import numpy as np
import pytest
import torch
from PIL import Image

from plots import (
    COLOURS,
    PANEL_SIZE,
    PANELS,
    PANELS_PER_ROW,
    draw_bars,
    draw_codes,
    draw_curves,
    draw_legend,
    draw_plot,
    grid,
    images_per_row,
    log_ticks,
    mean_and_deviation,
    points_of,
    stack,
    tick_labels,
    ticks,
    with_gap,
)

BLUE, ORANGE = COLOURS[:2]


def val(step, beta_elbo=-50.0, **changes):
    row = {"step": step, "split": "val", "log_px": -40.0, "beta_elbo": beta_elbo, "kl": 30.0}
    return row | {"psnr": 15.0} | changes


def panel(page, key):
    """The part of a page of curves that shows this key."""
    width, height = PANEL_SIZE
    i = [name for _, _, name, _ in PANELS].index(key)
    left, top = i % PANELS_PER_ROW * width, i // PANELS_PER_ROW * height
    return page.crop((left, top, left + width, top + height))


def has(picture, colour):
    return (np.asarray(picture) == colour).all(axis=-1).any()


@pytest.mark.parametrize(
    "low, span",
    [
        (low, span)
        for low in (-494_200, -110, -3.7, 0, 0.31, 1e-6)
        for span in (2e-6, 0.05, 1, 35, 7_300, 2e6)
        if span > 1e-3 * abs(low)  # as on every axis
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, span):
    found = ticks(low, low + span)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-6 * span <= t <= low + span * (1 + 1e-6) for t in found)
    step = (found[-1] - found[0]) / (len(found) - 1)
    digit = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digit - d) for d in (1, 2, 5)) < 1e-3
    assert all(abs(t / step - round(t / step)) < 1e-3 for t in found)  # multiples of the step


def test_ticks_of_a_few_axes():
    assert ticks(0, 1000, 4) == [0, 200, 400, 600, 800, 1000]
    assert ticks(-110, -75) == [-110, -100, -90, -80]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert [round(10**t, 6) for t in log_ticks(0.1, 1.1)] == [2, 5, 10]
    assert [round(10**t, 6) for t in log_ticks(-3.5, 1.5)] == [0.001, 0.01, 0.1, 1, 10]
    assert 4 <= len(log_ticks(-30.2, 8.3)) <= 9


def test_labels_of_ticks_are_short_and_tell_them_apart():
    assert tick_labels([0, 0.2, 0.4]) == ["0.0", "0.2", "0.4"]
    assert tick_labels([-110, -100]) == ["-110", "-100"]
    assert tick_labels([0, 2000, 4000]) == ["0", "2,000", "4,000"]
    assert tick_labels([0, 50_000, 100_000]) == ["0", "50k", "100k"]
    assert tick_labels([-494_200, -494_100]) == ["-494.2k", "-494.1k"]
    assert tick_labels([-1_000_000, -800_000]) == ["-1.0M", "-0.8M"]
    for values in ([0, 1e38], [1e-9, 2e-9], [0], [7]):
        labels = tick_labels(values)
        assert len(set(labels)) == len(values) and max(map(len, labels)) <= 8


def test_a_group_s_mean_and_deviation_are_over_the_steps_that_all_have():
    runs = [{1: 1.0, 2: 4.0, 3: 9.0}, {2: 6.0, 3: 9.5, 4: 0.0}, {1: 0.0, 2: 11.0, 3: 10.0}]
    (step, mean, deviation), (last, *_) = mean_and_deviation(runs)
    assert (step, mean, last) == (2, 7.0, 3)
    assert deviation == pytest.approx(statistics.stdev([4, 6, 11]))
    assert mean_and_deviation(runs[:1]) == [(1, 1.0, 0.0), (2, 4.0, 0.0), (3, 9.0, 0.0)]
    assert mean_and_deviation([runs[0], {}]) == mean_and_deviation([]) == []


def test_the_gap_is_training_log_p_less_validation_log_p():
    rewards = [-90.0, -50.0, -30.0, None]  # a skipped step has none
    log = [{"step": i, "split": "train", "reward": r} for i, r in enumerate(rewards)]
    later = {"step": 5, "split": "train", "reward": -1.0}
    *train, row, last = with_gap([*log, val(4, log_px=-45.0), later], n=2)
    assert train == log and last == later
    assert row == val(4, log_px=-45.0) | {"gap": 5.0}  # (-50 - 30) / 2 + 45
    assert with_gap([val(4)]) == [val(4)]  # nothing to compare with
    page = draw_curves({"a": [[*log, val(4), val(8)]]})
    assert has(panel(page, "gap"), BLUE)


def test_on_a_log_scale_the_mean_is_that_of_logarithms():
    logs = [[{"step": 1, "split": "train", "eta": eta}] for eta in (1.0, 100.0)]
    points = [points_of(log, "train", "eta", log_scale=True) for log in logs]
    ((_, mean, deviation),) = mean_and_deviation(points)
    assert (mean, deviation) == (1, pytest.approx(math.sqrt(2)))
    assert points_of([{"step": 1, "split": "train", "eta": 0.0}], "train", "eta", True) == {}


def test_a_band_reaches_one_deviation_up_and_down():
    """Of a plot from 0 to 1 with a mean of 0.5: measured in pixels in the middle of the panel."""
    curve = [(0, 0.5, 0.2), (100, 0.5, 0.2)]
    size, frame = (420, 300), slice(33, 256)
    page = np.asarray(draw_plot("", [(BLUE, curve)], (0, 1), size=size))[frame]
    empty = np.asarray(draw_plot("", [(BLUE, [(100, 0.5, 0.0)])], (0, 1), size=size))[frame]
    column = 200  # between two grid lines
    (rows,) = np.nonzero((page[:, column] != empty[:, column]).any(axis=-1))
    assert len(rows) == pytest.approx(2 * 0.2 / 1.1 * 224, abs=2)  # the axis is 1.1 long
    assert rows[0] + rows[-1] == pytest.approx(len(page), abs=2)  # the mean is in the middle
    light = page[rows[3], column]
    assert (light > BLUE).all() and (light[:2] < 255).all()  # a light shade of the line's colour


def test_one_log_is_a_line_without_a_band_and_several_are_one_line():
    logs = [[val(1, -60 + i), val(10, -50 + i)] for i in (0, 2)]
    seeds = draw_curves({"a": logs})
    single = draw_curves({"a": logs[:1]})
    assert seeds.height == single.height + 20  # the note that explains the band
    shades = [len(panel(p, "beta_elbo").getcolors(100_000)) for p in (seeds, single)]
    assert shades[0] > shades[1]


def test_a_method_without_a_beta_elbo_is_absent_from_that_panel_alone():
    vq = [val(step, None, kl=None, log_px=-30.0 - step) for step in (1, 2)]
    page = draw_curves({"DAPS": [[val(1), val(2)]], "VQ-VAE": [vq]})
    for key, present in (("log_px", True), ("psnr", True), ("beta_elbo", False), ("kl", False)):
        assert has(panel(page, key), ORANGE) == present, key
    assert has(panel(page, "beta_elbo"), BLUE)


@pytest.mark.parametrize(
    "log",
    [
        [],
        [val(1)],
        [val(step) for step in range(1, 9)],  # constant lines
        [val(1, 0.0, kl=0.0, psnr=0.0), val(2, 0.0, kl=0.0)],
        [val(1, math.nan, kl=math.inf), val(2, 1e38, kl=-1e38), val(3, 1e-30)],
        [{"step": 7, "split": "train", "ess": 0.5, "eta": 1e-12, "reward": None}, val(8)],
        [{"step": s, "split": "train", "ess": 1.0, "eta": 10.0**s} for s in range(1, 30)],
    ],
    ids=["empty", "single", "constant", "zero", "not finite", "one eta", "many decades"],
)
def test_curves_of_any_log_can_be_drawn(log):
    assert draw_curves({"a": [log], "b": [log, log], "c": [log, []], "d": []}).width == 1440


@pytest.mark.parametrize("n", [1, 2, 7, 14])
@pytest.mark.parametrize("length", [1, 30, 200])
def test_a_legend_below_the_panels_shows_every_label_in_its_colour(n, length):
    labels = [f"{'x' * length}{i}" for i in range(n)]
    page = draw_curves({label: [[]] for label in labels})
    assert page.height > 2 * PANEL_SIZE[1]
    above = page.crop((0, 0, page.width, 2 * PANEL_SIZE[1]))
    below = page.crop((0, 2 * PANEL_SIZE[1], *page.size))
    assert all(has(below, colour) for colour in COLOURS[:n])
    assert not any(has(above, colour) for colour in COLOURS[:n] if len(set(colour)) > 1)  # no grey
    pixels = np.asarray(below)
    assert (pixels[:, -20:] == 255).all() and (pixels[-5:] == 255).all()  # nothing is cut off
    assert len(set(COLOURS)) >= 14


def test_labels_that_are_too_long_keep_their_end():
    long = draw_legend(["x" * 500 + "seed_0"], 400)
    assert np.array_equal(long, draw_legend(["y" * 9 + "x" * 500 + "seed_0"], 400))
    assert not np.array_equal(long, draw_legend(["x" * 500 + "seed_1"], 400))


@pytest.mark.parametrize("channels, width", [(1, 28), (3, 32), (3, 64)])
def test_a_grid_shows_every_image_pixel_by_pixel(channels, width):
    images = torch.randint(256, (5, channels, width, width)) / 255
    scale = 2 if width < 64 else 1
    page = np.asarray(grid(images, 3)).reshape(2 * (scale * width + 4) + 4, -1, channels)
    side = scale * width
    tile = page[8 + side : 8 + 2 * side : scale, 8 + side : 8 + 2 * side : scale]  # the fifth
    assert np.array_equal(tile, (images[4] * 255).round().byte().permute(1, 2, 0))
    assert np.array_equal(grid(images.numpy(), 3), grid(images, 3))
    assert (page[8 + side :, -side:] == 255).all()  # where there is no sixth


def test_a_picture_of_images_is_about_as_wide_whatever_their_size():
    assert [images_per_row(width) for width in (28, 32, 64, 256)] == [16, 16, 8, 4]


def test_codes_are_darker_the_more_often_they_are_used():
    page = np.asarray(draw_codes(torch.tensor([[0, 1, 4, 16], [0, 0, 0, 0]])).convert("L"))
    cells = [page[30 + 8 * (v // 2) + 4, 24 + 8 * (v % 2) + 4] for v in range(4)]
    assert cells[0] == 255 and sorted(cells, reverse=True) == cells and len(set(cells)) == 4
    assert draw_codes(np.ones((1024, 1000))).height < 1500  # of long codes, the beginning


def test_bars_are_divided_by_the_shares_of_their_parts():
    page = np.asarray(draw_bars({"a": {"x": 30.0, "y": 10.0}, "b": {"x": 1.0, "y": 1.0}}))
    for middle, share in ((10, 0.75), (50, 0.5)):  # a row of pixels through each bar
        row = page[middle]
        blue, orange = ((row == colour).all(axis=-1).sum() for colour in (BLUE, ORANGE))
        assert blue / (blue + orange) == pytest.approx(share, abs=0.01)


def test_pictures_are_stacked_below_their_labels():
    grey, red = Image.new("L", (30, 10), 90), Image.new("RGB", (80, 20), "red")
    page = stack({"a": grey, "b": red}, margin=24)
    assert page.size == (80, 10 + 20 + 2 * 24)
    assert page.getpixel((29, 24)) == page.getpixel((0, 33)) == (90, 90, 90)
    assert page.getpixel((0, 58)) == page.getpixel((79, 77)) == (255, 0, 0)
    assert page.getpixel((70, 30)) == (255, 255, 255)  # right of the narrow one
    assert np.asarray(page.crop((0, 0, 80, 24))).min() < 128  # a label
