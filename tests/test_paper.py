"""With config/paper.py, a step of DAPS is Algorithm 1 of the paper, number by number."""

import torch
from conftest import config

from build import build_model


def test_the_overlay_makes_a_step_of_daps_that_of_algorithm_1():
    settings = config("mnist_daps", "paper", vocab_size=16, width=16, n_samples=4)
    model = build_model(settings, (1, 28, 28))
    model.log_eta.data.fill_(1.0)  # where neither one code nor all of them dominate
    x, beta, K = torch.rand(6, 1, 28, 28).round(), 0.3, 4
    noise = torch.rand(6, *model.noise_shape)
    loss, metrics = model(x, beta, noise=noise)
    ours = torch.autograd.grad(loss, list(model.parameters()))

    # getWeights, x by x. c, the uniform prior's share of the reward, is any constant.
    eta, c = model.log_eta.exp(), 7.0
    z, log_q = model.encoder(x, K, noise=noise)  # (6, 4, 8), (6, 4)
    losses_theta, losses_phi, ess = [], [], []
    for i in range(len(x)):
        log_px = model.decoder.log_prob(x[i : i + 1], z[i : i + 1])[0]  # (4,)
        reward = log_px.detach().double() + c
        advantage = reward - reward.logsumexp(dim=0)
        log_q_i = log_q[i].detach().double()
        log_q_star = (advantage + eta.double() * log_q_i) / (eta.double() + beta)  # + a constant
        ratio = (log_q_star - log_q_i - (log_q_star - log_q_i).max()).exp()
        w = ratio / ratio.sum()
        # UpdateFn
        losses_phi.append(-log_px.sum() / K)
        losses_theta.append(-(w.detach() * log_q[i]).sum())
        ess.append(w.sum() ** 2 / (w**2).sum())
    ess = torch.stack(ess).mean()
    loss_eta = ((ess - settings["ess_target"] * K) / K) ** 2  # ours is in units of K
    total = torch.stack(losses_theta).mean() + torch.stack(losses_phi).mean() + loss_eta
    theirs = torch.autograd.grad(total, list(model.parameters()))

    # The advantage is divided by eta + beta = 3: rewards near -500 are rounded by 3e-5.
    assert 1.2 < ess.item() < 3.8
    torch.testing.assert_close(metrics["ess"], (ess / K).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(loss, total.float(), rtol=1e-5, atol=0)
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item(), msg=name)
