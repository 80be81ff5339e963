"""Discrete flow matching: a distribution over codes, learned from samples of it.

Codes move from uniform noise z_0 at t = 0 to data z_1 at t = 1 (Campbell et al. 2024, Gat et al.
2024): a network predicts z_1 from z_t, and sampling follows its predictions in small steps. Each
token of z_t is from z_1 with probability t, else from z_0, which is uniform:

    p(z_t^i | z_1^i) = t [z_t^i = z_1^i] + (1 - t) / V,  independently for every position i.

Needs only torch. Letters: N codes in a batch, B tokens per code, V values per token, H width.
"""

import torch
import torch.nn.functional as F
from torch import nn


def noisy(z_1, t, u, vocab_size):
    """z_t of codes z_1 (N, B) at times t (N,), decided by u (N, 2B), uniform in [0, 1)."""
    u_keep, u_noise = u.chunk(2, dim=1)
    z_0 = (u_noise * vocab_size).long().clamp_max(vocab_size - 1)
    return torch.where(u_keep < t.unsqueeze(1), z_1, z_0)


def posterior(logits, z_t, t):
    """log p(z_1^i | z_t) of every token: logits (N, B, V), z_t (N, B), t (N,) below 1 -> (N, B, V).

    By Bayes' rule, p(z_1^i | z_t) is proportional to p(z_1^i | z_t without i) p(z_t^i | z_1^i). The
    second factor is known: it favours z_1^i = z_t^i by 1 + V t / (1 - t) over other values. With it
    added here (ours, not the authors'), the network need not learn for every t how far to trust the
    token it sees, and its likelihood (experiments/generation.py) is bounded as t -> 1.
    """
    trust = torch.log1p(logits.size(-1) * t / (1 - t)).to(logits.dtype)  # (N,)
    trust = trust.view(-1, 1, 1).expand(*z_t.shape, 1)
    return logits.scatter_add(-1, z_t.unsqueeze(-1), trust).log_softmax(dim=-1)


def guided(log_p, log_p_free, guidance):
    """Classifier-free guidance: p(z_1^i | z_t, label)^g p(z_1^i | z_t)^(1 - g), normalised. Exact
    for g = 0 and 1, otherwise a heuristic: it does not tilt the distribution of whole codes."""
    return (guidance * log_p + (1 - guidance) * log_p_free).log_softmax(dim=-1)


def step_probabilities(log_p, z_t, steps_left):
    """Probabilities of every token's next value, in a step of (1 - t) / steps_left: (N, B, V).

    A Markov chain whose tokens jump at rate 1 / (1 - t), each to a draw from p(z_1^i | z_t), has
    the marginals of z_t. In a step of length h, a token jumps with probability h / (1 - t), which
    is exact, 1 - exp(-integral of the rate), and 1 in the last step. The approximation is that
    posteriors are held fixed during a step: tokens that jump in the same step do not see each
    other. This error is of first order in h.
    """
    stay = F.one_hot(z_t, log_p.size(-1)).to(log_p.dtype)
    return stay + (log_p.exp() - stay) / steps_left


def draw(p, u):
    """A value from each row of p (M, V) by inverse CDF at u (M, 1), uniform in [0, 1): (M, 1)."""
    cdf = p.cumsum(dim=1)  # u is scaled by its last entry, 1 up to rounding: never past the end
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_max(p.size(1) - 1)


class Flow(nn.Module):
    """p(z | label): a bidirectional transformer that predicts z_1 from z_t, t and the label; t and
    the label are added to every token. The label n_labels means no label."""

    def __init__(self, n_tokens, vocab_size, n_labels, width=128, n_heads=4, n_layers=2):
        super().__init__()
        self.n_tokens, self.vocab_size, self.n_labels = n_tokens, vocab_size, n_labels
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(n_tokens, width))
        self.label = nn.Embedding(n_labels + 1, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        size, options = (width, n_heads, 4 * width), dict(batch_first=True, norm_first=True)
        blocks = [nn.TransformerEncoderLayer(*size, 0.0, **options) for _ in range(n_layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)
        for weight in (self.embed.weight, self.positions, self.label.weight):
            nn.init.normal_(weight, std=0.1)  # 1 and 0.02 learn more slowly

    def forward(self, z_t, t, labels):
        """log p(z_1^i | z_t, label): z_t (N, B), t (N,) below 1, labels (N,) -> (N, B, V)."""
        context = self.label(labels) + self.time(t.float().unsqueeze(1))  # (N, H)
        h = self.embed(z_t) + self.positions + context.unsqueeze(1)  # (N, B, H)
        return posterior(self.head(self.norm(self.blocks(h))), z_t, t)  # (N, B, V)

    @torch.no_grad()
    def sample(self, labels, guidance=1.0, n_steps=40, generator=None):
        """Codes (N, B) for labels (N,)."""
        device, shape = self.positions.device, (len(labels), self.n_tokens)
        labels, none = labels.to(device), torch.full(shape[:1], self.n_labels, device=device)
        z = torch.randint(self.vocab_size, shape, generator=generator, device=device)
        for k in range(n_steps):
            t = torch.full(shape[:1], k / n_steps, device=device)
            log_p = self(z, t, none if guidance == 0 else labels)  # (N, B, V)
            if guidance not in (0, 1):
                log_p = guided(log_p, self(z, t, none), guidance)
            p = step_probabilities(log_p, z, n_steps - k).flatten(0, 1)  # (N * B, V)
            u = torch.rand(len(p), 1, generator=generator, device=device)
            z = draw(p, u).view(shape)
        return z


def spread(u):
    """Times in [0, 1), one for each of u (N,), uniform and stratified. They rise from row to row:
    codes that they are used with must be in random order."""
    return ((torch.arange(len(u), device=u.device) + u) / len(u)).clamp_max(1 - 1e-6)


def cross_entropy(flow, z_1, t, labels, u):
    """Training loss in nats per token: a scalar with gradient. u (N, 2B) decides z_t."""
    log_p = flow(noisy(z_1, t, u, flow.vocab_size), t, labels)
    return F.nll_loss(log_p.flatten(0, 1), z_1.flatten())
