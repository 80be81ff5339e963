"""daps.py against full enumeration, closed forms and finite differences."""

import math

import pytest
import torch
from torch import nn

from daps import DAPS, ETA_MIN, demo, ess_ratio, gather_batch, log_weights, solve_eta

M = 12  # codes in the enumerated problems


def enumerated_problem(seed=0):
    """Rewards A and a policy log q over all M codes of one x, in float64."""
    g = torch.Generator().manual_seed(seed)
    reward = 3 * torch.randn(1, M, generator=g, dtype=torch.float64)
    log_q = torch.randn(1, M, generator=g, dtype=torch.float64).log_softmax(dim=1)
    return reward, log_q


def target(reward, log_q, eta, beta):
    """q* over all codes: each once, so the weights q*/q times q, normalised."""
    return (log_weights(reward, log_q, eta, beta).double() + log_q).softmax(dim=1)


def objective(q, reward, beta):  # of eq. (4)
    return (q * (reward - beta * q.log())).sum()


def kl(p, log_q):
    return (p * (p.log() - log_q)).sum()


@pytest.mark.parametrize("eta, beta", [(0.5, 0.1), (2.0, 1.0), (10.0, 0.01)])
def test_weights_solve_the_constrained_problem_of_equation_4(eta, beta):
    reward, log_q = enumerated_problem()
    q_star = target(reward, log_q, eta, beta)

    # Maximise the Lagrangian numerically: it is concave, and independent of the closed form.
    u = torch.zeros(1, M, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [u], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def lagrangian():
        solver.zero_grad()
        q = u.softmax(dim=1)
        loss = eta * kl(q, log_q) - objective(q, reward, beta)
        loss.backward()
        return loss

    solver.step(lagrangian)
    # The weights are float32: exponents up to 20 have steps of 2^-19, and q* is at most 1.
    torch.testing.assert_close(q_star, u.softmax(dim=1).detach(), atol=4 * 2**-19, rtol=0)

    # And no q inside the same trust region does better.
    radius, best = kl(q_star, log_q), objective(q_star, reward, beta)
    g = torch.Generator().manual_seed(1)
    inside = 0
    for scale in (0.01, 0.1, 1.0):
        for _ in range(500):
            u = q_star.log() + scale * torch.randn(1, M, generator=g, dtype=torch.float64)
            q = u.softmax(dim=1)
            if kl(q, log_q) <= radius:
                inside += 1
                assert objective(q, reward, beta) <= best + 1e-9
    assert inside > 100


def test_ess_ratio_tends_to_the_renyi_divergence_and_bounds_the_kl():
    reward, log_q = enumerated_problem()
    eta, beta, K = 1.5, 0.2, 400_000
    q_star = target(reward, log_q, eta, beta)
    rho = math.exp(-(q_star**2 / log_q.exp()).sum().log())  # exp(-D2)
    z = torch.multinomial(log_q.exp(), K, True, generator=torch.Generator().manual_seed(0))
    sampled = ess_ratio(log_weights(reward.gather(1, z), log_q.gather(1, z), eta, beta))
    assert sampled.item() == pytest.approx(rho, rel=0.01)
    assert kl(q_star, log_q) <= -math.log(rho)


def test_ess_ratio_lies_between_one_over_k_and_one():
    log_w = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf], [math.log(0.25)] * 4])
    torch.testing.assert_close(ess_ratio(log_w), torch.tensor([0.25, 1.0]))


def test_a_baseline_per_example_cancels():
    reward, log_q = torch.randn(5, 8), -10 * torch.rand(5, 8)
    baseline = reward.logsumexp(dim=1, keepdim=True)
    with_baseline = log_weights(reward - baseline, log_q, 0.7, 0.1)
    torch.testing.assert_close(log_weights(reward, log_q, 0.7, 0.1), with_baseline)


def test_weights_are_float32_without_gradient_and_tell_large_rewards_apart():
    reward = torch.tensor([[87_000.0, 87_001.0]], dtype=torch.float64, requires_grad=True)
    log_q = torch.zeros(1, 2, requires_grad=True)
    log_w = log_weights(reward, log_q, 0.3, 0.0)
    assert log_w.dtype == torch.float32 and not log_w.requires_grad
    assert (log_w[0, 1] - log_w[0, 0]).item() == pytest.approx(1 / 0.3, abs=1e-5)


