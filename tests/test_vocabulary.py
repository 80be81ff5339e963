"""Our changes for short budgets: credit per token, values that start as clusters, splits."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import config
from scipy.cluster.vq import kmeans2
from torch import nn

from baselines import kmeans
from build import build_model
from daps import DAPS, TokenEncoder
from vocabulary import split_values, start_from_clusters

# credit per token, where all codes can be enumerated

B, V, K, ETA, BETA = 10, 2, 8, 1e4, 0.3
LOGITS = torch.randn(B, V, generator=torch.Generator().manual_seed(0))


class Line(nn.Module):
    """Ten places in a row; each is decoded from its own token and its two neighbours."""

    def __init__(self, window):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(V, generator=g) * 2
        self.kernel = torch.randn(1, 1, 3, generator=g)
        self.window = window

    def log_prob(self, x, z):
        h = self.vectors[z].flatten(0, -2).unsqueeze(1)  # (N * K, 1, B)
        h = F.conv1d(h, self.kernel, padding=1).tanh().view(*z.shape)
        log_px = -2 * (h - 0.5).square()
        return log_px if self.window else log_px.sum(dim=-1)

    def credit(self, log_px):
        return F.avg_pool1d(log_px, self.window, 1, padding=self.window // 2) * self.window


def gradients(window, n_draws=20_000):
    """n_draws gradients in the logits, (n_draws, B, V), scaled like the ELBO's."""
    logits = LOGITS.repeat(n_draws, 1, 1).requires_grad_()  # a copy for every draw
    encoder = TokenEncoder(lambda x: logits, per_token=window > 0)
    encoder.n_tokens, encoder.vocab_size = B, V
    model = DAPS(encoder, Line(window), n_samples=K, eta_update="gradient")
    model.log_eta.data.fill_(math.log(ETA))
    noise = torch.rand(n_draws, K, B, generator=torch.Generator().manual_seed(2))
    loss, _ = model(torch.zeros(n_draws, 1), BETA, noise=noise)
    (draws,) = torch.autograd.grad(-n_draws * loss, logits)
    # Steps are smaller by eta + beta, and the baseline of each of K codes includes itself.
    return draws * (ETA + BETA) * K / (K - 1)


def exact_gradient():
    codes = torch.cartesian_prod(*[torch.arange(V)] * B)  # (1024, B)
    logits = LOGITS.clone().requires_grad_()
    log_q = logits.log_softmax(-1)[torch.arange(B), codes].sum(-1)
    reward = Line(0).log_prob(None, codes.unsqueeze(0))[0]
    (gradient,) = torch.autograd.grad((log_q.exp() * (reward - BETA * log_q)).sum(), logits)
    return gradient


def test_credit_over_the_receptive_field_has_the_same_mean_and_less_variance_and_over_less_a_bias():
    errors, noise, variance = {}, {}, {}
    for window in (0, 1, 3):
        draws = gradients(window)
        errors[window] = (draws.mean(dim=0) - exact_gradient()).abs()
        noise[window] = draws.std(dim=0) / len(draws) ** 0.5
        variance[window] = draws.var(dim=0).sum()
    for window in (0, 3):  # five standard errors, entry by entry; eta adds 1 / ETA
        assert (errors[window] < 5 * noise[window] + 1e-3).all()
    assert variance[3] < 0.8 * variance[0]
    assert (errors[1] > 10 * noise[1]).any()


@pytest.mark.parametrize("method", ("daps", "daps_na"))
def test_credit_per_token_changes_neither_metrics_nor_the_gradient_of_the_decoder(method):
    found = []
    for window in (0, 3):
        torch.manual_seed(0)
        settings = dict(method=method, n_tokens=16, vocab_size=8, width=16, credit_window=window)
        model = build_model(config(**settings), (3, 32, 32))
        x, noise = torch.rand(4, 3, 32, 32), torch.rand(4, *model.noise_shape)
        loss, metrics = model(x, 0.1, noise=noise)
        found.append((metrics, torch.autograd.grad(loss, list(model.decoder.parameters()))))
    (a, whole), (b, tokens) = found
    assert a["kl"].item() == pytest.approx(a["log_q"].item() + 16 * math.log(8), abs=1e-3)
    for key in ("reward", "log_q", "kl"):
        torch.testing.assert_close(b[key], a[key], rtol=1e-5, atol=0)
    for p, q in zip(whole, tokens, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-4 * p.abs().max().item() + 1e-3)


# clusters and copies


def model_of(method):
    settings = dict(n_tokens=4, vocab_size=12, width=16, n_samples=4, split_interval=1)
    return build_model(config(method=method, **settings), (1, 28, 28))


