"""Search: better codes for more decodings, never worse than the first."""

import json

import numpy as np
import pytest
import torch
from conftest import SMALL, assert_one_line, config, run_here, train_here
from PIL import Image
from torch import nn

from build import METHODS, build_model
from daps import DAPS, TokenEncoder
from data import uniform_noise
from search import around, candidates, groups, search

DISCRETE = [name for name in METHODS if name != "gaussian"]


def fixed_noise(n, seed=0):
    """Noise for n examples, the same on every call."""
    return lambda i, shape: uniform_noise(9, seed, i, torch.arange(n), shape)


def separable(N=5, B=6, V=7):
    """log p(x|z) as a sum of one number per token: its maximum is known."""
    table = torch.randn(N, B, V, generator=torch.Generator().manual_seed(0))

    def regions(x, z):  # (N, C, B)
        return table[x].unsqueeze(1).expand(-1, z.size(1), -1, -1).gather(3, z[..., None])[..., 0]

    return table, regions, torch.arange(N)


def small_model(method, shape, window=0):
    settings = dict(n_tokens=16, vocab_size=16, width=16, fsq_levels="4 4", n_samples=3)
    torch.manual_seed(0)
    return build_model(config(method=method, credit_window=window, **settings), shape).eval()


def test_a_search_finds_the_optimum_of_a_problem_that_can_be_enumerated():
    table, regions, x = separable()
    first = torch.zeros(5, 1, 6, dtype=torch.long)
    flat = lambda x, z: torch.zeros(5, 6, 7)  # noqa: E731 (every value is as likely)
    z = search(x, first, lambda x, z: regions(x, z).sum(2), flat, 200, fixed_noise(5))
    assert torch.equal(z, table.argmax(dim=2))


def test_groups_equal_one_token_at_a_time_where_windows_do_not_overlap():
    """With a region of zeros between any two tokens that matter, a token's window is its own."""
    table, regions, x = separable()
    lonely = torch.tensor([0.0, 1, 0, 0, 1, 0])  # no window of three holds two of these

    def log_prob(x, z):
        return regions(x, z) * lonely

    first = torch.zeros(5, 1, 6, dtype=torch.long)
    in_groups = search(x, first, log_prob, lambda x, z: table, 400, fixed_noise(5), (6,), 6)
    whole = lambda x, z: log_prob(x, z).sum(2)  # noqa: E731
    one_by_one = search(x, first, whole, lambda x, z: table, 400, fixed_noise(5), None, 6)
    matters = lonely > 0
    assert torch.equal(in_groups[:, matters], one_by_one[:, matters])
    assert torch.equal(in_groups[:, matters], table.argmax(dim=2)[:, matters])
    first = torch.randint(7, (5, 1, 6), generator=torch.Generator().manual_seed(1))
    z = search(x, first, regions, lambda x, z: 0 * table, 11, fixed_noise(5), (6,), 4)  # one round
    assert (regions(x, z[:, None]) >= regions(x, first)).all()  # token by token


@pytest.mark.parametrize("budget", [1, 2, 5, 17, 64])
@pytest.mark.parametrize("places", [None, (6,), (2, 3)])
def test_a_search_keeps_to_its_budget_and_never_gets_worse(budget, places):
    table, regions, x = separable()
    decoded = []

    def log_prob(x, z):
        decoded.append(z.size(1))
        return regions(x, z) if places else regions(x, z).sum(2)

    first = torch.randint(7, (5, 1, 6), generator=torch.Generator().manual_seed(1))
    z = search(x, first, log_prob, lambda x, z: table, budget, fixed_noise(5), places)
    assert sum(decoded) <= budget
    several = torch.randint(7, (5, 3, 6), generator=torch.Generator().manual_seed(2))
    found = regions(x, search(x, several, log_prob, lambda x, z: table, 3, None, places)[:, None])
    best = regions(x, several).sum(2).amax(1)
    assert torch.equal(found.sum(2)[:, 0], best)
    assert (regions(x, z[:, None]).sum(2) >= regions(x, first).sum(2)).all()


def test_proposals_are_asked_for_every_round_given_the_code_so_far_and_made_flatter(monkeypatch):
    import search as module

    table, regions, x = separable()
    asked, used, candidates = [], [], module.candidates

    def proposals(x, z):
        asked.append(z)
        return table

    monkeypatch.setattr(module, "candidates", lambda *a: used.append(a[0]) or candidates(*a))
    first = torch.zeros(5, 1, 6, dtype=torch.long)
    module.search(x, first, lambda x, z: regions(x, z).sum(2), proposals, 60, fixed_noise(5))
    assert len(asked) >= 2 and not torch.equal(asked[0], asked[1])
    assert torch.equal(used[0], 0.5 * table[:, :1])


