"""daps.py against full enumeration, closed forms, float64, a root finder and finite differences."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import daps
from daps import DAPS, TokenEncoder, demo, draw, ess_ratio, gather_batch, log_weights, solve_eta

M = 12  # codes in the enumerated problems
EPS = 2.0**-23  # relative step of float32


def enumerated_problem():
    """Rewards A and a policy log q over all M codes of one x, in float64."""
    g = torch.Generator().manual_seed(0)
    reward = 3 * torch.randn(1, M, generator=g, dtype=torch.float64)
    log_q = torch.randn(1, M, generator=g, dtype=torch.float64).log_softmax(dim=1)
    return reward, log_q


def target(reward, log_q, eta, beta):
    """q* over all codes: each once, so the weights q*/q times q, normalised."""
    return (log_weights(reward, log_q, eta, beta).double() + log_q).softmax(dim=1)


def kl(p, log_q):
    return (p * (p.log() - log_q)).sum()


# the weights


@pytest.mark.parametrize("eta, beta", [(0.5, 0.1), (2.0, 1.0), (10.0, 0.01)])
def test_weights_solve_the_constrained_problem_of_equation_4(eta, beta):
    """At its maximum, the Lagrangian E_q[A - beta log q] - eta KL(q||q0), concave in q, has one
    slope in the probabilities of all codes."""
    reward, log_q = enumerated_problem()
    q = target(reward, log_q, eta, beta)
    slope = reward - beta * q.log() - eta * (q.log() - log_q)  # less the constant beta + eta
    # The weights are float32: exponents up to 20 have steps of 2^-19.
    assert (slope - slope.mean()).abs().max() < (eta + beta) * 4 * 2**-19


def test_ess_ratio_tends_to_the_renyi_divergence_and_bounds_the_kl():
    reward, log_q = enumerated_problem()
    eta, beta, K = 1.5, 0.2, 400_000
    q_star = target(reward, log_q, eta, beta)
    rho = math.exp(-(q_star**2 / log_q.exp()).sum().log())  # exp(-D2)
    z = torch.multinomial(log_q.exp(), K, True)
    sampled = ess_ratio(log_weights(reward.gather(1, z), log_q.gather(1, z), eta, beta))
    assert sampled.item() == pytest.approx(rho, rel=0.01)
    assert kl(q_star, log_q) <= -math.log(rho)


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


@pytest.mark.parametrize("beta", (0.0, 1e-4, 1.0))
@pytest.mark.parametrize("eta", (1e-6, 1e-2, 1.0, 1e3, 1e10))
def test_weights_and_ess_are_those_of_float64_on_extremes(eta, beta):
    log_q, reward = -10_000 * torch.rand(50, 5) ** 4, 1e6 * torch.randn(50, 5)
    reward[10:20] = reward[10:20, :1]  # all alike
    reward[20:30] = reward[20:30, :1] + 3 * torch.randn(10, 5)  # close together, far from zero
    reward[30:40, 1], reward[40:] = -math.inf, -math.inf  # one or all impossible
    log_eta = torch.tensor(math.log(eta), requires_grad=True)
    log_w = log_weights(reward, log_q, log_eta.exp(), beta)
    ess = ess_ratio(log_w)
    assert log_w.isfinite().all() and log_w.dtype == torch.float32
    # beta log q / (eta + beta), which may be large, loses some bits, and a reward loses no more
    # than the term it has to offset; exp(log eta) is off by 10 steps.
    size = 30 + beta * log_q.abs().max().item() / (eta + beta)
    exact, tolerance = exact_weights(reward, log_q, eta, beta), 16 * EPS * size
    np.testing.assert_allclose(log_w.exp().detach(), exact, rtol=tolerance, atol=1e-12)
    np.testing.assert_allclose(ess.detach(), exact_ess(exact), rtol=3 * tolerance)
    ess.mean().backward()
    assert log_eta.grad.isfinite()


def test_a_reward_that_is_not_a_number_shows_in_the_weights():
    reward = torch.tensor([[1.0, math.nan], [1.0, 2.0]], requires_grad=True)
    assert log_weights(reward, torch.zeros(2, 2), 1.0, 0.1).isnan().any(dim=1).tolist() == [1, 0]
    assert not log_weights(reward, 1 * reward, 1.0, 0.1).requires_grad


@pytest.mark.parametrize("ess_target", [0.2, 0.33, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.01, 10.0, 1e5])
def test_eta_is_the_one_that_a_root_finder_finds(ess_target, scale):
    reward, log_q = scale * torch.randn(64, 8), torch.randn(64, 8)

    def miss(log_eta):
        weights = exact_weights(reward, log_q, math.exp(log_eta), 1e-4)
        return exact_ess(weights).mean() - ess_target

    eta = solve_eta(reward, log_q, 1e-4, ess_target)
    assert eta.log().item() == pytest.approx(brentq(miss, -13, 23), abs=1e-4)


def test_eta_stands_at_the_end_of_its_range_nearest_to_a_target_out_of_reach():
    reward = torch.randn(64, 8)
    low = solve_eta(reward, torch.zeros(64, 8), 100.0, 0.33)  # beta alone keeps the weights even
    high = solve_eta(1e15 * reward, torch.zeros(64, 8), 0.0, 0.9)
    assert low.item() == pytest.approx(1e-6, rel=1e-4)
    assert high.item() == pytest.approx(1e10, rel=1e-4)


# the step


class Table(nn.Module):
    """A policy over M one-token codes: logits, the same for every x."""

    vocab_size, n_tokens = M, 1

    def __init__(self, log_q):
        super().__init__()
        self.logits = nn.Parameter(log_q[0].float())

    def forward(self, x, n_samples):
        z = torch.multinomial(self.logits.softmax(0).expand(len(x), -1), n_samples, True)
        return z.unsqueeze(-1), self.logits.log_softmax(0)[z]


class Lookup(nn.Module):
    def __init__(self, reward):
        super().__init__()
        self.reward = nn.Parameter(reward[0].float())

    def log_prob(self, x, z):
        return self.reward[z[..., 0]]

    def forward(self, z):
        return torch.distributions.Normal(self.reward[z[..., 0]], 1.0)


def enumerated_model(n_samples=8, **options):
    reward, log_q = enumerated_problem()
    return DAPS(Table(log_q), Lookup(reward), n_samples, **options)


def encoder_gradients(model, beta, seeds, n=4):
    """One row per seed."""
    rows = []
    for seed in seeds:
        torch.manual_seed(seed)
        loss, _ = model(torch.zeros(n, 1), beta)
        rows.append(torch.autograd.grad(loss, model.encoder.logits)[0])
    return torch.stack(rows)


def test_the_mean_encoder_gradient_is_that_of_the_kl_to_the_target():
    (reward, log_q), eta, beta, K = enumerated_problem(), 1.0, 0.3, 2000
    model = enumerated_model(K, eta_update="gradient")
    model.log_eta.data.fill_(math.log(eta))
    rows = encoder_gradients(model, beta, range(300))
    exact = (log_q.exp() - target(reward, log_q, eta, beta))[0].float()  # d KL(q*||q) / d logits
    error = rows.std(dim=0) / len(rows) ** 0.5
    assert ((rows.mean(dim=0) - exact).abs() < 4 * error + 2 / K).all()
    assert error.max() < 0.05 * exact.abs().max()  # the test could fail


def test_taking_one_over_k_off_the_weights_keeps_the_mean_and_lowers_the_variance():
    """By a factor of about 1 - ESS / K, since sum_k (w_k - 1/K)^2 = sum_k w_k^2 - 1/K."""
    model = enumerated_model(ess_target=0.5)
    model(torch.zeros(256, 1), 0.1)  # solves for eta,
    model.eta_update = "gradient"  # which then stays
    ours = encoder_gradients(model, 0.1, range(300))
    model.centred = False
    plain = encoder_gradients(model, 0.1, range(300))  # the same codes
    error = (plain - ours).std(dim=0) / len(ours) ** 0.5
    assert ((plain.mean(dim=0) - ours.mean(dim=0)).abs() < 4 * error + 1e-6).all()
    assert ours.var(dim=0).sum() < 0.75 * plain.var(dim=0).sum()


def test_eta_follows_the_ess_of_the_whole_batch_when_processes_share_it(monkeypatch):
    """Another process has the second half of the batch, with other rewards."""
    model = enumerated_model(ess_target=0.4, eta_update="gradient")
    model.log_eta.data.fill_(0.3)
    z, log_q = model.encoder(torch.zeros(16, 1), 8)
    model.encoder.forward = lambda x, n_samples: (z, log_q)
    own = model.decoder.log_prob(None, z).detach(), log_q.detach()
    others = 2 * torch.randn(16, 8), -3 * torch.rand(16, 8)
    batch = [torch.cat(pair) for pair in zip(own, others, strict=True)]
    gathered = iter(batch)
    monkeypatch.setattr(daps, "gather_batch", lambda t: next(gathered))
    loss, metrics = model(torch.zeros(16, 1), 0.1)
    loss.backward()

    def ess(log_eta):
        return exact_ess(exact_weights(*batch, math.exp(log_eta), 0.1)).mean()

    slope = ((ess(0.3 + 1e-3) - 0.4) ** 2 - (ess(0.3 - 1e-3) - 0.4) ** 2) / 2e-3
    assert model.log_eta.grad.item() == pytest.approx(slope, rel=1e-3) and abs(slope) > 1e-3
    assert metrics["ess"].item() == pytest.approx(ess(0.3), abs=1e-5)


def test_metrics_say_what_happened():
    loss, metrics = enumerated_model(ess_target=0.5)(torch.zeros(64, 1), 0.25)
    assert set(metrics) == {"reward", "log_q", "kl", "ess", "eta", "beta"} and loss.requires_grad
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
    assert metrics["ess"].item() == pytest.approx(0.5, abs=1e-4) and metrics["beta"] == 0.25
    assert metrics["kl"].item() == pytest.approx(metrics["log_q"].item() + math.log(M), abs=1e-5)
    t = torch.randn(3, 4, requires_grad=True)  # one process has the whole batch
    assert torch.equal(gather_batch(t), t) and not gather_batch(t).requires_grad


# in somebody else's project


@pytest.mark.parametrize("name, value", [("n_samples", 1), ("ess_target", 0.0), ("beta", math.nan)])
def test_impossible_numbers_are_refused_by_name(name, value):
    beta, options = (value, {}) if name == "beta" else (0.1, {name: value})
    with pytest.raises(ValueError, match=f"{name} .*must be"):
        enumerated_model(**options)(torch.zeros(4, 1), beta)


@pytest.mark.parametrize(
    "slip, words",
    [
        (lambda z, q, r: (z.transpose(0, 1), q, r), r"\(8, 4, 1\).*must be \(N, K, B\).*\(4, 8\)"),
        (lambda z, q, r: (z, q.sum(1), r), r"log_q.*\(4,\).*must be"),
        (lambda z, q, r: (z, q, r.mean()), r"log_prob.*\(\).*must be"),
        (lambda z, q, r: (z, q[..., None], r[..., None]), r"decoder\.credit"),
        (lambda z, q, r: (z, q.detach(), r), "log_q has no gradient.*no_grad"),
    ],
)
def test_a_slip_in_what_networks_return_is_refused_in_words_that_say_what_to_return(slip, words):
    model = enumerated_model()
    z, log_q = model.encoder(torch.zeros(4, 1), 8)
    z, log_q, reward = slip(z, log_q, model.decoder.log_prob(None, z))
    model.encoder.forward = lambda x, n_samples: (z, log_q)
    model.decoder.log_prob = lambda x, z: reward
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(4, 1), 0.1)


def test_two_methods_of_each_network_are_enough():
    """Those that DAPS's docstring names: Table and Lookup have no others."""
    model = enumerated_model()
    for x in (torch.zeros(5, 1), [0, 1, 2, 3, 4]):  # x may be anything with a length
        loss, _ = model(x, 0.1)
        z = model.encode(x)
        assert z.shape == (5, 1) and z.dtype == torch.int64 and not loss.isnan()
    assert model.decode(z).mean.shape == (5,) and model.sample(7).mean.shape == (7,)
    with torch.no_grad():  # a validation loss needs no gradient
        assert model(torch.zeros(4, 1), 0.1)[0].isfinite()


