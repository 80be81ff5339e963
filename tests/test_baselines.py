"""baselines.py against full enumeration, closed forms and other libraries."""

import itertools
import math

import numpy as np
import pytest
import torch
import vector_quantize_pytorch
from conftest import log_prob_of_all
from scipy.integrate import quad
from scipy.special import expit

from baselines import FSQ, PPO, RLOO, VQVAE, Gaussian, Relaxed, gumbel_rao, gumbel_softmax, reinmax
from daps import DAPS
from models import AutoregressiveEncoder, MLPDecoder, OnePassEncoder, Scale, Sizes, VectorEncoder

X_SHAPE, B, V, BETA = (1, 4, 6), 3, 4, 0.5
CODES = torch.tensor(list(itertools.product(range(V), repeat=B)))  # (64, B)
KINDS, SAME = (AutoregressiveEncoder, OnePassEncoder), Scale(torch.zeros(1), torch.ones(1))


def sizes(vocab_size=V):
    return Sizes(X_SHAPE, B, vocab_size, width=8, mlp_ratio=2, n_heads=2)


def networks(kind):
    """Small networks with logits far from uniform and a decoder that cares about every token."""
    return kind(sizes(), SAME), MLPDecoder(sizes(), hidden=(16,))


def example(n):
    x = torch.rand(1, *X_SHAPE, generator=torch.Generator().manual_seed(1)).round()
    return x.expand(n, -1, -1, -1)


def gradient(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in found])


def exact_gradient(encoder, decoder):
    """Gradient of the beta-ELBO of one x, over all 64 codes, in the encoder's parameters."""
    x = example(1)
    log_q = log_prob_of_all(encoder, x, CODES)  # (64,)
    log_px = decoder.log_prob(x, CODES.unsqueeze(0)).detach()[0]
    elbo = (log_q.exp() * (log_px - BETA * (log_q + B * math.log(V)))).sum()
    return gradient(elbo, encoder)


def sampled_gradients(model, n_batches=60, n=256):
    """Ascent directions of the encoder, one row per batch of n draws for the same x."""
    rows = []
    for seed in range(n_batches):
        torch.manual_seed(seed)
        loss, _ = model(example(n), BETA, noise=torch.rand(n, *model.noise_shape))
        rows.append(-gradient(loss, model.encoder))
    return torch.stack(rows)


# score functions


@pytest.mark.parametrize("kind", KINDS)
def test_rloo_has_the_gradient_of_the_elbo_on_average_over_all_codes(kind):
    encoder, decoder = networks(kind)
    encoder.head.weight.data.mul_(2)  # the KL to come depends on the tokens so far
    rows, exact = sampled_gradients(RLOO(encoder, decoder, 4)), exact_gradient(encoder, decoder)
    error = rows.std(dim=0) / len(rows) ** 0.5
    assert ((rows.mean(dim=0) - exact).abs() < 5 * error + 1e-5).all()
    assert error.norm() < 0.1 * exact.norm()  # sharp enough to fail


@pytest.mark.parametrize("kind", KINDS)
def test_daps_tends_to_rloo_on_the_same_codes_as_eta_grows(kind):
    encoder, decoder = networks(kind)
    model, eta = DAPS(encoder, decoder, 8, eta_update="gradient"), 1e4
    model.log_eta.data.fill_(math.log(eta))
    noise = torch.rand(64, 8, B)
    ours = eta * 8 / 7 * gradient(model(example(64), 0.0, noise=noise)[0], encoder)
    expected = gradient(RLOO(encoder, decoder, 8)(example(64), 0.0, noise)[0], encoder)
    # Rewards differ by less than 10, so weights are linear in them to 10 / eta; float32 weights
    # near 1/8 have steps of 2^-26, which is 1e-4 of differences of about 1 / eta.
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3 * expected.abs().max().item())


