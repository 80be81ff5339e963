"""DAPS: Discrete Variational Autoencoding via Policy Search (Drolet et al., 2026), in one file.

The choice of a discrete token has no derivative. DAPS treats the encoder q(z|x) as a policy and the
decoder's log p(x|z) as its reward: it samples K codes per example, weights them by how well they
reconstruct, as boldly as a target for their effective sample size allows, and imitates them by
weighted maximum likelihood. This file needs only torch: copy it into your project.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import math

import torch
import torch.distributed as dist
from torch import nn


def log_weights(reward, log_q, eta, beta):
    """Normalised log importance weights log(q*/q) of K codes drawn from q: (N, K) float32, from
    their reward log p(x|z) and log_q, (N, K) each. Only eta may get a gradient."""
    # eq. (5): q* is proportional to q exp((A - beta log q) / (eta + beta)); the codes are drawn
    # from q. The paper's A is the reward minus a log-sum-exp over K, constant per x, which cancels
    # here; so does the best reward, subtracted to keep small differences of large rewards exact.
    reward, log_q = reward.detach().float().clamp(-1e20, 1e20), log_q.detach().float()
    score = reward - reward.amax(dim=1, keepdim=True) - beta * log_q
    return (score / (eta + beta)).log_softmax(dim=1)


def ess_ratio(log_w):
    """Effective sample size of normalised weights, as a share of K: (N, K) -> (N,) in [1/K, 1].
    As K grows it tends to exp(-D2(q*||q)), and KL <= D2: a target for it bounds the step in KL."""
    return torch.exp(-torch.logsumexp(2 * log_w, dim=1)) / log_w.size(1)


@torch.no_grad()
def solve_eta(reward, log_q, beta, ess_target):
    """The eta in [1e-6, 1e10] at which the mean ESS ratio of a batch is ess_target, or the nearest
    end: a float32 scalar. No GPU sync."""
    low, high = (reward.new_full((), math.log(eta), dtype=torch.float32) for eta in (1e-6, 1e10))
    for _ in range(6):  # bisection by 16 points at a time, to the resolution of float32
        points = low + (high - low) * torch.linspace(0, 1, 18, device=reward.device)
        log_w = log_weights(reward[..., None], log_q[..., None], points[1:-1].exp(), beta)
        ess = ess_ratio(log_w).flatten(0, -2).mean(dim=0)  # (16,), rising with eta
        n_bold = (ess < ess_target).sum()
        low, high = points[n_bold + torch.arange(2, device=reward.device)]
    return high.exp()


def gather_batch(t):
    """t (N, K) of all processes in rank order, detached; only t's own if there is one process."""
    t = t.detach().contiguous()
    if not (dist.is_available() and dist.is_initialized()):
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.cat(parts)


