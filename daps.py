"""DAPS: Discrete Variational Autoencoding via Policy Search (Drolet et al., 2026), in one file.

The choice of a discrete token has no derivative. DAPS treats the encoder q(z|x) as a policy and the
decoder's log p(x|z) as its reward:

    1. sample K codes per example from q
    2. weight them by q*/q, where q* maximises reward + entropy in a trust region around q (eq. 5)
    3. imitate: maximise sum_k w_k log q(z_k|x), weighted maximum likelihood (eq. 6)

One number, eta, sets how strongly the weights favour the best codes. It is chosen so that the
effective sample size of the K weights meets a target. No gradient passes through sampling.

Copy this file into your project: it needs only torch. `python daps.py` runs a demonstration.

Letters, here and in every file: N examples in a batch, K codes sampled per example, B tokens per
code, V values per token, H width.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

ETA_MIN, ETA_MAX = 1e-6, 1e10


def log_weights(reward, log_q, eta, beta):
    """Normalised log importance weights log(q*/q) of K codes drawn from q: (N, K) float32.

    reward (N, K) is log p(x|z) in nats, log_q (N, K) is log q(z|x). They get no gradient; eta does
    if it requires one. With credit per token, all are (N, K, B).
    """
    # eq. (5): q* is proportional to q exp((A - beta log q) / (eta + beta)); the codes are drawn
    # from q. The paper's A is the reward minus a log-sum-exp over K, constant per x, which cancels
    # here; so does the best reward, subtracted to keep small differences of large rewards exact.
    reward, log_q = reward.detach().float().clamp(-1e20, 1e20), log_q.detach().float()
    score = reward - reward.amax(dim=1, keepdim=True) - beta * log_q
    return (score / (eta + beta)).log_softmax(dim=1)


def ess_ratio(log_w):
    """Effective sample size of normalised weights, as a share of K: (N, K) -> (N,) in [1/K, 1].

    As K grows it tends to exp(-D2(q*||q)), and KL <= D2, so a target for it bounds the step in KL.
    """
    return torch.exp(-torch.logsumexp(2 * log_w, dim=1)) / log_w.size(1)


@torch.no_grad()
def solve_eta(reward, log_q, beta, ess_target):
    """The eta at which the batch mean of the ESS ratio meets ess_target: a float32 scalar.

    The ratio rises with eta, so bisection on log eta finds it, or an end of the range. No GPU sync.
    """
    low, high = (reward.new_full((), math.log(e), dtype=torch.float32) for e in (ETA_MIN, ETA_MAX))
    for _ in range(32):
        middle = (low + high) / 2
        too_bold = ess_ratio(log_weights(reward, log_q, middle.exp(), beta)).mean() < ess_target
        low, high = torch.where(too_bold, middle, low), torch.where(too_bold, high, middle)
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
        encoder.vocab_size    -> V
        decoder.log_prob(x, z) -> (N, K) with gradient, for z (N, K, B)

    and, outside training, encoder.n_tokens -> B, encoder.sample(x, n_samples) -> z,
    encoder(x, n_samples, with_kl=True) -> z, log_q, kl (N, K), and decoder(z) -> a distribution
    over x. Extra keyword arguments of forward() and encode() go to the encoder.

    Credit per token (ours, not the paper's): log_q and log_prob may be per token, (N, K, B), if
    decoder.credit(log_px) turns log p of each token's own region of x into log p of a window around
    it. Only that window then weights the token. If q factorises and the window covers all that a
    token can change, the dropped terms do not depend on the token: as eta grows, the expected
    gradient is the same, with less variance. A smaller window or an autoregressive q adds bias.

    Under torch.distributed, all processes call forward() together, with the same N: eta and ess
    are those of the whole batch, the other metrics those of this process.

    eta_update  "solve": exact on every batch. "gradient": as in the paper, a gradient step on
                (ESS ratio - target)^2 in the parameter log_eta; give it lr 1e-3 and no decay.
    centred     subtract 1 / K from the weights; the paper does not.
    """

    n_epochs, tau = 1, None  # updates per batch; no temperature

    def __init__(
        self, encoder, decoder, n_samples=8, ess_target=0.33, eta_update="solve", centred=True
    ):
        super().__init__()
        if n_samples < 2:
            raise ValueError(f"n_samples is {n_samples}, must be at least 2: codes are compared")
        if not 0 < ess_target <= 1:
            raise ValueError(f"ess_target is {ess_target}, must be in (0, 1]")
        if eta_update not in ("solve", "gradient"):
            raise ValueError(f"eta_update is {eta_update!r}, must be 'solve' or 'gradient'")
        self.encoder, self.decoder, self.n_samples = encoder, decoder, n_samples
        self.ess_target, self.eta_update, self.centred = ess_target, eta_update, centred
        log_eta = torch.tensor(math.log(100.0))  # where the authors start
        self.log_eta = nn.Parameter(log_eta, requires_grad=eta_update == "gradient")

    @property
    def noise_shape(self):  # per example, for encoders that take their noise as an argument
        return self.n_samples, self.encoder.n_tokens

    def forward(self, x, beta, **encoder_options):
        """The loss of one step (scalar, with gradient) and metrics (scalars, without)."""
        z, log_q = self.encoder(x, self.n_samples, **encoder_options)  # (N, K, B), (N, K)
        log_px = self.decoder.log_prob(x, z)  # (N, K)
        log_q, log_px = log_q.float(), log_px.float()  # bf16 cannot tell -5010 from -5016
        reward, per_token = log_px.detach(), log_q.dim() == 3
        if per_token:
            reward = self.decoder.credit(reward)  # (N, K, B), as is everything up to the loss
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

    @torch.no_grad()
    def encode(self, x, with_kl=False, **encoder_options):
        """One code per example, (N, B) int64, drawn from q; with_kl: also KL to prior, (N,)."""
        if not with_kl:
            return self.encoder.sample(x, 1, **encoder_options).squeeze(1)
        z, _, kl = self.encoder(x, 1, with_kl=True, **encoder_options)
        return z.squeeze(1), kl.squeeze(1)

    def decode(self, z):
        """The distribution p(x|z) for codes z (..., B); it has .mean and .log_prob(x)."""
        return self.decoder(z)

    def sample(self, n):
        """The distributions p(x|z) for n codes drawn from the uniform prior."""
        shape, device = (n, self.encoder.n_tokens), next(self.parameters()).device
        return self.decode(torch.randint(self.encoder.vocab_size, shape, device=device))