def test_ppo_weighs_reward_and_kl_as_the_elbo_does_and_clips_the_ratio_of_every_token():
    """Its advantages are standardised, and its entropy bonus is divided by the same scale. So the
    encoder's first gradient, times that scale, is that of -E[(A - mean A) log q] + beta KL, in
    nats. Also in a second batch, when the running scale of rewards is not that of the batch.

    In later epochs, a token whose ratio has left the clip in the direction of its advantage has no
    gradient; others have that of ratio * advantage."""
    encoder, decoder = networks(AutoregressiveEncoder)
    model = PPO(encoder, decoder, width=8, n_samples=4)
    last_weight = list(decoder.parameters())[-2]
    last_weight.data.mul_(5)  # rewards of another scale than 1

    def assert_same(loss, plain, scale):
        expected = gradient(plain, encoder) / scale
        # Sums of 64 * 4 terms in float32, in another order: 2^-23 * sqrt(256) of the largest.
        bound = 16 * 16 * 2.0**-23 * expected.abs().max().item()
        torch.testing.assert_close(gradient(loss, encoder), expected, rtol=0, atol=bound)

    for x in (example(64), torch.rand(64, *X_SHAPE).round()):
        noise = torch.rand(64, *model.noise_shape)
        loss, metrics = model(x, BETA, noise=noise)
        z, log_q, kl = encoder(x, 4, noise, with_kl=True)
        value = model.value(encoder.patch_encoder(x).detach().mean(dim=1))  # of standard rewards
        reward, (mean, std) = decoder.log_prob(x, z).detach(), (model.reward_mean, model.reward_std)
        advantage = reward - std * value.detach()
        advantage = advantage - advantage.mean()
        learned = gradient((value - (reward - mean) / std).square().mean(), model.value)
        torch.testing.assert_close(gradient(loss, model.value), learned)
        assert_same(loss, BETA * kl.mean() - (advantage * log_q).mean(), advantage.std())
        assert metrics["clipped"] == 0 and advantage.std() > 2  # the division shows
        last_weight.data.mul_(3)
    assert advantage.std() / std > 1.5  # the running scale is not all of it

    for p in encoder.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    loss, metrics = model(x, 0.0, noise=noise, epoch=1)
    (log_q,) = encoder.score(encoder.patch_encoder(x), model.z)  # (N, K, B)
    ratio, advantage = (log_q.detach() - model.old_log_q).exp(), model.advantage.unsqueeze(2)
    high, low = ratio > 1.2, ratio < 0.8
    idle = torch.where(advantage > 0, high, low)
    assert 0.1 < idle.double().mean() < 0.9
    assert_same(loss, -(ratio * advantage * log_q)[~idle].sum() / (64 * 4), 1.0)
    torch.testing.assert_close(metrics["clipped"], (high | low).float().mean())


def test_ppo_may_have_one_code_per_example():
    model = PPO(*networks(AutoregressiveEncoder), width=8, n_samples=1)
    loss, _ = model(torch.rand(2, *X_SHAPE).round(), BETA, torch.rand(2, 1, B))
    assert loss.isfinite() and gradient(loss, model.encoder).isfinite().all()


# relaxations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ("gumbel", "grmck", "reinmax"))
def test_relaxed_codes_are_one_hot_and_drawn_from_q_and_their_kl_is_exact(kind, estimator):
    encoder, decoder = networks(kind)
    model, whole, seen, n = Relaxed(encoder, decoder, estimator, 2), encoder.relaxed, [], 20_000
    encoder.relaxed = lambda *call: seen.append(whole(*call)) or seen[-1]
    with torch.no_grad():
        _, metrics = model(example(n), BETA, noise=torch.rand(n, *model.noise_shape))
        log_p = log_prob_of_all(encoder, example(1), CODES)
    y = seen[0][0]  # (n, B, V)
    z = y.argmax(dim=-1)
    torch.testing.assert_close(y, torch.nn.functional.one_hot(z, V).float(), rtol=0, atol=1e-5)
    counts = torch.bincount((z * torch.tensor([16, 4, 1])).sum(dim=1), minlength=64)
    expected = n * log_p.exp()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 103.4  # 0.999 quantile, 63 degrees of freedom
    kl = (log_p.exp() * (log_p + B * math.log(V))).sum().item()
    assert metrics["kl"].item() == pytest.approx(kl, abs=0.02)  # per code, off by less than 1