@pytest.mark.parametrize("ess_target", [0.2, 0.33, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.01, 10.0, 1e5])
def test_solve_eta_meets_the_target(ess_target, scale):
    g = torch.Generator().manual_seed(0)
    reward, log_q = scale * torch.randn(64, 8, generator=g), torch.randn(64, 8, generator=g)
    eta = solve_eta(reward, log_q, 1e-4, ess_target)
    rho = ess_ratio(log_weights(reward, log_q, eta, 1e-4)).mean().item()
    assert rho == pytest.approx(ess_target, abs=1e-4)


def test_solve_eta_is_at_its_floor_where_the_ratio_cannot_get_down_to_the_target():
    reward = torch.randn(64, 8)
    eta = solve_eta(reward, torch.zeros(64, 8), 100.0, 0.33)  # beta alone keeps the weights even
    assert eta.item() == pytest.approx(ETA_MIN, rel=1e-4)


def test_one_sample_has_weight_one():
    assert log_weights(torch.randn(3, 1), torch.randn(3, 1), 0.5, 0.1).eq(0).all()


class Table(nn.Module):
    """A policy over M one-token codes: logits, the same for every x."""

    vocab_size = M

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


def test_the_mean_encoder_gradient_is_that_of_the_kl_to_the_target():
    reward, log_q = enumerated_problem()
    eta, beta, K = 1.0, 0.3, 2000
    model = DAPS(Table(log_q), Lookup(reward), K, ess_target=0.5, eta_update="gradient")
    model.log_eta.data.fill_(math.log(eta))
    torch.manual_seed(0)
    draws = []
    for _ in range(300):
        model.zero_grad()
        model(torch.zeros(4, 1), beta)[0].backward()
        draws.append(model.encoder.logits.grad.clone())
    draws = torch.stack(draws)
    exact = (log_q.exp() - target(reward, log_q, eta, beta))[0].float()  # d KL(q*||q) / d logits
    error = draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - exact).abs() < 4 * error + 2 / K).all()
    assert error.max() < 0.05 * exact.abs().max()  # the test could fail


def test_as_eta_grows_the_gradient_lines_up_with_mean_centred_reinforce():
    reward, log_q = enumerated_problem()
    beta, eta, K = 0.2, 1e4, 8
    model = DAPS(Table(log_q), Lookup(reward), K, eta_update="gradient")
    model.log_eta.data.fill_(math.log(eta))
    torch.manual_seed(0)
    model(torch.zeros(4, 1), beta)[0].backward()
    ours = model.encoder.logits.grad

    torch.manual_seed(0)
    z, log_q = model.encoder(torch.zeros(4, 1), K)  # the same codes
    advantage = (model.decoder.log_prob(None, z) - beta * log_q).detach()
    advantage = advantage - advantage.mean(dim=1, keepdim=True)
    loss = -(advantage * log_q).mean()
    (reinforce,) = torch.autograd.grad(loss, model.encoder.logits)
    assert torch.cosine_similarity(ours, reinforce, dim=0) > 0.999
    torch.testing.assert_close(ours * (eta + beta), reinforce, atol=1e-2, rtol=1e-2)


def test_taking_one_over_k_off_the_weights_keeps_the_mean_and_lowers_the_variance():
    """By a factor of about 1 - ESS / K, since sum_k (w_k - 1/K)^2 = sum_k w_k^2 - 1/K."""
    reward, log_q = enumerated_problem()
    model = DAPS(Table(log_q), Lookup(reward), 8, ess_target=0.5)
    torch.manual_seed(0)
    model(torch.zeros(256, 1), 0.1)  # solves for eta,
    model.eta_update = "gradient"  # which then stays
    plain, ours = [], []
    for _ in range(300):
        torch.manual_seed(len(ours))
        model.zero_grad()
        loss, metrics = model(torch.zeros(4, 1), 0.1)
        loss.backward()
        ours.append(model.encoder.logits.grad.clone())
        torch.manual_seed(len(plain))
        z, sampled_log_q = model.encoder(torch.zeros(4, 1), 8)  # the same codes
        w = log_weights(model.decoder.log_prob(None, z), sampled_log_q, metrics["eta"], 0.1).exp()
        loss = -(w * sampled_log_q).sum(dim=1).mean()
        plain.append(torch.autograd.grad(loss, model.encoder.logits)[0])
    plain, ours = torch.stack(plain), torch.stack(ours)
    error = (plain - ours).std(dim=0) / len(ours) ** 0.5
    assert ((plain.mean(dim=0) - ours.mean(dim=0)).abs() < 4 * error + 1e-6).all()
    assert ours.var(dim=0).sum() < 0.75 * plain.var(dim=0).sum()


