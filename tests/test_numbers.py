"""The estimator's numbers on extremes, against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daps import ETA_MAX, ETA_MIN, ess_ratio, log_weights, solve_eta

EPS = 2.0**-23  # of float32
many = settings(derandomize=True, database=None, deadline=None, max_examples=250)
numbers = st.floats(-1e6, 1e6, width=32)
rewards = st.one_of(numbers, st.sampled_from((-1e6, 1e6, 0.0, -math.inf)))
log_qs = st.floats(-10_000, 0, width=32)
etas = st.floats(math.log(ETA_MIN), math.log(ETA_MAX)).map(math.exp)
betas = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))


@st.composite
def batches(draw, min_codes=1):
    """Rewards and log q (N, K): anything, all alike, or close together far from zero."""
    shape = draw(st.integers(1, 3)), draw(st.integers(min_codes, 9))
    kind = draw(st.sampled_from(("anything", "alike", "close")))
    count = shape[0] * shape[1]
    if kind == "anything":
        reward = draw(st.lists(rewards, min_size=count, max_size=count))
    elif kind == "alike":
        reward = [draw(rewards)] * count
    else:
        centre = draw(numbers)
        reward = [
            centre + d for d in draw(st.lists(st.floats(-3, 3), min_size=count, max_size=count))
        ]
    log_q = draw(st.lists(log_qs, min_size=count, max_size=count))
    return torch.tensor(reward).view(shape), torch.tensor(log_q).view(shape)


def exact_weights(reward, log_q, eta, beta):
    """q*/q, normalised, in float64: each weight from its differences to all others. An infinite
    reward is the limit of a large one, so all codes with reward -inf are treated alike."""
    reward, log_q = (t.double().numpy().clip(-1e300, 1e300) for t in (reward, log_q))
    better = reward[:, None, :] - reward[:, :, None]  # (N, k, j): how much better j is than k
    with np.errstate(over="ignore"):
        odds = np.exp((better - beta * (log_q[:, None, :] - log_q[:, :, None])) / (eta + beta))
    return 1 / odds.sum(axis=2)


def exact_ess(weights):
    return 1 / np.square(weights).sum(axis=1) / weights.shape[1]


def rounding(log_q, eta, beta):
    """How far a log weight may be off: -beta log q / (eta + beta), which may be large, loses some
    bits, and a reward loses no more than the term it has to offset."""
    return 4 * EPS * (30 + beta * log_q.abs().max().item() / (eta + beta))


@many
@given(batches(), etas, betas)
@example((torch.full((1, 4), -math.inf), -torch.arange(4.0)[None]), 1.0, 0.1)
@example((torch.tensor([[1e6, -1e6, 1e6]]), torch.zeros(1, 3)), ETA_MIN, 0.0)
def test_weights_and_ess_are_those_of_float64_on_extremes(batch, eta, beta):
    log_w = log_weights(*batch, torch.tensor(eta), beta)
    exact, tolerance = exact_weights(*batch, eta, beta), rounding(batch[1], eta, beta)
    assert log_w.isfinite().all()
    np.testing.assert_allclose(log_w.exp(), exact, rtol=tolerance, atol=1e-12)
    np.testing.assert_allclose(ess_ratio(log_w), exact_ess(exact), rtol=3 * tolerance)


@many
@given(batches(min_codes=2), betas, st.floats(0.05, 0.999))
def test_eta_solves_for_the_target_or_stands_at_the_end_it_cannot_pass(batch, beta, ess_target):
    eta = solve_eta(*batch, beta, ess_target).item()
    slack = rounding(batch[1], eta, beta)

    def ess(eta):
        return exact_ess(exact_weights(*batch, eta, beta)).mean()

    assert ETA_MIN * 0.999 <= eta <= ETA_MAX * 1.001
    assert ess(eta / 1.001) <= ess_target * (1 + 3 * slack) or eta < ETA_MIN * 1.001
    assert ess(eta * 1.001) >= ess_target * (1 - 3 * slack) or eta > ETA_MAX / 1.001


@many
@given(batches(), etas, betas)
def test_the_gradient_to_eta_is_finite_on_extremes(batch, eta, beta):
    log_eta = torch.tensor(math.log(eta), requires_grad=True)
    ess_ratio(log_weights(*batch, log_eta.exp(), beta)).mean().backward()
    assert log_eta.grad.isfinite()


def test_one_hopeless_example_does_not_decide_the_eta_of_the_others():
    torch.manual_seed(0)
    reward, log_q = 10 * torch.randn(8, 8), torch.randn(8, 8)
    alone = solve_eta(reward[1:], log_q[1:], 0.01, 0.5).item()
    reward[0] = -math.inf
    assert solve_eta(reward, log_q, 0.01, 0.5).item() == pytest.approx(alone, rel=0.5)


def test_a_reward_that_is_not_a_number_shows_in_the_weights():
    """It must not be hidden: the affected step is skipped."""
    reward = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    assert log_weights(reward, torch.zeros(2, 2), 1.0, 0.1).isnan().any(dim=1).tolist() == [1, 0]