def test_the_estimators_rank_as_theory_says():
    """Rao-Blackwell: Gumbel-Rao has the mean of Gumbel-Softmax (with M = 1, all of its
    distribution) and less variance. ReinMax has less bias."""
    encoder, decoder = networks(OnePassEncoder)
    exact = exact_gradient(encoder, decoder)
    models = [Relaxed(encoder, decoder, "grmck", n) for n in (1, 30)]
    models += [Relaxed(encoder, decoder, name) for name in ("gumbel", "reinmax")]
    rows = [sampled_gradients(model, n_batches=100, n=128) for model in models]
    one, many, gumbel, reinmax = [(r.mean(dim=0), r.var(dim=0)) for r in rows]
    for mean, var in (one, many):
        error = ((var + gumbel[1]) / 100).sqrt()
        assert ((mean - gumbel[0]).abs() < 5 * error + 1e-6).all()
    assert one[1].sum().item() == pytest.approx(gumbel[1].sum().item(), rel=0.2)
    assert many[1].sum() < 0.9 * gumbel[1].sum()
    assert (reinmax[0] - exact).norm() < 0.6 * (gumbel[0] - exact).norm()


@pytest.mark.parametrize("tau, difference", [(1.0, 0.0), (1.0, 1.5), (0.5, -1.0), (2.0, 0.3)])
def test_the_gradient_of_gumbel_rao_has_its_closed_form_for_two_values(tau, difference):
    """Given that value 0 wins, the two perturbed logits differ by d, logistic around their
    difference and above zero. The softmax is then s = sigmoid(d / tau), with derivative
    s (1 - s) / tau: its mean over d is an integral, 1/6 for equal logits and tau = 1."""

    def term(d):
        density = expit(d - difference) * expit(difference - d)
        return density * expit(d / tau) * expit(-d / tau) / tau

    expected = quad(term, 0, 80)[0] / expit(difference)
    assert (tau, difference) != (1.0, 0.0) or expected == pytest.approx(1 / 6)
    logits = torch.tensor([difference, 0.0]).repeat(2000, 1).requires_grad_()
    y = gumbel_rao(logits, torch.rand(2000, 2), torch.tensor(tau), mc_samples=50)
    (found,) = torch.autograd.grad(y[:, 0].sum(), logits)
    found = found[y[:, 0] == 1, 0].double()  # codes where value 0 won
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - expected) < 5 * error and error < 0.01 * expected


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
def test_the_gradient_of_gumbel_softmax_is_that_of_the_softmax_at_this_temperature(tau):
    logits, u, g = torch.randn(50, 6), torch.rand(50, 6), torch.randn(50, 6).double()
    theta = logits.clone().requires_grad_()
    (ours,) = torch.autograd.grad((gumbel_softmax(theta, u, torch.tensor(tau)) * g).sum(), theta)
    p = ((logits.double() - torch.log(-torch.log1p(-u.double()))) / tau).softmax(dim=1)
    expected = p * (g - (p * g).sum(dim=1, keepdim=True)) / tau
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tau", (0.5, 1.0, 2.0))
def test_the_gradient_of_reinmax_is_that_of_the_paper_s_algorithm(tau):
    """Liu et al. 2023, Algorithm 2, in closed form and float64. With D the one-hot sample, pi the
    probabilities and pi_tau those at temperature tau, a gradient g by D becomes
    2 J((D + pi_tau) / 2) g - J(pi) g / 2, where J(p) = diag(p) - p p^T is that of a softmax."""
    logits, u, g = 2 * torch.randn(50, 6), torch.rand(50, 6), torch.randn(50, 6)
    theta = logits.clone().requires_grad_()
    y = reinmax(theta, u, torch.tensor(tau))
    (ours,) = torch.autograd.grad((y * g).sum(), theta)

    def through(p):  # J(p) g
        return p * (g.double() - (p * g).sum(dim=1, keepdim=True))

    logits, z = logits.double(), y.argmax(dim=1)
    middle = (torch.eye(6)[z] + (logits / tau).softmax(dim=1)) / 2
    expected = 2 * through(middle) - through(logits.softmax(dim=1)) / 2
    # Numbers up to about 4; each of about ten operations may lose half a bit.
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=40 * 2.0**-23)
    # The sample is drawn from pi, whatever tau is: argmax of logits plus Gumbel noise.
    assert torch.equal(z, (logits - torch.log(-torch.log1p(-u.double()))).argmax(dim=1))


