"""baselines.py against full enumeration, rejection sampling and an independent library."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import log_prob_of_all

from baselines import (
    FSQ,
    PPO,
    RLOO,
    VQVAE,
    Gaussian,
    Relaxed,
    conditional_gumbels,
    demo,
    exponential,
    gumbel_rao,
    gumbel_softmax,
    more_noise,
    reinmax,
)
from daps import DAPS
from models import AutoregressiveEncoder, MLPDecoder, OnePassEncoder, VectorEncoder

X_SHAPE, B, V, BETA = (1, 4, 6), 3, 4, 0.5
CODES = torch.tensor(list(itertools.product(range(V), repeat=B)))  # (64, B)


def networks(kind):
    """Small networks with logits far from uniform and a decoder that cares about every token."""
    torch.manual_seed(0)
    size = (X_SHAPE, B, V, 8, 2, 1, 2)
    encoder = AutoregressiveEncoder(*size) if kind == "ar" else OnePassEncoder(*size)
    return encoder, MLPDecoder(X_SHAPE, B, V, 8, hidden=(16,))


def example(n):
    return (
        torch.rand(1, *X_SHAPE, generator=torch.Generator().manual_seed(1))
        .round()
        .expand(n, -1, -1, -1)
    )


def exact_gradient(encoder, decoder):
    """Gradient of the beta-ELBO of one x, over all 64 codes, in the encoder's parameters."""
    x = example(1)
    log_q = log_prob_of_all(encoder, x, CODES)  # (64,)
    log_px = decoder.log_prob(x, CODES.unsqueeze(0)).detach()[0]
    elbo = (log_q.exp() * (log_px - BETA * (log_q + B * math.log(V)))).sum()
    return flat(torch.autograd.grad(elbo, list(encoder.parameters())))


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def sampled_gradients(model, n_batches, n=256, **options):
    """Ascent directions of the encoder, one row per batch of n draws for the same x."""
    rows = []
    for seed in range(n_batches):
        torch.manual_seed(seed)
        noise = torch.rand(n, *model.noise_shape)
        loss, _ = model(example(n), BETA, noise=noise, **options)
        rows.append(-flat(torch.autograd.grad(loss, list(model.encoder.parameters()))))
    return torch.stack(rows)


def assert_unbiased(gradients, exact, slack=0.0):
    error = gradients.std(dim=0) / len(gradients) ** 0.5
    assert ((gradients.mean(dim=0) - exact).abs() < 5 * error + slack + 1e-5).all()
    assert error.norm() < 0.1 * exact.norm()  # sharp enough to fail


@pytest.mark.parametrize("kind", ("ar", "na"))
def test_rloo_is_unbiased_and_so_is_its_analytic_kl(kind):
    encoder, decoder = networks(kind)
    model = RLOO(encoder, decoder, n_samples=4)
    assert_unbiased(sampled_gradients(model, 60), exact_gradient(encoder, decoder))


@pytest.mark.parametrize("kind", ("ar", "na"))
def test_daps_tends_to_the_gradient_of_the_elbo_as_eta_grows(kind):
    encoder, decoder = networks(kind)
    model = DAPS(encoder, decoder, n_samples=8, eta_update="gradient")
    eta = 1e3
    model.log_eta.data.fill_(math.log(eta))
    gradients = sampled_gradients(model, 60) * (eta + BETA) * 8 / 7
    exact = exact_gradient(encoder, decoder)
    assert_unbiased(gradients, exact, slack=0.02 * exact.abs().max())


def test_the_estimators_rank_as_theory_says(capsys):
    """By the table of `python baselines.py`: (bias, std) over the norm of the exact gradient."""
    table = demo(n_draws=10_000)
    assert len(capsys.readouterr().out.splitlines()) == len(table) + 2
    for unbiased in ("rloo, K = 2", "rloo, K = 8", "daps, K = 8, eta = 1000"):
        bias, std = table[unbiased]
        assert bias < 3 * std / 100
    for tau in ("1.0", "0.5"):
        names = (
            f"gumbel, tau = {tau}",
            f"grmck, tau = {tau}, M = 10",
            f"grmck, tau = {tau}, M = 100",
        )
        straight, few, many = (table[name] for name in names)
        assert many[1] < few[1] < straight[1]  # Rao-Blackwell: less variance, the same mean
        assert many[0] == pytest.approx(straight[0], abs=0.02)
    assert table["reinmax, tau = 1.0"][0] < 0.3 * table["gumbel, tau = 1.0"][0]