class DAPS(nn.Module):
    """The training objective for two networks of your own, which must provide

        encoder(x, n_samples) -> z (N, K, B) int64, log_q (N, K) with gradient
        encoder.vocab_size -> V, and for sample(): encoder.n_tokens -> B
        decoder.log_prob(x, z) -> (N, K) with gradient, for z (N, K, B): nats, summed over x
        decoder(z) -> a distribution over x, for decode() and sample()
        encoder.mode(x) -> (N, B), encoder.proposals(x, z) -> logits (N, B, V), for a mode or search

    eta_update: "solve" it on every batch or, as the paper does, take a "gradient" step on
    (ESS ratio - target)^2 in log_eta (lr 1e-3, no weight decay). centred: see the loss.

    Credit per token (ours): log_q and log_prob may be (N, K, B), if decoder.credit(log_px) turns
    log p of each token's own region of x into log p of a window around it, which alone then weights
    the token. A window smaller than what a token can change, or an autoregressive q, adds bias.
    """

    has_kl = discrete = True  # there is a q(z|x); z are tokens
    n_epochs, tau = 1, None  # updates per batch; no temperature
    noise_shape = property(lambda self: (self.n_samples, self.encoder.n_tokens))  # per example

    def __init__(
        self, encoder, decoder, n_samples=8, ess_target=0.33, eta_update="solve", centred=True
    ):
        super().__init__()
        if n_samples < 2 or not 0 < ess_target <= 1 or eta_update not in ("solve", "gradient"):
            found = f"n_samples {n_samples}, ess_target {ess_target}, eta_update {eta_update!r}"
            raise ValueError(f"{found}: must be at least 2; in (0, 1]; 'solve' or 'gradient'")
        self.encoder, self.decoder, self.n_samples = encoder, decoder, n_samples
        self.ess_target, self.eta_update, self.centred = ess_target, eta_update, centred
        log_eta = torch.tensor(math.log(100.0))  # where the authors start
        self.log_eta = nn.Parameter(log_eta, requires_grad=eta_update == "gradient")

    def forward(self, x, beta, **encoder_options):
        """The loss of one step (scalar, with gradient) and metrics (scalars, without). beta: a
        number or a tensor, which torch.compile does not take for a constant."""
        z, log_q = self.encoder(x, self.n_samples, **encoder_options)  # (N, K, B), (N, K)
        self.check(x, beta, z, log_q)
        log_px = self.decoder.log_prob(x, z)  # (N, K)
        if log_px.shape != log_q.shape:
            raise ValueError(f"log_prob(x, z) is {(*log_px.shape,)}, must be {(*log_q.shape,)}")
        log_q, log_px = log_q.float(), log_px.float()  # bf16 cannot tell -5010 from -5016
        reward, per_token = log_px.detach(), log_q.dim() == 3
        if per_token:
            reward = self.decoder.credit(reward).view_as(log_q)  # (N, K, B), up to the loss
        # One eta for the whole batch, even when several processes share it.
        batch = gather_batch(reward), gather_batch(log_q)  # (N of all, K) each
        if self.eta_update == "solve":
            self.log_eta.data.copy_(solve_eta(*batch, beta, self.ess_target).log())
        eta = self.log_eta.exp()
        ess = ess_ratio(log_weights(*batch, eta, beta)).mean()
        w = log_weights(reward, log_q, eta, beta).exp().detach()  # (N, K)

        # Each loss reaches only its own network: one backward pass serves both. Encoder, eq. (6):
        # codes are drawn from q, so the expected gradient of their mean log q is zero, and taking
        # 1 / K off each weight (ours) removes only noise: a share of the variance of about `ess`.
        w = w - 1 / self.n_samples if self.centred else w
        loss = -(w * log_q).flatten(1).sum(dim=1).mean()
        if per_token:
            log_q, log_px = log_q.sum(dim=2), log_px.sum(dim=2)  # of whole codes
        loss = loss - log_px.mean()  # decoder, eq. (7)
        if self.eta_update == "gradient":
            loss = loss + (ess - self.ess_target) ** 2

        kl = log_q.mean() + z.size(-1) * math.log(self.encoder.vocab_size)  # to the uniform prior
        beta = eta.new_zeros(()) + beta  # a number or a tensor
        metrics = dict(reward=log_px.mean(), log_q=log_q.mean(), kl=kl, ess=ess, eta=eta, beta=beta)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def check(self, x, beta, z, log_q):
        """Refuse what would train without complaint, but wrongly."""
        NK = (len(x) if isinstance(x, torch.Tensor) else len(z), self.n_samples)
        if z.shape[:-1] != NK or log_q.shape not in (NK, z.shape):
            found = f"z is {(*z.shape,)}, log_q {(*log_q.shape,)}"
            raise ValueError(f"{found}; must be (N, K, B) and (N, K), with (N, K) = {NK}")
        if log_q.dim() == 3 and not hasattr(self.decoder, "credit"):
            raise ValueError("log_q is per token: sum over tokens, or add decoder.credit(log_px)")
        if torch.is_grad_enabled() and not log_q.requires_grad:
            raise ValueError("log_q has no gradient: compute it outside torch.no_grad()")
        if not (isinstance(beta, torch.Tensor) or beta >= 0):
            raise ValueError(f"beta is {beta}, must be zero or more")

    @torch.no_grad()
    def encode(self, x, mode=False, search=0, noise=None):
        """One code per example, (N, B) int64: drawn from q; with mode, the likeliest, by
        encoder.mode(x); with search, the best found in so many decodings, see search.py."""
        if search:
            from search import search_codes

            return search_codes(self, x, search, noise)
        options = {} if noise is None else {"noise": noise}
        return self.encoder.mode(x) if mode else self.encoder(x, 1, **options)[0].squeeze(1)

    def decode(self, z):
        """The distribution p(x|z) for codes z (..., B); it has .mean and .log_prob(x)."""
        return self.decoder(z)

    def sample(self, n):
        """The distributions p(x|z) for n codes drawn from the uniform prior."""
        shape, device = (n, self.encoder.n_tokens), next(self.parameters()).device
        return self.decode(torch.randint(self.encoder.vocab_size, shape, device=device))


def draw(logits, u):
    """S tokens from each row of logits (..., V) by inverse CDF at u (..., S), uniform in [0, 1):
    (..., S) int64. The last entry of the CDF, 1 up to rounding, scales u."""
    cdf = logits.float().softmax(dim=-1).cumsum(dim=-1)  # (..., V)
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp_max(logits.size(-1) - 1)