def test_candidates_are_a_draw_without_replacement_that_leaves_out_the_present_value():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 1, 4)
    z = torch.full((20_000, 1), 2)
    u = torch.rand(20_000, 1, 4, generator=torch.Generator().manual_seed(0))
    found = candidates(logits, z, 3, u).squeeze(2)  # (20000, 3)
    assert (found.sort(dim=1).values == torch.tensor([0, 1, 3])).all()
    share = found[:, 0].bincount(minlength=4) / 20_000  # the first of them follows the softmax
    expected = torch.tensor([0.0, 1.0, -torch.inf, -1.0]).softmax(0)
    assert torch.allclose(share, expected, atol=0.015)  # four standard errors


def test_windows_are_sums_over_neighbours():
    log_px = torch.arange(12.0).view(1, 1, 12)
    assert around(log_px, (12,))[0, 0, [0, 5, 11]].tolist() == [1, 15, 21]
    assert around(log_px, (3, 4))[0, 0, 5].item() == sum((0, 1, 2, 4, 5, 6, 8, 9, 10))
    every = torch.cat(list(groups(12, (3, 4)))).sort().values
    assert torch.equal(every, torch.arange(12))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("method", DISCRETE)
def test_every_method_finds_better_codes_and_the_same_for_any_share_of_a_batch(method, shape):
    model = small_model(method, shape)
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0)).round()
    noise = fixed_noise(6)
    assert torch.equal(model.encode(x, search=1), model.encode(x, mode=True))
    z = model.encode(x, search=30, noise=noise)
    assert z.shape == (6, 16) and z.dtype == torch.int64
    first = model.decode(model.encode(x, mode=True)).log_prob(x)
    assert (model.decode(z).log_prob(x) >= first - 1e-3).all()
    assert model.decode(z).log_prob(x).mean() > first.mean() + 1e-3
    parts = [
        model.encode(x[i : i + 3], search=30, noise=lambda j, s, i=i: noise(j, s)[i : i + 3])
        for i in (0, 3)
    ]
    assert (torch.cat(parts) == z).float().mean() > 0.9  # rounding may change a near tie


def test_a_decoder_that_was_trained_with_a_window_is_searched_like_any_other():
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    models = (small_model("daps_na", (3, 32, 32), window) for window in (0, 3))
    assert torch.equal(*(model.encode(x, search=40, noise=fixed_noise(4)) for model in models))


def test_a_users_own_networks_can_be_searched():
    class Decoder(nn.Linear):
        def log_prob(self, x, z):
            h = self(nn.functional.one_hot(z, 4).flatten(-2).float())
            return -(h - x[:, None]).square().sum(2)

    net = nn.Sequential(nn.Linear(5, 12), nn.Unflatten(1, (3, 4)))
    model, x = DAPS(TokenEncoder(net), Decoder(12, 5)), torch.randn(8, 5)
    z = model.encode(x, search=100)  # enough for all values of all tokens, many times
    neighbours = z.view(8, 1, 1, 3).repeat(1, 3, 4, 1)  # one token changed to any value
    for t in range(3):
        neighbours[:, t, :, t] = torch.arange(4)
    with torch.no_grad():  # 64 // 16 draws next to the mode, tried first
        calls, whole = [], model.decoder.log_prob
        model.decoder.log_prob = lambda x, z: calls.append(z) or whole(x, z)
        model.encode(x, search=64)
        assert calls[0].shape == (8, 5, 3) and not torch.equal(calls[0][:, 1], calls[0][:, 2])
        model.decoder.log_prob = whole
    found = model.decoder.log_prob(x, z.unsqueeze(1))  # (8, 1)
    assert (found >= model.decoder.log_prob(x, neighbours.flatten(1, 2)) - 1e-5).all()
    assert (found > model.decoder.log_prob(x, model.encode(x, mode=True).unsqueeze(1))).any()
    model.decoder.log_prob = lambda x, z: (
        Decoder.log_prob(model.decoder, x, z)[..., None] / torch.ones(3)
    )
    assert model.encode(x, search=20).shape == (8, 3)  # a decoder for credit per token


def test_eval_adds_columns_and_a_picture_and_budget_0_changes_nothing(tmp_path):
    train_here(*SMALL, "--n_tokens=8", f"--out_dir={tmp_path}/run")
    plain = run_here("eval.py", f"{tmp_path}/run").output
    searched = run_here("eval.py", f"{tmp_path}/run", "--search=12").output
    row = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert row["search_log_px"] > row["log_px"]
    page = np.array(Image.open(tmp_path / "run" / "reconstructions_search.png"))[4:]
    assert not np.array_equal(page[60:120], page[120:180])  # drawn, searched
    assert "search" not in plain and " 12 " in searched
    assert (tmp_path / "run" / "reconstructions_search.png").exists()
    assert_one_line(run_here("eval.py", f"{tmp_path}/run", "--search=-1"), "search is -1")