def test_uncentred_weights_give_the_gradient_of_equation_6():
    reward, log_q = enumerated_problem()
    model = DAPS(Table(log_q), Lookup(reward), n_samples=8, centred=False)
    torch.manual_seed(0)
    loss, metrics = model(torch.zeros(16, 1), 0.1)
    (ours,) = torch.autograd.grad(loss, model.encoder.logits)
    torch.manual_seed(0)
    z, sampled = model.encoder(torch.zeros(16, 1), 8)  # the same codes
    w = log_weights(model.decoder.log_prob(None, z), sampled, metrics["eta"], 0.1).exp()
    assert (w.sum(dim=1) - 1).abs().max() < 8 * 2**-23
    (plain,) = torch.autograd.grad(-(w * sampled).sum(dim=1).mean(), model.encoder.logits)
    torch.testing.assert_close(ours, plain, rtol=0, atol=8 * 2**-23)  # numbers below 1


def test_the_decoder_gradient_is_that_of_the_mean_log_likelihood():
    reward, log_q = enumerated_problem()
    model = DAPS(Table(log_q), Lookup(reward), n_samples=8)
    torch.manual_seed(0)
    loss, _ = model(torch.zeros(4, 1), 0.1)
    loss.backward()
    torch.manual_seed(0)
    z, _ = model.encoder(torch.zeros(4, 1), 8)
    expected = -torch.bincount(z.flatten(), minlength=M).float() / z.numel()
    torch.testing.assert_close(model.decoder.reward.grad, expected)


def test_the_gradient_update_of_eta_is_the_derivative_of_the_squared_miss():
    reward, log_q = enumerated_problem()
    model = DAPS(Table(log_q), Lookup(reward), n_samples=8, ess_target=0.4, eta_update="gradient")
    model.log_eta.data.fill_(0.3)
    torch.manual_seed(0)
    model(torch.zeros(16, 1), 0.1)[0].backward()
    torch.manual_seed(0)
    z, sampled_log_q = model.encoder(torch.zeros(16, 1), 8)
    sampled_reward = model.decoder.log_prob(None, z)

    def miss(log_eta):
        log_w = log_weights(sampled_reward, sampled_log_q, math.exp(log_eta), 0.1)
        return (ess_ratio(log_w).double().mean().item() - 0.4) ** 2

    slope = (miss(0.3 + 1e-2) - miss(0.3 - 1e-2)) / 2e-2
    assert model.log_eta.grad.item() == pytest.approx(slope, rel=1e-2)
    assert abs(slope) > 1e-3


def test_metrics_say_what_happened():
    reward, log_q = enumerated_problem()
    model = DAPS(Table(log_q), Lookup(reward), n_samples=8, ess_target=0.5)
    loss, metrics = model(torch.zeros(64, 1), 0.25)
    assert set(metrics) == {"reward", "log_q", "kl", "ess", "eta", "beta"}
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
    assert metrics["ess"].item() == pytest.approx(0.5, abs=1e-4)
    assert metrics["beta"].item() == 0.25
    assert metrics["kl"].item() == pytest.approx(metrics["log_q"].item() + math.log(M), abs=1e-5)
    assert loss.requires_grad


def test_one_process_has_the_whole_batch_and_no_gradient_leaves_it():
    t = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(gather_batch(t), t) and not gather_batch(t).requires_grad


@pytest.mark.parametrize(
    "options", [{"n_samples": 1}, {"ess_target": 0.0}, {"ess_target": 1.5}, {"eta_update": "adam"}]
)
def test_impossible_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DAPS(nn.Identity(), nn.Identity(), **options)


def test_the_demonstration_gets_close_to_the_exact_optimum(capsys):
    elbo = demo(n_steps=400)
    rows = capsys.readouterr().out.splitlines()
    best_encoder, best_pair = (float(cell) for cell in rows[-1].split()[2:4])
    assert elbo <= best_encoder + 1e-3 <= best_pair + 2e-3
    assert elbo > best_pair - 0.5