def test_gumbel_rao_with_one_sample_is_the_straight_through_gumbel_softmax():
    encoder, decoder = networks("na")
    moments = []
    for model in (Relaxed(encoder, decoder, "gumbel"), Relaxed(encoder, decoder, "grmck", 1)):
        gradients = sampled_gradients(model, 100, n=64)
        moments.append((gradients.mean(dim=0), gradients.var(dim=0)))
    (mean_a, var_a), (mean_b, var_b) = moments
    error = ((var_a + var_b) / 100).sqrt()
    assert ((mean_a - mean_b).abs() < 5 * error + 1e-6).all()
    assert var_a.sum().item() == pytest.approx(var_b.sum().item(), rel=0.2)


@pytest.mark.parametrize("kind", ("ar", "na"))
@pytest.mark.parametrize("estimator", ("gumbel", "grmck", "reinmax"))
def test_relaxed_codes_are_one_hot_and_drawn_from_q(kind, estimator):
    encoder, decoder = networks(kind)
    model = Relaxed(encoder, decoder, estimator, mc_samples=2)
    seen = []
    whole = encoder.relaxed
    encoder.relaxed = lambda *call: seen.append(whole(*call)) or seen[-1]
    torch.manual_seed(0)
    n = 20_000
    with torch.no_grad():
        model(example(n), BETA, noise=torch.rand(n, *model.noise_shape))
        y = seen[0][0]  # (n, B, V)
        assert torch.allclose(y.max(dim=-1).values, torch.ones(n, B), atol=1e-5)
        z = y.argmax(dim=-1)
        index = (z * torch.tensor([V * V, V, 1])).sum(dim=1)
        counts = torch.bincount(index, minlength=len(CODES))
        p = log_prob_of_all(encoder, example(1), CODES).exp()
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum().item()
    assert chi_square < 103.4  # 0.999 quantile, 63 degrees of freedom


@pytest.mark.parametrize("kind", ("ar", "na"))
def test_the_relaxed_kl_is_that_of_the_encoder(kind):
    encoder, decoder = networks(kind)
    model = Relaxed(encoder, decoder, "gumbel")
    torch.manual_seed(0)
    noise = torch.rand(1, *model.noise_shape)
    _, metrics = model(example(1), BETA, noise=noise)
    y, _ = encoder.relaxed(example(1), lambda logits, t: gumbel_softmax(logits, noise[:, t], 1.0))
    z = y.argmax(dim=-1).unsqueeze(1)  # (1, 1, B)
    if kind == "ar":
        _, expected = encoder.score(encoder.patch_encoder(example(1)), z, with_kl=True)
        expected = expected.sum()
    else:
        _, _, expected = encoder(example(1), 1, with_kl=True)
    assert metrics["kl"].item() == pytest.approx(expected.item(), abs=1e-4)


# conditional Gumbels


def test_the_given_token_wins_every_conditional_draw():
    torch.manual_seed(0)
    log_p = (3 * torch.randn(50, 7)).log_softmax(-1)
    z = torch.randint(7, (50,))
    perturbed = conditional_gumbels(log_p, z, exponential(torch.rand(200, 50, 7)))
    assert (perturbed.argmax(dim=-1) == z).all()


