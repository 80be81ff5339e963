"""Credit per token, k-means start, splitting and the scale of logits: what they change, and what
they must not."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import nn

from baselines import kmeans
from configurator import defaults
from daps import DAPS, ess_ratio, log_weights, solve_eta
from models import (
    MotionDecoder,
    ResNetDecoder,
    TiedHead,
    build_model,
    draw,
    split_values,
    start_from_clusters,
)

# ---------------------------------------------------------------------------------------------
# credit per token, where all codes can be enumerated

B, V, K, ETA, BETA = 10, 2, 8, 1e4, 0.3


class Table(nn.Module):
    """q(z|x) = prod_t q(z_t), with a copy of the logits, and so a gradient, for every draw."""

    n_tokens, vocab_size = B, V

    def __init__(self, n_draws, per_token):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(
            torch.randn(B, V, generator=g).repeat(n_draws, 1, 1)
        )  # (N, B, V)
        self.per_token = per_token

    def forward(self, x, n_samples, noise):
        log_q = self.logits.log_softmax(-1).unsqueeze(1)  # (N, 1, B, V)
        z = (noise > log_q[..., 0].exp().detach()).long()  # (N, K, B)
        log_q = log_q.expand(-1, n_samples, -1, -1).gather(-1, z.unsqueeze(-1)).squeeze(-1)
        return z, log_q if self.per_token else log_q.sum(dim=-1)


class Line(nn.Module):
    """Ten places in a row; each is decoded from its own token and its two neighbours."""

    def __init__(self, window, per_token):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(V, generator=g) * 2
        self.kernel = torch.randn(1, 1, 3, generator=g)
        self.window, self.per_token = window, per_token

    def log_prob(self, x, z):
        h = self.vectors[z].flatten(0, -2).unsqueeze(1)  # (N * K, 1, B)
        h = F.conv1d(h, self.kernel, padding=1).tanh().view(*z.shape)
        log_px = -2 * (h - 0.5).square()
        return log_px if self.per_token else log_px.sum(dim=-1)

    def credit(self, log_px):
        return F.avg_pool1d(log_px, self.window, 1, padding=self.window // 2) * self.window


def gradients(window, per_token, n_draws=20_000):
    """n_draws gradients in the logits, (n_draws, B, V), scaled like the ELBO's."""
    encoder, decoder = Table(n_draws, per_token), Line(window, per_token)
    model = DAPS(encoder, decoder, n_samples=K, eta_update="gradient")
    model.log_eta.data.fill_(math.log(ETA))
    noise = torch.rand(n_draws, K, B, generator=torch.Generator().manual_seed(2))
    loss, _ = model(torch.zeros(n_draws, 1), BETA, noise=noise)
    (draws,) = torch.autograd.grad(-n_draws * loss, encoder.logits)
    # Steps are smaller by eta + beta, and the baseline of each of K codes includes itself.
    return draws * (ETA + BETA) * K / (K - 1)


def exact_gradient():
    codes = torch.cartesian_prod(*[torch.arange(V)] * B)  # (1024, B)
    logits = Table(1, False).logits[0].detach().requires_grad_()
    log_q = logits.log_softmax(-1)[torch.arange(B), codes].sum(-1)
    reward = Line(3, False).log_prob(None, codes.unsqueeze(0))[0]
    (gradient,) = torch.autograd.grad((log_q.exp() * (reward - BETA * log_q)).sum(), logits)
    return gradient


def test_credit_over_the_receptive_field_has_the_same_mean_and_less_variance():
    exact = exact_gradient()
    whole, token = gradients(0, per_token=False), gradients(3, per_token=True)
    for draws in (whole, token):  # five standard errors, entry by entry; eta adds 1 / ETA
        error = (draws.mean(dim=0) - exact).abs()
        assert (error < 5 * draws.std(dim=0) / len(draws) ** 0.5 + 1e-3).all()
    assert token.var(dim=0).sum() < 0.8 * whole.var(dim=0).sum()


def test_credit_over_less_than_the_receptive_field_is_biased():
    exact, draws = exact_gradient(), gradients(1, per_token=True)
    error = (draws.mean(dim=0) - exact).abs()
    assert (error > 10 * draws.std(dim=0) / len(draws) ** 0.5).any()


def test_weights_and_eta_of_tokens_are_those_of_as_many_examples():
    g = torch.Generator().manual_seed(0)
    reward, log_q = torch.randn(2, 5, K, B, generator=g) * 3
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (reward, log_q)]  # (5 * B, K)
    eta = solve_eta(reward, log_q, 0.1, 0.4)
    torch.testing.assert_close(eta, solve_eta(*rows, 0.1, 0.4), rtol=1e-4, atol=0)
    w = log_weights(reward, log_q, eta, 0.1)  # (5, K, B)
    torch.testing.assert_close(w.transpose(1, 2).flatten(0, 1), log_weights(*rows, eta, 0.1))
    assert ess_ratio(w).mean().item() == pytest.approx(0.4, abs=1e-4)