def demo(n_steps=2000):
    """Learn to store eight patterns of 12 bits in codes of B = 3 tokens with V = 4 values.

    With 64 codes, every expectation is a sum. The beta-ELBO of any encoder and decoder is at most
    -beta log 8: log p(x|z) - beta KL is, on average, at most (I - H) - beta I <= -beta H, with the
    entropy H = log 8 of the patterns and the information I <= H that the code holds about them.
    """
    torch.manual_seed(0)
    B, V, D = 3, 4, 12
    data = torch.randint(2, (8, D)).float()
    codes = torch.cartesian_prod(*[torch.arange(V)] * B).expand(8, -1, -1)  # (8, 64, B)
    one_hot = nn.functional.one_hot

    class Encoder(nn.Module):
        vocab_size = V

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(D + B * (V + 1), 64), nn.ReLU(), nn.Linear(64, V))

        def log_probs(self, x, z, t):  # of the V values of token t, given x and the tokens before
            past = one_hot(torch.where(torch.arange(B) < t, z, V), V + 1).flatten(-2).float()
            x = x.unsqueeze(1).expand(-1, z.size(1), -1)
            return self.net(torch.cat([x, past], dim=-1)).log_softmax(-1)  # (N, K, V)

        def log_prob(self, x, z):
            tokens = [self.log_probs(x, z, t).gather(-1, z[..., t : t + 1]) for t in range(B)]
            return torch.cat(tokens, dim=-1).sum(-1)

        def forward(self, x, n_samples):
            z = torch.zeros(len(x), n_samples, B, dtype=torch.long)
            with torch.no_grad():
                for t in range(B):
                    p = self.log_probs(x, z, t).exp().flatten(0, 1)
                    z[..., t] = torch.multinomial(p, 1).view(len(x), n_samples)
            return z, self.log_prob(x, z)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(B * V, 64), nn.ReLU(), nn.Linear(64, D))

        def log_prob(self, x, z):
            logits = self.net(one_hot(z, V).flatten(-2).float())  # (N, K, D)
            return torch.distributions.Bernoulli(logits=logits).log_prob(x.unsqueeze(1)).sum(-1)

    model = DAPS(Encoder(), Decoder(), n_samples=8, ess_target=0.97)  # high: small steps
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    print(" step   beta-ELBO   of the best encoder   of the best pair    ESS     eta")
    for step in range(n_steps + 1):
        beta = 0.1 ** (step / n_steps)  # from 1 to 0.1: explore first
        loss, metrics = model(data.repeat(8, 1), beta)
        if step in (0, 10, 20, 50, 100, 200, 500, 1000, n_steps):
            with torch.no_grad():  # exact, over all 64 codes
                log_q = model.encoder.log_prob(data, codes)  # (8, 64)
                log_px = model.decoder.log_prob(data, codes)  # (8, 64)
            log_prior = -B * math.log(V)
            elbo = (log_q.exp() * (log_px - beta * (log_q - log_prior))).sum(1).mean()
            best = beta * (log_px / beta + log_prior).logsumexp(1).mean()  # of this decoder
            numbers = f"{elbo:9.3f}   {best:19.3f}   {-beta * math.log(8):16.3f}"
            print(f"{step:5d}   {numbers}   {metrics['ess']:4.2f}   {metrics['eta']:5.2f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return elbo.item()


if __name__ == "__main__":
    demo()
