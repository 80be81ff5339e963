"""Bias and variance of the gradient estimators, where the truth is a sum over 64 codes.

    python experiments/bias.py        seconds on a CPU

For one x, with a table of logits as its encoder and a fixed decoder, each estimator estimates the
gradient of the beta-ELBO with respect to the logits many times.

Letters: N draws, K codes per draw, B tokens per code, V values per token, M Monte Carlo samples.
"""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from baselines import RLOO, Relaxed  # noqa: E402
from daps import DAPS, TokenEncoder  # noqa: E402

B, V, beta, eta = 3, 4, 0.5, 1e3


class Table(TokenEncoder):
    """Every draw has its own copy of the logits (N, B, V), and so its own gradient."""

    def __init__(self, n_draws):
        super().__init__(lambda x: self.table, B, V)
        self.table = nn.Parameter(torch.randn(B, V).repeat(n_draws, 1, 1))

    def relaxed(self, x, choose):
        return choose(self.table, slice(None)), self.table


class Score(nn.Module):
    """Stands in for log p(x|z)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(B * V, 16), nn.Tanh(), nn.Linear(16, 1))
        self.net[2].weight.data.mul_(8)

    def log_prob(self, x, z):
        y = z if z.is_floating_point() else F.one_hot(z, V).float()
        return self.net(y.flatten(-2)).squeeze(-1)


def study(n_draws=20_000):
    """Prints and returns {estimator: (bias, its standard error, standard deviation of a draw)}."""
    torch.manual_seed(0)
    encoder, decoder = Table(n_draws), Score()
    methods = {f"rloo, K = {k}": (RLOO(encoder, decoder, k), None) for k in (2, 8)}
    for tau in (1.0, 0.5):
        methods[f"gumbel, tau = {tau}"] = Relaxed(encoder, decoder, "gumbel"), tau
        for m in (10, 100):
            methods[f"grmck, tau = {tau}, M = {m}"] = Relaxed(encoder, decoder, "grmck", m), tau
    methods["reinmax, tau = 1.0"] = Relaxed(encoder, decoder, "reinmax"), 1.0
    daps = DAPS(encoder, decoder, n_samples=8, eta_update="gradient")  # eta stays what it is here
    daps.log_eta.data.fill_(math.log(eta))
    methods["daps, K = 8, eta = 1000"] = daps, None

    codes = torch.cartesian_prod(*[torch.arange(V)] * B)  # (64, B)
    logits = encoder.table[0].detach().requires_grad_()
    log_q = logits.log_softmax(-1)[torch.arange(B), codes].sum(-1)  # (64,)
    elbo = log_q.exp() * (decoder.log_prob(None, codes) - beta * (log_q + B * math.log(V)))
    (exact,) = torch.autograd.grad(elbo.sum(), logits)
    print("Bias and standard deviation of a gradient, over the norm of the exact one:")
    print(f"{'estimator':25}  {'bias':>6}  {'+-':>6}  {'std':>6}")
    table = {}
    for name, (model, tau) in methods.items():
        if tau is not None:
            model.tau.fill_(tau)
        noise = torch.rand(n_draws, *model.noise_shape)
        loss, _ = model(torch.zeros(n_draws, 1), beta, noise=noise)
        (draws,) = torch.autograd.grad(-n_draws * loss, encoder.table)  # (N, B, V)
        if model is daps:  # its steps are smaller by eta + beta, and its baseline includes itself
            draws = draws * (eta + beta) * 8 / 7
        std = (draws.var(dim=0).sum().sqrt() / exact.norm()).item()
        bias = ((draws.mean(dim=0) - exact).norm() / exact.norm()).item()
        table[name] = bias, std / n_draws**0.5, std
        print(f"{name:25}", *(f"{value:6.3f}" for value in table[name]), sep="  ")
    return table


if __name__ == "__main__":
    study()