@pytest.mark.parametrize("per_token", (False, True))
def test_any_network_that_gives_logits_makes_an_encoder(per_token):
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 15), nn.Unflatten(1, (3, 5)))
    encoder = TokenEncoder(net, 3, 5, per_token)
    x, noise = torch.randn(4, 6), torch.rand(4, 7, 3)
    z, log_q, kl = encoder(x, 7, noise, with_kl=True)
    q = torch.distributions.Categorical(logits=net(x).unsqueeze(1))  # (4, 1, 3)
    expected = q.log_prob(z)  # (4, 7, 3)
    torch.testing.assert_close(log_q, expected if per_token else expected.sum(dim=-1))
    uniform = torch.distributions.Categorical(logits=torch.zeros(4, 1, 3, 5))
    expected = torch.distributions.kl_divergence(q, uniform).sum(dim=-1)  # (4, 1)
    torch.testing.assert_close(kl, expected)
    gradients = (torch.autograd.grad(t.sum(), net[0].weight)[0] for t in (kl, expected))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    cdf = q.probs.cumsum(dim=-1)  # the first value whose CDF exceeds the noise
    assert torch.equal(z, (cdf <= noise.unsqueeze(-1)).sum(dim=-1))
    assert torch.equal(encoder.mode(x), q.mode.squeeze(1))


def test_draw_never_picks_what_has_no_probability():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).repeat(1000, 1)
    edges = torch.tensor([0.0, 1 - 2**-24, 0.5, 1 / (1 + math.e)])
    u = torch.cat([torch.rand(1000, 8), edges.expand(1000, -1)], dim=1)
    assert set(draw(logits, u).unique().tolist()) == {1, 3}


def test_the_demonstration_ends_with_a_verdict_close_to_the_exact_optimum(capsys):
    elbo, best_encoder, best_pair = demo(n_steps=400)
    *_, verdict = capsys.readouterr().out.splitlines()
    assert f"ends {best_pair - elbo:.3f} nats below" in verdict
    assert elbo <= best_encoder + 1e-3 <= best_pair + 2e-3
    assert elbo > best_pair - 3  # it starts 15 below; two patterns that share a code cost 1.3