def test_kmeans_is_that_of_scipy_and_leaves_a_centre_without_rows_where_it_is():
    h = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    first = torch.cat([h[:9], torch.full((1, 3), 99.0)])
    found = kmeans(h, first, n_rounds=7)
    expected, _ = kmeans2(h.double().numpy(), first[:9].double().numpy(), iter=7, minit="matrix")
    torch.testing.assert_close(found[:9].double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[9], first[9])


@torch.no_grad()
@pytest.mark.parametrize("method", ("daps", "daps_na", "gumbel_na"))
def test_values_start_as_clusters_of_what_the_encoder_sees(method):
    """Logits fall with the squared distance to a centre, all at one rate, which makes the entropy a
    third of log V; the decoder's vectors are the centres, scaled; all positions have mean zero."""
    model, seen = model_of(method), []
    x = torch.rand(24, 1, 28, 28, generator=torch.Generator().manual_seed(1)).round()
    generator = torch.Generator().manual_seed(0)
    hook = model.encoder.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.encoder(x, 1, torch.rand(24, 1, 4, generator=generator))
    hook.remove()
    first = torch.randperm(24 * 4, generator=generator)[:12]
    h = seen[-1].view(24, 4, -1)
    start_from_clusters(model, x, torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.encoder.head.centre, h.mean(dim=0))
    flat = (h - h.mean(dim=0)).flatten(0, 1)  # (24 * 4, H)
    found, _ = kmeans2(flat.double().numpy(), flat[first].double().numpy(), iter=10, minit="matrix")
    centres = torch.from_numpy(found).float()
    scaled = centres / centres.square().mean().sqrt()
    torch.testing.assert_close(model.decoder.embed.weight, scaled, rtol=1e-3, atol=1e-3)
    log_q = model.encoder.head(h).log_softmax(dim=-1).flatten(0, 1)  # (24 * 4, V)
    closer = -torch.cdist(flat, centres).square() / 2
    rate = (log_q[:, 0] - log_q[:, 1]) / (closer[:, 0] - closer[:, 1])
    expected = (rate.median() * closer).log_softmax(dim=-1)
    torch.testing.assert_close(log_q, expected, rtol=1e-3, atol=1e-2)
    entropy = -(log_q.exp() * log_q).sum(dim=-1).mean().item()
    assert entropy == pytest.approx(math.log(12) / 3, rel=1e-3)


@pytest.mark.parametrize("method", ("daps", "daps_na", "gumbel", "gumbel_na", "rloo", "ppo"))
def test_values_that_training_draws_are_counted_and_rare_ones_become_copies(method):
    model = model_of(method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, noise = torch.rand(6, 1, 28, 28).round(), torch.rand(6, *model.noise_shape)
    model(x, 0.1, noise=noise)[0].backward()
    optimizer.step()
    n_codes = 6 * (1 if "gumbel" in method else 4)
    assert model.decoder.usage.sum() == 4 * n_codes
    model.eval().encode(x)
    model.decode(torch.zeros(1, 4, dtype=torch.long))
    assert model.decoder.usage.sum() == 4 * n_codes  # evaluation is not counted
    usage = [500, 1100, 150, 9, 10, 60, 40, 9, 150, 52, 200, 120]  # 5 % of an even share is 10
    model.decoder.usage.copy_(torch.tensor(usage))
    head, table, h = model.encoder.head, model.decoder.embed.weight, torch.randn(5, 16)
    head.log_scale.data.fill_(0.7)
    before = head(h, 0)  # (5, V)
    assert split_values(model, optimizer, torch.Generator(), noise=0.0) == 2
    copies = head(h, 0)[:, [1, 3, 7]]  # they share the probability of value 1
    torch.testing.assert_close(copies.logsumexp(dim=1), before[:, 1])
    embed = [model.encoder.tokens.embed.weight] if model.encoder.autoregressive else []
    for t in (table, head.bias, head.weight, *embed):  # both copy value 1 and its moments
        for rows in (t, *optimizer.state.get(t, {}).values()):
            assert rows.dim() == 0 or torch.equal(rows[[3, 7]], rows[[1, 1]])
    assert model.decoder.usage.sum() == 0


def test_the_noise_of_a_split_is_a_share_of_the_tables_deviation():
    model = model_of("daps_na")
    model.decoder.usage.copy_(torch.tensor([100] + [0] * 11))
    table, std = model.decoder.embed.weight.data, model.decoder.embed.weight.std()
    optimizer = torch.optim.AdamW(model.parameters())
    assert split_values(model, optimizer, torch.Generator().manual_seed(3), noise=0.2) == 11
    assert 0.15 < (table[1:] - table[0]).std() / std < 0.25  # 176 numbers: 0.2 +- 0.011