# quantisation


def vector_encoder(dim=None, vocab_size=256):
    return VectorEncoder(sizes(vocab_size), SAME, dim)


def fsq(levels):
    return FSQ(vector_encoder(len(levels), math.prod(levels)), None, levels, 8)


@pytest.mark.parametrize("level", range(2, 17))
def test_fsq_rounds_as_its_authors_formula_does(level):
    """Mentzer et al. 2023, appendix A.1, in float64. vector-quantize-pytorch (PyPI) has another
    slack, 1 + 1e-3 for 1 - 1e-3, and atanh for tan in the shift: from three levels on, it gives the
    same tokens but for h close to a threshold."""
    model, levels, h = fsq([level, 5]), np.array([level, 5]), 2 * torch.randn(4000, 2)
    z, numbers = model.quantise(h)
    half, offset = (levels - 1) * (1 - 1e-3) / 2, np.array([0.0 if level % 2 else 0.5, 0.0])
    bounded = np.tanh(h.double().numpy() + np.tan(offset / half)) * half - offset
    expected = (np.rint(bounded) + levels // 2) @ [1, level]
    distance = np.abs(bounded - np.floor(bounded) - 0.5).min(axis=1)  # from a threshold, in levels
    assert np.array_equal(z[distance > 1e-5], expected[distance > 1e-5])
    assert len(z.unique()) == 5 * level and (distance > 1e-5).mean() > 0.99
    torch.testing.assert_close(model.project(numbers), model.vectors(z))
    if level > 2:
        _, theirs = vector_quantize_pytorch.FSQ([level, 5])(h.unsqueeze(0))
        assert np.array_equal(z[distance > 0.03], theirs[0][distance > 0.03])
        assert (distance > 0.03).mean() > 0.8


def test_fsq_with_two_levels_splits_where_its_authors_do_and_passes_a_gradient():
    model = fsq([2, 2, 4])
    z, _ = model.quantise(torch.tensor([-1.57, -1.55, 0.0]))
    assert z.item() == 0 + 2 * 1 + 4 * 2
    h = torch.randn(10_000, 3).requires_grad_()
    model.quantise(h)[1].sum().backward()
    slope = h.grad.mean(dim=0)
    assert slope[0] > 0.25 * slope[2] > 0.1  # with atanh: 0.006 and 0.44


def vqvae(vocab_size, **options):
    decoder = MLPDecoder(sizes(vocab_size=0))
    return VQVAE(vector_encoder(vocab_size=vocab_size), decoder, 8, **options)


def test_vqvae_agrees_with_an_independent_implementation():
    """Codes and one step of the running means."""
    options = dict(dim=8, codebook_size=16, decay=0.9, kmeans_init=False, threshold_ema_dead_code=0)
    other = vector_quantize_pytorch.VectorQuantize(**options)
    ours, theirs = vqvae(16, decay=0.9), other._codebook
    ours.codebook.copy_(theirs.embed[0])
    ours.total.copy_(theirs.embed_avg[0])
    ours.count.copy_(theirs.cluster_size[0])
    h = 2 * torch.randn(32, 10, 8)
    z, e = ours.quantise(h)
    expected, expected_z, _ = other(h)  # and takes a step
    assert torch.equal(z, expected_z)
    torch.testing.assert_close(e, expected)
    ours.absorb(h.flatten(0, 1), 0.9)
    torch.testing.assert_close(ours.count, theirs.cluster_size[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.total, theirs.embed_avg[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ema", (False, True))
def test_the_loss_of_vqvae_has_the_paper_s_terms_and_a_straight_through_gradient(ema):
    model, x, seen = vqvae(16, commitment=0.25, ema=ema).eval(), example(5), []
    model.encoder.register_forward_hook(lambda *call: seen.append(call[-1]))
    loss, _ = model(x, 0.0)
    (found,) = torch.autograd.grad(loss, seen)
    e = model.quantise(seen[0])[1].detach().requires_grad_()  # (N, B, H)
    log_px, off = model.decoder.log_prob(x, e.unsqueeze(1)).mean(), (seen[0] - e).detach()
    weight = 0.25 if ema else 0.25 + 1  # the second moves the codebook
    torch.testing.assert_close(loss, weight * off.square().sum(dim=(1, 2)).mean() - log_px)
    if not ema:
        (moved,) = torch.autograd.grad(model(x, 0.0)[0], model.codebook)
        z = model.quantise(seen[0])[0]
        expected = torch.zeros(16, 8).index_add(0, z.flatten(), -2 / 5 * off.flatten(0, 1))
        torch.testing.assert_close(moved, expected)
    (through,) = torch.autograd.grad(-log_px, e)  # handed on as it is
    torch.testing.assert_close(found, through + 0.25 * 2 * off / 5)


@pytest.mark.parametrize("per_code", (2, 64))
def test_vqvae_starts_by_k_means_and_a_revived_code_has_time_to_be_used(per_code):
    """Whatever the size of the batch, it is not dead again in the steps after its revival."""
    model, n = vqvae(64), 64 * per_code
    h = 10 * torch.randn(16, 8)[torch.randint(16, (n,))] + 0.1 * torch.randn(n, 8)
    model.update(h, torch.rand(n))
    assert (torch.cdist(h, model.codebook).min(dim=1).values < 1).float().mean() > 0.9
    model.codebook[3], model.total[3], model.count[3] = 1e3, 0.0, 0.0
    model.update(h, torch.rand(n))
    assert model.codebook[3].norm() < 100 and model.count[3].item() == per_code / 8
    torch.testing.assert_close(model.total[3] / model.count[3], model.codebook[3])
    far = model.codebook[3] + 100.0  # nothing is assigned to it there
    model.codebook[3], model.total[3] = far, far * model.count[3]
    for _ in range(20):
        model.update(h, torch.rand(n))
    torch.testing.assert_close(model.codebook[3], far)


def test_the_gaussian_vae_has_the_bits_the_samples_and_the_kl_of_torch_distributions():
    model = Gaussian(vector_encoder(vocab_size=2**24), MLPDecoder(sizes(vocab_size=0)), 8)
    assert model.dim == 2  # of 72 bits, two float32 numbers take 64
    x, noise = torch.rand(5, *X_SHAPE).round(), torch.rand(5, *model.noise_shape)
    mean, log_std = model.moments(x)
    q = torch.distributions.Normal(mean, log_std.exp())
    expected = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
    loss, metrics = model(x, BETA, noise)
    torch.testing.assert_close(metrics["kl"], expected.mean())
    log_px = model.decoder.log_prob(x, model.vectors(model.draw(mean, log_std, noise)).unsqueeze(1))
    plain = gradient(BETA * expected.mean() - log_px.mean(), model.posterior)
    torch.testing.assert_close(gradient(loss, model.posterior), plain)
    torch.testing.assert_close(model.encode(x, noise=noise), q.icdf(noise), rtol=1e-4, atol=1e-5)