def test_places_of_tokens_add_up_to_the_whole_and_windows_are_sums_of_places():
    torch.manual_seed(0)
    x, z = torch.randn(2, 3, 32, 32), torch.randint(8, (2, 3, 16))
    decoder = ResNetDecoder((3, 32, 32), 16, 8, 16).eval()
    whole = decoder.log_prob(x, z)  # (2, 3)
    decoder.window = 3
    places = decoder.log_prob(x, z)  # (2, 3, 16)
    torch.testing.assert_close(places.sum(dim=2), whole, rtol=1e-5, atol=0)
    windows, grid = decoder.credit(places).view(2, 3, 4, 4), places.view(2, 3, 4, 4)
    torch.testing.assert_close(windows[..., 1, 1], grid[..., :3, :3].sum(dim=(-1, -2)))
    torch.testing.assert_close(windows[..., 3, 0], grid[..., 2:, :2].sum(dim=(-1, -2)))
    motion = MotionDecoder((4, 5), 8, 8, 16, 2, 1, 2)  # two tokens per frame
    x, z = torch.randn(2, 4, 5), torch.randint(8, (2, 3, 8))
    p = motion(z)
    assert p.base_dist.variance.unique().tolist() == [0.25]
    whole, close = motion.log_prob(x, z), dict(rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(p.log_prob(x.unsqueeze(1)), whole, **close)
    motion.window = 3
    places, frames = motion.log_prob(x, z), p.base_dist.log_prob(x.unsqueeze(1)).sum(dim=-1)
    torch.testing.assert_close(places, frames.repeat_interleave(2, dim=2) / 2, **close)
    torch.testing.assert_close(places.sum(dim=2), whole, rtol=1e-5, atol=0)
    windows = motion.credit(places)  # (2, 3, 8)
    torch.testing.assert_close(windows[..., 0], places[..., :2].sum(dim=-1))
    torch.testing.assert_close(windows[..., 2], places[..., 1:4].sum(dim=-1))


def test_the_place_of_a_token_is_where_it_shows():
    torch.manual_seed(0)
    decoder = ResNetDecoder((3, 32, 32), 64, 8, 16).eval()
    decoder.window = 3
    x, z = torch.randn(1, 3, 32, 32), torch.zeros(1, 1, 64, dtype=torch.long)
    other = z.clone()
    other[..., 7] = 1  # the token at the top right
    change = (decoder.log_prob(x, other) - decoder.log_prob(x, z))[0, 0]
    assert change[7] != 0 and change[56] == 0  # 56 is at the bottom left


@pytest.mark.parametrize("method", ("daps", "daps_na"))
def test_credit_per_token_changes_neither_metrics_nor_the_gradient_of_the_decoder(method):
    settings = defaults("train.py") | dict(method=method, dataset="cifar10", n_tokens=16)
    settings |= dict(vocab_size=8, width=16, n_heads=2, n_samples=4)
    found = []
    for window in (0, 3):
        torch.manual_seed(0)
        model = build_model(settings | dict(credit_window=window), (3, 32, 32))
        assert model.encoder.per_token == (window > 0)
        x, noise = torch.randn(4, 3, 32, 32), torch.rand(4, *model.noise_shape)
        loss, metrics = model(x, 0.1, noise=noise)
        found.append((metrics, torch.autograd.grad(loss, list(model.decoder.parameters()))))
    (a, whole), (b, tokens) = found
    for key in ("reward", "log_q", "kl"):
        torch.testing.assert_close(b[key], a[key], rtol=1e-5, atol=0)
    assert b["kl"].item() == pytest.approx(b["log_q"].item() + 16 * math.log(8), abs=1e-4)
    for p, q in zip(whole, tokens, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-4 * p.abs().max().item() + 1e-3)


# ---------------------------------------------------------------------------------------------
# the k-means start


def test_kmeans_is_that_of_scipy_and_leaves_a_centre_without_rows_where_it_is():
    h = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    first = torch.cat([h[:9], torch.full((1, 3), 99.0)])
    found = kmeans(h, first, n_rounds=7)
    expected, _ = kmeans2(h.double().numpy(), first[:9].double().numpy(), iter=7, minit="matrix")
    torch.testing.assert_close(found[:9].double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[9], first[9])


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("method", ("daps", "daps_na", "gumbel_na"))
def test_values_start_as_clusters_of_what_the_encoder_sees(method, tied):
    """Logits fall with the squared distance to a centre, all at one rate, which makes the entropy a
    third of log V; the decoder's vectors are the centres, scaled; all positions have mean zero."""
    model, _ = model_of(method, tied)
    assert isinstance(model.encoder.head, TiedHead) == tied
    x = torch.rand(24, 1, 28, 28, generator=torch.Generator().manual_seed(1)).round()
    noise = torch.rand(24, 1, 4, generator=torch.Generator().manual_seed(0))
    h = model.encoder.features(x, noise).detach()  # (24, 4, H)
    start_from_clusters(model, x, torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.encoder.centre, h.mean(dim=0))
    h = (h - h.mean(dim=0)).flatten(0, 1)  # (24 * 4, H)
    generator = torch.Generator().manual_seed(0)
    torch.rand(24, 1, 4, generator=generator)
    first = h[torch.randperm(len(h), generator=generator)[:12]]
    centres = torch.from_numpy(
        kmeans2(h.double().numpy(), first.double().numpy(), iter=10, minit="matrix")[0]
    ).float()
    table = model.decoder.embed.weight.detach()
    scaled = centres / centres.square().mean().sqrt()
    torch.testing.assert_close(table, scaled, rtol=1e-3, atol=1e-3)
    log_q = model.encoder.head(h).detach().log_softmax(dim=-1)  # (24 * 4, V)
    closer = -torch.cdist(h, centres).square() / 2
    rate = (log_q[:, 0] - log_q[:, 1]) / (closer[:, 0] - closer[:, 1])
    expected = (rate.median() * closer).log_softmax(dim=-1)
    torch.testing.assert_close(log_q, expected, rtol=1e-3, atol=1e-2)
    entropy = -(log_q.exp() * log_q).sum(dim=-1).mean().item()
    assert entropy == pytest.approx(math.log(12) / 3, rel=1e-3)


@pytest.mark.parametrize("tied", (False, True))
@torch.no_grad()
def test_centre_and_scale_apply_wherever_an_autoregressive_encoder_makes_logits(tied):
    """All codes at once, token by token with a cache, in a compiled step, and with gradient."""
    encoder, generator = model_of("daps", tied)[0].encoder, torch.Generator().manual_seed(0)
    encoder.centre.normal_(generator=generator)
    encoder.head.bias.normal_(generator=generator)
    encoder.head.log_scale.fill_(0.5)
    x, noise = (torch.rand(*s, generator=generator) for s in ((3, 1, 28, 28), (3, 5, 4)))
    patches = encoder.patch_encoder(x)
    z = encoder.sample_codes(patches, 5, noise)
    logits = encoder.logits(patches, z)  # (3, 5, 4, V)
    assert torch.equal(draw(logits, noise.unsqueeze(-1)).squeeze(-1), z)
    one_code = lambda _, t: F.one_hot(z[:, 0, t], 12).float()  # noqa: E731
    torch.testing.assert_close(encoder.relaxed(x, one_code)[1], logits[:, 0], rtol=1e-4, atol=1e-5)
    encoder.compile_sampler(backend="eager")
    assert torch.equal(encoder.sample_codes(patches, 5, noise), z)
    encoder.head.log_scale.fill_(0.0)
    torch.testing.assert_close(
        encoder.logits(patches, z) * math.exp(0.5), logits, rtol=1e-4, atol=1e-5
    )
    encoder.head.log_scale.fill_(0.5)
    encoder.centre.zero_()
    assert not torch.allclose(encoder.logits(patches, z), logits)


# ---------------------------------------------------------------------------------------------
# splitting


def model_of(method, tied):
    settings = defaults("train.py") | dict(method=method, dataset="mnist", tied=tied)
    settings |= dict(n_tokens=4, vocab_size=12, width=16, n_heads=2, mlp_ratio=2, n_samples=4)
    torch.manual_seed(0)
    model = build_model(settings, (1, 28, 28))
    model.encoder.counting = True
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def after_one_step(method, tied):
    """A model, ready to evaluate, its optimizer, and the images of the step."""
    model, optimizer = model_of(method, tied)
    x, noise = torch.rand(6, 1, 28, 28).round(), torch.rand(6, *model.noise_shape)
    model(x, 0.1, noise=noise)[0].backward()
    optimizer.step()
    model.encoder.head.log_scale.data.fill_(0.7)  # what holds must hold for any scale
    return model.eval(), optimizer, x


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("method", ("daps", "daps_na"))
def test_a_split_without_noise_changes_neither_merged_probabilities_nor_the_decoder(method, tied):
    model, optimizer, x = after_one_step(method, tied)
    dead = [3, 7]
    model.encoder.usage.copy_(torch.tensor([50, 90, 40, 0, 60, 70, 40, 1, 30, 20, 10, 80]))
    z = torch.tensor([[[1, 11, 1, 5], [2, 1, 0, 11]]]).expand(6, -1, -1)
    log_px = model.decoder.log_prob(x, z)

    def probabilities():
        """Of the first token, (6, V), and of the last, after those of z."""
        patches = model.encoder.patch_encoder(x)
        logits = (
            model.encoder.read_out(patches)
            if method == "daps_na"
            else model.encoder.logits(patches, z[:, :1])[:, 0]
        )
        return logits.softmax(dim=-1).detach()

    before = probabilities()
    rows = model.decoder.embed.weight[[1, 11]].clone()
    assert split_values(model, optimizer, torch.Generator(), noise=0.0) == 2
    after = probabilities()
    # The busiest value is 1; with one copy its share is 45, so that the next is 11, with 80.
    merged = after.clone()
    for value, copy in zip((1, 11), dead, strict=True):
        torch.testing.assert_close(after[..., copy], after[..., value])
        merged[..., value] += merged[..., copy]
    alive = [v for v in range(12) if v not in dead]
    # The probability of the dead values is shared by all others in proportion.
    expected = before[..., alive] / before[..., alive].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(merged[..., alive], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.decoder.log_prob(x, z), log_px, rtol=0, atol=0)
    torch.testing.assert_close(model.decoder.embed.weight[dead], rows, rtol=0, atol=0)
    for table in (model.decoder.embed.weight, model.encoder.head.bias):
        moments = optimizer.state[table]["exp_avg"]
        assert torch.equal(moments[dead], moments[[1, 11]])
    assert model.encoder.usage.sum() == 0


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("method", ("daps", "daps_na"))
def test_copies_stand_for_their_value_everywhere_and_rare_means_a_share(method, tied):
    model, optimizer, x = after_one_step(method, tied)
    encoder, table = model.encoder, model.decoder.embed.weight
    patches = encoder.patch_encoder(x)
    usage = [500, 1100, 150, 9, 10, 60, 40, 9, 150, 52, 200, 120]  # an even share is 200
    encoder.usage.copy_(torch.tensor(usage))
    before = encoder.head(patches).softmax(dim=-1)
    assert split_values(model, optimizer, torch.Generator(), noise=0.0) == 2  # 9 is rare, 10 not
    after = encoder.head(patches).softmax(dim=-1)
    ratio = after[..., [1, 3, 7]].sum(dim=-1) / after[..., 0]  # both are copies of value 1
    torch.testing.assert_close(ratio, before[..., 1] / before[..., 0])
    z = torch.tensor([[[1, 2, 1, 1], [1, 0, 11, 1]]]).expand(6, -1, -1)
    copies = torch.where(z == 1, torch.tensor([3, 7, 3, 7]), z)
    assert torch.equal(model.decoder.log_prob(x, copies), model.decoder.log_prob(x, z))
    tables = [table, encoder.head.bias] + ([] if tied else [encoder.head.weight])
    if method == "daps":
        assert torch.equal(encoder.logits(patches, copies), encoder.logits(patches, z))
        tables.append(encoder.embed.weight)
    for t in tables:
        for key in ("exp_avg", "exp_avg_sq"):
            rows = optimizer.state[t][key]
            assert torch.equal(rows[[3, 7]], rows[[1, 1]]) and rows[1].abs().sum() > 0


def test_the_table_of_the_decoder_gets_no_gradient_from_tied_logits():
    model, _ = model_of("daps_na", True)
    model.encoder(torch.rand(2, 1, 28, 28), 3)[1].sum().backward()
    assert model.decoder.embed.weight.grad is None


def test_the_noise_of_a_split_is_a_share_of_the_tables_deviation_and_repeats():
    results = []
    for _ in range(2):
        model, optimizer = model_of("daps_na", True)
        model.encoder.usage.copy_(torch.tensor([100] + [0] * 11))
        std = model.decoder.embed.weight.std()
        generator = torch.Generator().manual_seed(3)
        assert split_values(model, optimizer, generator, noise=0.2) == 11
        table = model.decoder.embed.weight.detach()
        off = (table[1:] - table[0]).std() / std
        assert 0.15 < off.item() < 0.25  # 176 numbers: 0.2 +- 0.011
        results.append(table)
    assert torch.equal(*results)


@pytest.mark.parametrize("method", ("daps", "daps_na", "gumbel", "gumbel_na", "rloo", "ppo"))
def test_every_method_with_a_distribution_counts_the_values_it_draws(method):
    model, _ = model_of(method, True)
    x, noise = torch.rand(6, 1, 28, 28).round(), torch.rand(6, *model.noise_shape)
    model(x, 0.1, noise=noise)
    codes = 6 * 4 * (1 if "gumbel" in method else 4)
    assert model.encoder.usage.sum() == codes
    model.eval()
    model.encode(x)
    assert model.encoder.usage.sum() == codes  # evaluation is not counted
