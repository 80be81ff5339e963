"""Pictures show every image, run and token they were given, and no log crashes them."""

import math
import statistics

import numpy as np
import pytest
import torch

from plots import COLOURS, PANELS, draw_codes, draw_curves, grid, mean_curve


def val(step, **values):
    return {"step": step, "split": "val", "log_px": -40.0, "kl": 30.0, "psnr": 15.0} | values


def train(step, **values):
    return {"step": step, "split": "train"} | values


def panel(page, key):
    """The part of a page of curves that shows this key."""
    i = [name for _, _, name, _ in PANELS].index(key)
    left, top = i % 4 * 360, i // 4 * 280
    return page.crop((left, top, left + 360, top + 280))


def has(picture, colour):
    return (np.asarray(picture) == colour).all(axis=-1).any()


@pytest.mark.parametrize("channels, width", [(1, 28), (3, 32), (3, 64)])
def test_a_grid_shows_every_image_pixel_by_pixel(channels, width):
    images = torch.randint(256, (5, channels, width, width)) / 255
    scale = 2 if width < 64 else 1
    side = scale * width
    page = np.asarray(grid(images, 3)).reshape(2 * side + 12, 3 * side + 16, channels)
    fifth = page[8 + side : 8 + 2 * side : scale, 8 + side : 8 + 2 * side : scale]
    assert np.array_equal(fifth, (images[4] * 255).round().byte().permute(1, 2, 0))
    assert (page[8 + side :, -side - 4 :] == 255).all()  # where there is no sixth
    assert np.array_equal(grid(images.numpy(), 3), grid(images, 3))


def test_codes_are_darker_the_more_often_they_are_used():
    page = np.asarray(draw_codes(torch.tensor([[0, 1, 4, 16], [0, 0, 0, 0]])).convert("L"))
    cells = [page[30 + 8 * (v // 2) + 4, 24 + 8 * (v % 2) + 4] for v in range(4)]
    assert cells[0] == 255 and sorted(cells, reverse=True) == cells and len(set(cells)) == 4


def test_a_curve_is_the_mean_and_deviation_of_the_seeds_at_the_steps_that_all_have():
    runs = [{1: 1.0, 2: 4.0, 3: 9.0}, {2: 6.0, 3: None}, {1: 0.0, 2: 11.0, 3: math.inf}]
    logs = [[val(step, kl=kl) for step, kl in run.items()] for run in runs]
    ((step, mean, deviation),) = mean_curve(logs, "val", "kl")
    assert (step, mean, deviation) == (2, 7, pytest.approx(statistics.stdev([4, 6, 11])))
    assert mean_curve(logs[:1], "val", "kl") == [(1, 1, 0), (2, 4, 0), (3, 9, 0)]
    logs = [[train(1, eta=eta)] for eta in (1.0, 100.0)]
    assert mean_curve(logs, "train", "eta", log_scale=True) == [(1, 1, pytest.approx(2**0.5))]


def test_a_method_without_a_kl_is_absent_from_that_panel_and_the_others_keep_their_colours():
    page = draw_curves({"VQ-VAE": [[val(1, kl=None, psnr=9.0)]], "DAPS": [[val(1), val(2)]]})
    assert has(panel(page, "psnr"), COLOURS[0]) and not has(panel(page, "kl"), COLOURS[0])
    assert has(panel(page, "psnr"), COLOURS[1]) and has(panel(page, "kl"), COLOURS[1])


NOT_FINITE = [val(1, psnr=math.nan, kl=math.inf), val(2, psnr=1e38, kl=-1e38), val(3, psnr=1e-30)]
DECADES = [train(step, ess=1.0, eta=10.0 ** (step - 20), reward=None) for step in range(40)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", [[], [val(0, kl=0)], NOT_FINITE, DECADES, [train(1, eta=0.0)]])
def test_curves_of_any_log_can_be_drawn(log):
    assert draw_curves({"a": [log], "b": [log, log], "c": [log, []]}).width == 4 * 360