def test_conditional_gumbels_have_the_moments_of_rejection_sampling():
    torch.manual_seed(0)
    log_p = torch.tensor([0.1, 0.6, 0.3]).log()
    free = log_p - exponential(torch.rand(400_000, 3)).log()
    for z in range(3):
        kept = free[free.argmax(dim=-1) == z]
        e = exponential(torch.rand(len(kept), 3))
        ours = conditional_gumbels(log_p, torch.tensor(z), e)
        error = 5 * kept.std(dim=0) / len(kept) ** 0.5
        assert ((ours.mean(dim=0) - kept.mean(dim=0)).abs() < 2**0.5 * error).all()
        torch.testing.assert_close(ours.var(dim=0), kept.var(dim=0), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("relax", (gumbel_softmax, reinmax, gumbel_rao))
def test_relaxations_are_finite_for_extreme_logits_and_noise(relax):
    logits = torch.randn(4, 1024) * 50
    logits[0], logits[1, 0] = 0.0, 50.0
    logits.requires_grad_()
    u = torch.rand(4, 1024)
    u[:, ::7], u[:, ::11] = 0.0, 1 - 2**-24
    y = relax(logits, u, torch.tensor(0.1), *([3] if relax is gumbel_rao else []))
    (y * torch.randn(4, 1024)).sum().backward()
    assert y.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize("tau", (0.5, 1.0, 2.0))
def test_the_gradient_of_reinmax_is_that_of_the_paper_s_algorithm(tau):
    """Liu et al. 2023, Algorithm 2, in closed form and float64. With D the one-hot sample, pi the
    probabilities and pi_tau those at temperature tau, a gradient g by D becomes
    2 J((D + pi_tau) / 2) g - J(pi) g / 2, where J(p) = diag(p) - p p^T is that of a softmax."""
    torch.manual_seed(0)
    logits, u, g = 2 * torch.randn(50, 6), torch.rand(50, 6), torch.randn(50, 6)
    theta = logits.clone().requires_grad_()
    y = reinmax(theta, u, torch.tensor(tau))
    (ours,) = torch.autograd.grad((y * g).sum(), theta)

    def softmax(rows):
        e = np.exp(rows - rows.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def through(p):  # J(p) g
        return p * (g - (p * g).sum(axis=1, keepdims=True))

    z, g, theta = y.argmax(dim=1), g.double().numpy(), logits.double().numpy()
    middle = (np.eye(6)[z] + softmax(theta / tau)) / 2
    expected = 2 * through(middle) - through(softmax(theta)) / 2
    # Numbers up to about 4; each of about ten operations may lose half a bit.
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=40 * 2.0**-23)
    # The sample is drawn from pi, whatever tau is: argmax of logits plus Gumbel noise.
    assert np.array_equal(z, (theta - np.log(-np.log1p(-u.double().numpy()))).argmax(axis=1))


def test_noise_made_from_noise_is_uniform_and_independent():
    """Independent of the original, of other sets, columns and rows, even for equal numbers."""
    u = torch.rand(2000, 64, generator=torch.Generator().manual_seed(0))
    for base in (u, torch.full_like(u[:100], 0.5)):
        sets = torch.stack([more_noise(base, m) for m in range(20)])  # (20, n, 64)
        assert sets.min() >= 0 and sets.max() < 1
        counts = torch.histc(sets, 50, 0, 1)
        if base is u:
            chi_square = ((counts - sets.numel() / 50) ** 2 / (sets.numel() / 50)).sum().item()
            assert chi_square < 90  # 49 degrees of freedom
        assert len(sets[:, 0].unique()) > 0.99 * 20 * 64  # equal numbers in other columns differ
    columns = torch.cat([u, sets_of(u)], dim=1)  # (2000, 4 * 64)
    correlation = torch.corrcoef(columns.T) - torch.eye(columns.size(1))
    assert correlation.abs().max() < 6 / 2000**0.5


def sets_of(u):
    return torch.cat([more_noise(u, m) for m in (0, 1, 57)], dim=1)


def test_the_gradient_of_gumbel_rao_is_that_of_its_average_of_softmaxes():
    torch.manual_seed(0)
    logits, u, tau = torch.randn(5, 7, requires_grad=True), torch.rand(5, 7), torch.tensor(0.6)
    weights = torch.randn(5, 7)
    y = gumbel_rao(logits, u, tau, 3)
    (ours,) = torch.autograd.grad((y * weights).sum(), logits)
    e = exponential(torch.stack([more_noise(u, m) for m in range(3)]))  # (M, 5, 7)
    with torch.no_grad():
        log_p = logits.log_softmax(dim=-1)
        shift = conditional_gumbels(log_p, y.argmax(dim=-1), e) - logits
    average = ((logits + shift) / tau).softmax(dim=-1).mean(dim=0)
    (plain,) = torch.autograd.grad((average * weights).sum(), logits)
    torch.testing.assert_close(ours, plain)


# quantisation, against PyPI's vector-quantize-pytorch


def vector_encoder(dim, vocab_size=256):
    torch.manual_seed(0)
    return VectorEncoder(X_SHAPE, B, vocab_size, 8, 2, 1, 2, dim)


@pytest.mark.parametrize("levels", ([8, 8, 4], [8, 8, 8], [8, 8, 4, 4], [7, 5, 5]))
def test_fsq_agrees_with_an_independent_implementation(levels):
    other = pytest.importorskip("vector_quantize_pytorch").FSQ(levels)
    ours = FSQ(vector_encoder(len(levels), math.prod(levels)), None, levels, 8)
    h = 3 * torch.randn(64, 5, len(levels))
    a, b = h.clone().requires_grad_(), h.clone().requires_grad_()
    z, numbers = ours.quantise(a)
    expected_numbers, expected_z = other(b)
    assert torch.equal(z, expected_z.long())
    torch.testing.assert_close(numbers, expected_numbers)
    weight = torch.randn_like(numbers)
    (numbers * weight).sum().backward()
    (expected_numbers * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("levels", ([8, 8, 4], [8, 8, 4, 4], [3, 5]))
def test_fsq_tokens_round_trip(levels):
    n = math.prod(levels)
    model = FSQ(vector_encoder(len(levels), n), None, levels, 8)
    digits = torch.arange(n).unsqueeze(-1) // model.basis % model.levels
    numbers = (digits - model.levels // 2) / (model.levels // 2)
    half = (model.levels - 1) * (1 + 1e-3) / 2
    offset = torch.where(model.levels % 2 == 0, 0.5, 0.0)
    inside = ((numbers * (model.levels // 2) + offset) / half).clamp(-1 + 1e-6, 1 - 1e-6)
    h = inside.atanh() - (offset / half).atanh()
    z, again = model.quantise(h)
    assert torch.equal(z, torch.arange(n))
    torch.testing.assert_close(again, numbers)
    torch.testing.assert_close(model.project(again), model.vectors(z))


def test_levels_that_do_not_make_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="fsq_levels"):
        FSQ(vector_encoder(2), None, [8, 8], 8)


def test_vqvae_agrees_with_an_independent_implementation():
    """Codes, straight-through gradient and one step of the running means. Conventions differ: the
    commitment term is a mean there and a sum over a code here, as in the paper; and the library's
    default gradient is the rotation trick, which is switched off."""
    library = pytest.importorskip("vector_quantize_pytorch")
    options = dict(dim=8, codebook_size=16, decay=0.9, kmeans_init=False, threshold_ema_dead_code=0)
    other = library.VectorQuantize(**options, rotation_trick=False)
    encoder = vector_encoder(8, 16)
    ours = VQVAE(encoder, MLPDecoder(X_SHAPE, B, 0, 8), 8, decay=0.9)
    ours.codebook.copy_(other._codebook.embed[0])
    ours.total.copy_(other._codebook.embed_avg[0])
    ours.count.copy_(other._codebook.cluster_size[0])
    h = 2 * torch.randn(32, 10, 8)
    z, e = ours.quantise(h)
    other.eval()
    expected, expected_z, _ = other(h)
    assert torch.equal(z, expected_z)
    torch.testing.assert_close(e, expected)
    other.train()
    a = h.clone().requires_grad_()
    quantised, _, _ = other(a)
    weight = torch.randn(32, 10, 8)
    (quantised * weight).sum().backward()
    b = h.clone().requires_grad_()
    ((b + (ours.quantise(b)[1] - b).detach()) * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    ours.absorb(h.flatten(0, 1), 0.9)
    torch.testing.assert_close(ours.count, other._codebook.cluster_size[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.total, other._codebook.embed_avg[0], rtol=1e-4, atol=1e-4)


def test_vqvae_starts_by_k_means_and_revives_dead_codes():
    model = VQVAE(vector_encoder(8, 64), MLPDecoder(X_SHAPE, B, 0, 8), 8)
    torch.manual_seed(0)
    centres = 10 * torch.randn(16, 8)
    h = (centres[torch.randint(16, (2000,))] + 0.1 * torch.randn(2000, 8)).float()
    for _ in range(20):
        model.update(h, torch.rand(2000))
    nearest = torch.cdist(h, model.codebook).min(dim=1).values
    assert (nearest < 1).float().mean() > 0.9
    model.codebook[3], model.total[3], model.count[3] = 1e3, 0.0, 0.0
    model.update(h, torch.rand(2000))
    assert model.codebook[3].norm() < 100


@pytest.mark.parametrize("per_code", (2, 64))
def test_a_revived_code_has_time_to_be_used(per_code):
    """Whatever the size of the batch, it is not dead again in the steps after its revival."""
    model = VQVAE(vector_encoder(8, 64), MLPDecoder(X_SHAPE, B, 0, 8), 8)
    torch.manual_seed(0)
    h = torch.randn(64 * per_code, 8)
    model.update(h, torch.rand(len(h)))
    model.codebook[3], model.total[3], model.count[3] = 1e3, 0.0, 0.0
    model.update(h, torch.rand(len(h)))
    assert model.count[3].item() == pytest.approx(per_code / 8)
    torch.testing.assert_close(model.total[3] / model.count[3], model.codebook[3])
    far = model.codebook[3] + 100.0  # nothing is assigned to it there
    model.codebook[3], model.total[3] = far, far * model.count[3]
    for _ in range(20):
        model.update(h, torch.rand(len(h)))
    torch.testing.assert_close(model.codebook[3], far)


def test_vqvae_by_gradient_has_the_paper_s_three_terms():
    encoder = vector_encoder(8, 16)
    model = VQVAE(encoder, MLPDecoder(X_SHAPE, B, 0, 8), 8, commitment=0.25, ema=False)
    x = example(5)
    loss, metrics = model(x, 0.0)
    h = encoder(x)
    _, e = model.quantise(h)
    distance = (h - e).square().sum(dim=(1, 2)).mean()
    log_px = model.decoder.log_prob(x, e.unsqueeze(1)).mean()
    torch.testing.assert_close(loss, 1.25 * distance - log_px)
    loss.backward()
    assert model.codebook.grad.abs().sum() > 0


# the others


def test_ppo_on_its_first_epoch_has_the_gradient_of_a_policy_gradient_and_then_clips():
    encoder, decoder = networks("ar")
    model = PPO(encoder, decoder, width=8, n_samples=4)
    torch.manual_seed(0)
    noise = torch.rand(64, *model.noise_shape)
    loss, metrics = model(example(64), 0.0, noise=noise)
    assert metrics["clipped"] == 0
    ours = flat(torch.autograd.grad(loss, list(encoder.parameters())))
    _, log_q = encoder(example(64), 4, noise)
    plain = -(model.advantage * log_q).mean()
    torch.testing.assert_close(ours, flat(torch.autograd.grad(plain, list(encoder.parameters()))))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(8):
        loss, metrics = model(example(64), 0.0, noise=noise, epoch=epoch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["clipped"] > 0.05  # the clip is not idle


def test_ppo_clips_the_ratio_of_every_token():
    """Where a ratio has left the clip in the direction of its advantage, that token has no
    gradient; elsewhere it has that of ratio * advantage."""
    encoder, decoder = networks("ar")
    model, parameters = PPO(encoder, decoder, width=8, n_samples=4), list(encoder.parameters())
    torch.manual_seed(0)
    noise = torch.rand(64, *model.noise_shape)
    model(example(64), 0.0, noise=noise)
    for p in parameters:
        p.data.add_(0.1 * torch.randn_like(p))
    loss, metrics = model(example(64), 0.0, noise=noise, epoch=1)
    ours = flat(torch.autograd.grad(loss, parameters))
    (log_q,) = encoder.score(encoder.patch_encoder(example(64)), model.z)  # (N, K, B)
    ratio, advantage = (log_q.detach() - model.old_log_q).exp(), model.advantage.unsqueeze(2)
    high, low = ratio > 1 + model.clip, ratio < 1 - model.clip
    idle = torch.where(advantage > 0, high, low)
    assert 0.1 < idle.double().mean() < 0.9
    plain = -(ratio * advantage * log_q)[~idle].sum() / (64 * 4)
    expected = flat(torch.autograd.grad(plain, parameters))
    bound = 16 * 16 * 2.0**-23 * expected.abs().max().item()  # as below
    torch.testing.assert_close(ours, expected, rtol=0, atol=bound)
    torch.testing.assert_close(metrics["clipped"], (high | low).float().mean())


def test_ppo_weighs_reward_and_kl_as_the_elbo_does():
    """Its advantages are standardised, and its entropy bonus is divided by the same scale. So the
    encoder's first gradient, times that scale, is that of -E[(A - mean A) log q] + beta KL, in
    nats. Also in a second batch, when the running scale of rewards is not that of the batch."""
    encoder, decoder = networks("ar")
    decoder.net[-1].weight.data.mul_(5)  # rewards of another scale than 1
    model = PPO(encoder, decoder, width=8, n_samples=4)
    parameters, scales = list(encoder.parameters()), []
    torch.manual_seed(0)
    for x in (example(64), torch.rand(64, *X_SHAPE).round()):
        noise = torch.rand(64, *model.noise_shape)
        loss, _ = model(x, BETA, noise=noise)
        ours = flat(torch.autograd.grad(loss, parameters))
        z, log_q, kl = encoder(x, 4, noise, with_kl=True)
        with torch.no_grad():
            reward = decoder.log_prob(x, z)
            value = model.value(encoder.patch_encoder(x).mean(dim=1))  # in units of reward_std
            advantage = reward - model.reward_std * value
            advantage = advantage - advantage.mean()
        plain = BETA * kl.mean() - (advantage * log_q).mean()
        expected = flat(torch.autograd.grad(plain, parameters)) / advantage.std()
        # Sums of 64 * 4 terms in float32, in another order: 2^-23 * sqrt(256) of the largest.
        bound = 16 * 16 * 2.0**-23 * expected.abs().max().item()
        torch.testing.assert_close(ours, expected, rtol=0, atol=bound)
        scales.append((advantage.std() / model.reward_std).item())
        assert advantage.std() > 2  # the division shows
        decoder.net[-1].weight.data.mul_(3)
    assert scales[1] > 1.5  # the running scale of rewards is not all of it


def test_the_gaussian_vae_has_the_kl_and_the_bits_it_should():
    model = Gaussian(
        VectorEncoder((1, 28, 28), 8, 256, 8, 2, 1, 2, 8), MLPDecoder((1, 28, 28), 8, 0, 8), 8
    )
    assert model.dim == 2  # 64 bits are two float32 numbers
    x = torch.rand(5, 1, 28, 28).round()
    mean, log_std = model.moments(x)
    q = torch.distributions.Normal(mean, log_std.exp())
    expected = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(model.encode(x, with_kl=True)[1], expected)
    n = 4000
    noise = torch.rand(n * 5, 1, 8, generator=torch.Generator().manual_seed(0))
    z = model.encode(x.repeat(n, 1, 1, 1), noise=noise).view(n, 5, 2)
    std = log_std.exp()
    assert ((z.mean(dim=0) - mean).abs() < 5 * std / n**0.5).all()  # five standard errors
    assert ((z.std(dim=0) - std).abs() < 5 * std / (2 * n) ** 0.5).all()
