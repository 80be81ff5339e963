"""What a step costs, and what the gradient estimators are worth: the scripts in experiments/."""

import math

import pytest
import torch
from conftest import run

from experiments import bench, bias, correlation


def test_the_flops_of_a_step_are_those_counted_by_hand_and_grow_with_the_batch():
    B, V, H, K, L, patch = 8, 256, 64, 8, 2, 14 * 8
    settings = bench.settings_of("mnist", "daps_na", "cpu")
    block = B * (4 + 2 * 6) * H**2 + 2 * B * B * H
    decoder = K * (B * H * 64 + 64 * 256 + 256 * 28 * 28)
    embed = B * patch * H  # of x, which needs no gradient
    per_example = 2 * (2 * embed + 3 * (L * block + B * H * V + decoder))
    assert bench.step_flops(settings) == 256 * per_example
    settings = bench.settings_of("cifar10", "daps_na", "cpu") | {"batch_size": 3}
    assert bench.count_flops(bench.make_step(settings, "cpu")) == bench.step_flops(settings)


def test_memory_is_that_of_all_tensors_alive_at_once():
    x = torch.randn(2**18, requires_grad=True)  # 1 MiB

    def saved_for_backward():
        h = x
        for _ in range(10):
            h = h.exp()  # its gradient needs the result, which only autograd holds

    def one_after_another():
        for _ in range(5):
            torch.ones(2**18).view(2, -1).mul_(2)  # these two take no memory of their own

    assert bench.peak_memory(saved_for_backward, "cpu") == 10
    assert bench.peak_memory(one_after_another, "cpu") == 1


def test_the_table_agrees_with_itself():
    words = ("--datasets=mnist", "--methods=daps_na fsq", "--batch_size=64", "--seconds=0")
    title, _, *lines = run("experiments/bench.py", *words).stdout.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["daps_na", "fsq"] and "N = 64, float32" in title
    assert all(float(word.replace(",", "")) > 0 for line in lines for word in line.split()[1:])


def test_rloo_is_unbiased_and_gumbel_softmax_is_not():
    table = bias.study(n_draws=4000)  # from a fixed seed
    in_errors = {name: distance / error for name, (distance, error, _) in table.items()}
    assert in_errors["rloo, K = 2"] < 3 and in_errors["rloo, K = 8"] < 3
    assert in_errors["gumbel, tau = 1.0"] > 10 and in_errors["gumbel, tau = 0.5"] > 5
    assert table["grmck, tau = 0.5, M = 100"][2] < table["gumbel, tau = 0.5"][2]  # deviations


def test_the_total_correlation_is_that_of_a_token_which_repeats_another_and_of_independent_ones():
    first = torch.zeros(4, 4)  # z_1 is uniform, whatever was drawn
    copy, free = 100 * torch.eye(4), torch.tensor([0.0, 0.0, -100.0, -100.0]).expand(4, 4)
    for second, marginal, tc in ((copy, math.log(4), math.log(4)), (free, math.log(2), 0.0)):
        total, joint = correlation.entropies(torch.stack([first, second], dim=1))
        assert total.item() == pytest.approx(math.log(4) + marginal)
        assert (total - joint).item() == pytest.approx(tc, abs=1e-9)