def token_kl(logits):
    """KL of softmax(logits) to the uniform prior: (..., V) -> (...) float32, with gradient."""
    log_q = logits.detach().log_softmax(dim=-1, dtype=torch.float32)  # sum_v q d(log q) = 0
    q = logits.softmax(dim=-1, dtype=torch.float32)
    return (q * log_q).sum(dim=-1) + math.log(logits.size(-1))


class TokenEncoder(nn.Module):
    """An encoder from any net(x) -> logits (N, B, V): tokens are independent of each other given x.
    noise (N, K, B), uniform in [0, 1), decides every token. per_token: log_q is (N, K, B). B and V
    need to be given only to sample() before the first pass."""

    def __init__(self, net, n_tokens=None, vocab_size=None, per_token=False):
        super().__init__()
        self.net, self.per_token = net, per_token
        self.n_tokens, self.vocab_size = n_tokens, vocab_size

    def logits(self, x):
        logits = self.net(x).float()
        if logits.dim() != 3:
            raise ValueError(f"net(x) is {(*logits.shape,)}, must be logits (N, B, V)")
        self.n_tokens, self.vocab_size = logits.shape[1:]
        return logits

    def forward(self, x, n_samples, noise=None, with_kl=False):
        """z (N, K, B), log_q (N, K) and, if asked for, the KL to the uniform prior (N, 1)."""
        logits = self.logits(x)  # (N, B, V)
        if noise is None:
            noise = torch.rand(len(logits), n_samples, self.n_tokens, device=logits.device)
        z = draw(logits.detach(), noise.transpose(1, 2).contiguous())  # (N, B, K)
        log_q = logits.log_softmax(dim=-1).gather(2, z)  # (N, B, K)
        log_q = log_q.transpose(1, 2) if self.per_token else log_q.sum(dim=1)  # (N, K, B) or (N, K)
        kl = [token_kl(logits).sum(dim=1, keepdim=True)] if with_kl else []
        return z.transpose(1, 2), log_q, *kl

    def mode(self, x):
        return self.logits(x).argmax(dim=-1)  # (N, B)

    def proposals(self, x, z):
        return self.logits(x)  # whatever the code z


def demo(n_steps=1000):
    """Store 8 patterns of 48 bits in codes of B = 3 tokens with V = 4 values.

    With 64 codes, every expectation is a sum. No encoder and decoder have a beta-ELBO above
    -beta log 8: on average, log p(x|z) - beta KL <= (I - H) - beta I <= -beta H, with the entropy
    H = log 8 of the patterns and the information I <= H that the code holds about them.
    """
    torch.manual_seed(0)
    B, V, D = 3, 4, 48
    patterns = torch.randint(2, (8, D)).float()
    codes = torch.cartesian_prod(*[torch.arange(V)] * B).expand(8, -1, -1)  # (8, 64, B)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(B * V, 64), nn.ReLU(), nn.Linear(64, D))

        def log_prob(self, x, z):
            logits = self.net(nn.functional.one_hot(z, V).flatten(-2).float())  # (N, K, D)
            return torch.distributions.Bernoulli(logits=logits).log_prob(x.unsqueeze(1)).sum(-1)

    net = nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, B * V), nn.Unflatten(1, (B, V)))
    model = DAPS(TokenEncoder(net), Decoder(), n_samples=8, ess_target=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    print("While the K codes of a pattern differ in reward, eta holds the effective sample size")
    print("(ESS) at its target, half of K. Once the encoder is sure, ESS nears 1 and eta 0.\n")
    print("  step    beta     eta    ESS   beta-ELBO   best q for this decoder   upper bound")
    for step in range(n_steps + 1):
        beta = 0.1 * 0.1 ** (step / n_steps)  # from 0.1 to 0.01: explore first
        loss, metrics = model(patterns.repeat(8, 1), beta)
        if step in (0, 5, 10, 15, 20, 50, n_steps // 4, n_steps):
            with torch.no_grad():  # exact, over all 64 codes
                log_p = net(patterns).log_softmax(-1).unsqueeze(1)  # (8, 1, B, V)
                log_q = log_p.expand(-1, 64, -1, -1).gather(3, codes.unsqueeze(3)).sum((2, 3))
                log_px, log_prior = model.decoder.log_prob(patterns, codes), -B * math.log(V)
                elbo = (log_q.exp() * (log_px - beta * (log_q - log_prior))).sum(1).mean()
                best = beta * (log_px / beta + log_prior).logsumexp(1).mean()
            bound = -beta * math.log(8)
            print(f"{step:6d}  {beta:6.3f}  {metrics['eta']:6.3f}  {metrics['ess']:5.2f}", end="")
            print(f"   {elbo:9.3f}   {best:23.3f}   {bound:11.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"\nThe beta-ELBO ends {bound - elbo:.3f} nats below what no two networks can exceed.")
    return elbo.item(), best.item(), bound


if __name__ == "__main__":
    demo()
