"""The methods DAPS is compared with: the same networks and data, other ways to train the encoder.

    gumbel, gumbel_na   straight-through Gumbel-Softmax (Jang et al. 2016)
    grmck, grmck_na     Gumbel-Rao, Monte Carlo (Paulus et al. 2020)
    reinmax_na          ReinMax, second-order straight-through (Liu et al. 2023)
    rloo, rloo_na       REINFORCE with a leave-one-out baseline (Kool et al. 2019)
    ppo                 clipped surrogate, learned value baseline (Schulman et al. 2017)
    vqvae               nearest code vector (van den Oord et al. 2017), by EMA or by gradient
    fsq                 finite scalar quantisation (Mentzer et al. 2023)
    gaussian            Gaussian VAE whose latent takes as many bits in float32

_na: all tokens in one pass. Each has the interface of DAPS: forward(x, beta, noise) -> loss and
metrics, encode, decode, sample. Noise (N, *noise_shape), uniform in [0, 1), is all its randomness.

Letters: N examples, K codes per example, B tokens per code, V values per token, H width.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from daps import DAPS, gather_batch, token_kl
from data import mix, to_uniform
from search import search_codes


class Method(nn.Module):
    """An encoder and a decoder that encode, decode and sample as in DAPS. noise_shape: of the noise
    per example. tau: a temperature that the training loop anneals, or None."""

    has_kl = discrete = True  # there is a q(z|x); z are tokens
    n_epochs = 1  # updates per batch
    encode, decode, sample = DAPS.encode, DAPS.decode, DAPS.sample

    def __init__(self, encoder, decoder, noise_shape, tau=None):
        super().__init__()
        self.encoder, self.decoder, self.noise_shape = encoder, decoder, noise_shape
        self.register_buffer("tau", tau)


def elbo_loss(log_px, kl, beta):
    """The negative beta-ELBO and its logged metrics; log_px and kl (N, ...) with gradient."""
    beta = log_px.new_zeros(()) + beta  # a number or a tensor
    metrics = {"reward": log_px.mean().detach(), "kl": kl.mean().detach(), "beta": beta}
    return beta * kl.mean() - log_px.mean(), metrics


# ---------------------------------------------------------------------------------------------
# Relaxations. Each turns logits and noise u, (..., V) each, into a row (..., V) that is one-hot in
# value, drawn by the logits, and carries a gradient to them. All in float32.


def log_exponential(u):
    """Logs of Exp(1) numbers, which are minus Gumbel noise. u, a multiple of 2^-24 in [0, 1), gives
    -log(1 - u); zero stands for all numbers up to the next multiple and becomes their mean."""
    return torch.log1p(-u).clamp_(max=-(2**-25)).neg_().log()


def gumbel_softmax(logits, u, tau):
    """Straight-through Gumbel-Softmax: the gradient is that of the softmax of perturbed logits."""
    perturbed = logits - log_exponential(u)
    hard = F.one_hot(perturbed.argmax(dim=-1), logits.size(-1))
    soft = (perturbed / tau).softmax(dim=-1)
    return hard + soft - soft.detach()


def reinmax(logits, u, tau):
    """ReinMax: a second-order approximation of the gradient (Heun's method)."""
    p, p_tau = logits.softmax(dim=-1), (logits / tau).softmax(dim=-1)
    hard = F.one_hot((logits - log_exponential(u)).argmax(dim=-1), logits.size(-1))
    middle = ((((hard + p_tau) / 2).log() - logits).detach() + logits).softmax(dim=-1)
    soft = 2 * middle - p / 2
    return hard + soft - soft.detach()


class GumbelRao(torch.autograd.Function):
    """The Gumbel-Softmax gradient, averaged over mc_samples perturbations that choose the same
    token. The backward pass makes one at a time, so that memory does not grow with their number."""

    @staticmethod
    def forward(ctx, logits, u, tau, mc_samples):
        z = (logits - log_exponential(u)).argmax(dim=-1)
        ctx.save_for_backward(logits, u, tau, z.unsqueeze(-1))
        ctx.mc_samples = mc_samples
        return F.one_hot(z, logits.size(-1)).to(logits.dtype)

    @staticmethod
    def backward(ctx, gradient):
        logits, u, tau, z = ctx.saved_tensors
        log_p, total = logits.log_softmax(dim=-1), torch.zeros_like(logits)
        column = torch.arange(u.size(-1), device=u.device, dtype=torch.int32)
        for m in range(ctx.mc_samples):
            # More noise, practically independent: a hash of u's bits, its column and m.
            key = mix(column ^ mix(column.new_full((), m)))
            log_e = log_exponential(to_uniform(mix((u * 2**24).int() ^ key)))  # (..., V)
            # Given that z wins, it has -log e_z, and the others -log(e_j / p_j + e_z), below it.
            log_top = log_e.gather(-1, z)  # (..., 1)
            perturbed = -torch.logaddexp(log_e - log_p, log_top).scatter_(-1, z, log_top)
            soft = (perturbed / tau).softmax(dim=-1)
            total += soft * (gradient - (soft * gradient).sum(dim=-1, keepdim=True))
        return total / (tau * ctx.mc_samples), None, None, None


@torch.compiler.disable  # it would unroll the loop
def gumbel_rao(logits, u, tau, mc_samples):
    return GumbelRao.apply(logits, u, tau, mc_samples)


class Relaxed(Method):
    """Back-propagate log p(x|z) through a code that is relaxed token by token. The KL is exact per
    token, with gradient. estimator: "gumbel", "grmck" or "reinmax"."""

    def __init__(self, encoder, decoder, estimator, mc_samples=1):
        super().__init__(encoder, decoder, (encoder.n_tokens, encoder.vocab_size), torch.ones(()))
        average = functools.partial(gumbel_rao, mc_samples=mc_samples)
        self.relax = {"gumbel": gumbel_softmax, "grmck": average, "reinmax": reinmax}[estimator]

    def forward(self, x, beta, noise):
        y, logits = self.encoder.relaxed(  # (N, B, V) each
            x, lambda logits, t: self.relax(logits, noise[:, t], self.tau)
        )
        log_px = self.decoder.log_prob(x, y.unsqueeze(1))  # (N, 1)
        loss, metrics = elbo_loss(log_px, token_kl(logits).sum(dim=1), beta)
        return loss, metrics | {"tau": self.tau.clone()}


# ---------------------------------------------------------------------------------------------
# Score functions: nothing is back-propagated through sampling.


class RLOO(Method):
    """REINFORCE: each of the K codes is compared with the mean of the others, K / (K - 1) times as
    far away as that of all. The KL along a code's prefixes is exact and has a gradient; since the
    prefixes are sampled, it is also part of the reward. Unbiased for any K >= 2."""

    def __init__(self, encoder, decoder, n_samples=8):
        super().__init__(encoder, decoder, (n_samples, encoder.n_tokens))
        if n_samples < 2:
            raise ValueError(f"n_samples is {n_samples}, must be at least 2: codes are compared")
        self.n_samples = n_samples

    def forward(self, x, beta, noise):
        z, log_q, kl = self.encoder(x, self.n_samples, noise, with_kl=True)  # kl (N, K) or (N, 1)
        log_px = self.decoder.log_prob(x, z)  # (N, K)
        reward, K = (log_px - beta * kl).detach(), self.n_samples
        advantage = (reward - reward.mean(dim=1, keepdim=True)) * K / (K - 1)
        loss, metrics = elbo_loss(log_px, kl, beta)
        return loss - (advantage * log_q).mean(), metrics | {"log_q": log_q.mean().detach()}


class PPO(Method):
    """Clipped surrogate: several epochs of updates on codes drawn once, via forward(..., epoch).
    Every token has a ratio of its own: their product over a code of 64 tokens would be outside the
    clip for most codes after a single update. The advantage is log p(x|z) minus a learned value of
    x, relative to a running mean and scale of the rewards, and standardised over the batch. beta is
    divided by the same scale, so that reward and entropy bonus keep their ratio in the ELBO. As
    usual for PPO, what a token does to the entropy of later ones is dropped."""

    def __init__(self, encoder, decoder, width, n_samples=8, n_epochs=1):
        super().__init__(encoder, decoder, (n_samples, encoder.n_tokens))
        self.n_epochs, self.clip = n_epochs, 0.2  # how far ratios may move from 1
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("reward_mean", torch.tensor(0.0))
        self.register_buffer("reward_std", torch.tensor(0.0))  # zero: nothing seen yet

    def forward(self, x, beta, noise, epoch=0):
        patches = self.encoder.patch_encoder(x)  # (N, P, H)
        if epoch == 0:
            self.z = self.encoder.sample(patches, noise)  # (N, K, B)
        log_px = self.decoder.log_prob(x, self.z)  # (N, K)
        log_q, kl = self.encoder.score(patches, self.z, with_kl=True)  # (N, K, B) each
        kl = kl.sum(dim=2)  # (N, K)
        value = self.value(patches.detach().mean(dim=1))  # (N, 1), in units of reward_std
        if epoch == 0:
            rewards = gather_batch(log_px)
            rate = torch.where(self.reward_std > 0, 0.01, 1.0)
            self.reward_mean.lerp_(rewards.mean(), rate)
            self.reward_std.lerp_(rewards.std() + 1e-6, rate)
            self.old_log_q = log_q.detach()
            self.target = (log_px.detach() - self.reward_mean) / self.reward_std  # (N, K)
            advantage = self.target - value.detach()
            all_advantages = gather_batch(advantage)
            self.scale = all_advantages.std() + 1e-6
            self.advantage = (advantage - all_advantages.mean()) / self.scale
        ratio, advantage = (log_q - self.old_log_q).exp(), self.advantage.unsqueeze(2)  # (N, K, B)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage).sum(dim=2).mean()
        loss = beta / (self.scale * self.reward_std) * kl.mean() - surrogate - log_px.mean()
        loss = loss + (value - self.target).square().mean()
        _, metrics = elbo_loss(log_px, kl, beta)
        return loss, metrics | {"clipped": ((ratio - 1).abs() > self.clip).float().mean()}


# ---------------------------------------------------------------------------------------------
# Quantisation: the encoder outputs vectors, there is no distribution q, and beta is not used.


def nearest(h, centres):
    """The index of the row of centres (V, H) nearest to each h (..., H): (...) int64. In float32
    (TF32 on GPUs), because distances are small differences of large numbers."""
    with torch.autocast(h.device.type, enabled=False):
        return (centres.square().sum(dim=1) - 2 * h.float() @ centres.T).argmin(dim=-1)


def cluster_sums(h, centres):
    """How many rows of h (n, H) are nearest to each of the centres, and their sum. No GPU sync."""
    assigned = F.one_hot(nearest(h, centres), len(centres)).float()  # (n, V)
    with torch.autocast(h.device.type, enabled=False):
        return assigned.sum(dim=0), assigned.T @ h  # (V,), (V, H)


def kmeans(h, centres, n_rounds=10):
    """Centres (V, H) after k-means on rows h (n, H), float32; those without rows stay in place."""
    for _ in range(n_rounds):
        count, total = cluster_sums(h, centres)
        centres = torch.where(count[:, None] > 0, total / count[:, None], centres)
    return centres


class Quantised(Method):
    has_kl = False

    @torch.no_grad()
    def encode(self, x, mode=False, search=0, noise=None):
        return search_codes(self, x, search, noise) if search else self.quantise(self.encoder(x))[0]

    def proposals(self, x, z):
        """Logits (N, B, V) of values worth trying: minus their squared distance from the encoder's
        vector, in units of a quarter of the mean squared distance of the nearest one."""
        distance = torch.cdist(*self.vectors_and_table(x)).square()
        return -4 * distance / distance.amin(dim=-1).mean(dim=1).clamp_min(1e-12).view(-1, 1, 1)

    def decode(self, z):
        return self.decoder(self.vectors(z))


class FSQ(Quantised):
    """Finite scalar quantisation: n numbers per token, each rounded to one of its own levels."""

    def __init__(self, encoder, decoder, levels, width):
        super().__init__(encoder, decoder, noise_shape=(0,))
        if math.prod(levels) != encoder.vocab_size or min(levels) < 2:
            wanted = f"numbers from 2 whose product is vocab_size = {encoder.vocab_size}"
            raise ValueError(f"fsq_levels is {levels}, must be {wanted}")
        levels, every = torch.tensor(levels), torch.arange(encoder.vocab_size).unsqueeze(1)
        basis = levels.cumprod(0) // levels  # 1, L1, L1 L2, ...
        table = (every // basis % levels - levels // 2).float()  # the numbers of each token, (V, n)
        for name, buffer in (("levels", levels), ("basis", basis), ("table", table)):
            self.register_buffer(name, buffer, persistent=False)
        self.project = nn.Linear(len(levels), width)

    def bound(self, h):
        """h (..., n), each squeezed into the range of its levels, which are 1 apart."""
        half = (self.levels - 1) * (1 - 1e-3) / 2
        # An even number of levels has none at zero; the shift keeps h = 0 about in place. The tan
        # is the authors'; atanh would be exact, but leaves two levels without a gradient.
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        return (h.float() + (offset / half).tan()).tanh() * half - offset

    def quantise(self, h):
        """h (..., n) -> token (...) int64 and its numbers in [-1, 1], (..., n) with gradient."""
        bounded = self.bound(h)
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = rounded + self.levels // 2  # 0 ... L - 1
        return (digits * self.basis).sum(dim=-1).long(), rounded / (self.levels // 2)

    def vectors(self, z):
        return self.project(self.table[z] / (self.levels // 2))

    def vectors_and_table(self, x):
        return self.bound(self.encoder(x)), self.table

    def forward(self, x, beta, noise=None):
        _, numbers = self.quantise(self.encoder(x))
        log_px = self.decoder.log_prob(x, self.project(numbers).unsqueeze(1))  # (N, 1)
        return -log_px.mean(), {"reward": log_px.mean().detach()}


class VQVAE(Quantised):
    """Nearest code vector, straight-through, with a commitment term. ema: code vectors are running
    means of the vectors assigned to them, in all processes, start from k-means on the first batch,
    and move to a vector of the batch if rarely used; else the paper's codebook term trains them."""

    def __init__(self, encoder, decoder, width, commitment=0.25, ema=True, decay=0.99):
        super().__init__(encoder, decoder, noise_shape=(encoder.n_tokens,))
        self.commitment, self.ema, self.decay = commitment, ema, decay
        codebook = torch.randn(encoder.vocab_size, width)
        if ema:
            self.register_buffer("codebook", codebook)
            self.register_buffer("total", codebook.clone())  # running sum of assigned vectors
            self.register_buffer("count", torch.zeros(len(codebook)))  # running number of them
            self.started = False  # whether k-means has run; a Python bool, so no GPU sync
            self.register_load_state_dict_post_hook(VQVAE.note_start)
        else:
            self.codebook = nn.Parameter(codebook)

    def note_start(self, _):
        self.started = bool(self.count.any())

    def quantise(self, h):
        z = nearest(h, self.codebook)
        return z, self.codebook[z]  # (...), (..., H)

    def vectors(self, z):
        return self.codebook[z]

    def vectors_and_table(self, x):
        return self.encoder(x), self.codebook

    def forward(self, x, beta, noise=None):
        h = self.encoder(x)  # (N, B, H)
        if self.ema and self.training:
            self.update(gather_batch(h).flatten(0, 1), gather_batch(noise).flatten())
        _, e = self.quantise(h)  # (N, B, H)
        log_px = self.decoder.log_prob(x, (h + (e - h).detach()).unsqueeze(1))  # (N, 1)
        commit = (h - e.detach()).square().sum(dim=(1, 2)).mean()
        loss = self.commitment * commit - log_px.mean()
        if not self.ema:
            loss = loss + (e - h.detach()).square().sum(dim=(1, 2)).mean()
        return loss, {"reward": log_px.mean().detach(), "commit": commit.detach()}

    @torch.no_grad()
    def update(self, h, noise):
        """Move the running means to rows of h (n, H), which noise (n,) shuffles. No GPU sync."""
        V, share = len(self.codebook), len(h) / len(self.codebook)
        shuffled = h[noise.argsort()].repeat(-(-V // len(h)), 1)  # (at least V, H)
        if not self.started:  # the first batch
            self.started = True
            self.codebook.copy_(kmeans(h, shuffled[:V], n_rounds=9))
            self.absorb(h, decay=0.0)  # a tenth round, which also sets the sums
        self.absorb(h, self.decay)
        # Rarely used codes move to rows of the batch and count as used for an eighth of a share.
        dead = self.count < 0.05 * share  # (V,)
        vectors = shuffled[dead.cumsum(0).sub(1).clamp_min(0)]  # the next one for each dead code
        self.codebook.copy_(torch.where(dead.unsqueeze(1), vectors, self.codebook))
        self.total.copy_(torch.where(dead.unsqueeze(1), vectors * share / 8, self.total))
        self.count.masked_fill_(dead, share / 8)

    def absorb(self, h, decay):
        count, total = cluster_sums(h, self.codebook)
        self.count.lerp_(count, 1 - decay)
        self.total.lerp_(total, 1 - decay)
        mean = self.total / self.count[:, None]
        self.codebook.copy_(torch.where(self.count[:, None] > 1e-6, mean, self.codebook))


class Gaussian(Method):
    """A Gaussian VAE with as many float32 numbers as fit in the bits of discrete codes, or one."""

    discrete = False
    decode = Quantised.decode

    def __init__(self, encoder, decoder, width):
        dim = max(1, int(encoder.n_tokens * math.log2(encoder.vocab_size)) // 32)
        super().__init__(encoder, decoder, noise_shape=(dim,))
        self.dim = dim
        self.posterior = nn.Linear(encoder.n_tokens * width, 2 * self.dim)
        self.project = nn.Linear(self.dim, encoder.n_tokens * width)

    def moments(self, x):
        mean, log_std = self.posterior(self.encoder(x).flatten(1)).float().chunk(2, dim=1)
        return mean, log_std.clamp(-10, 10)  # (N, dim) each

    def draw(self, mean, log_std, noise):
        noise = noise.flatten(1)[:, : self.dim].clamp(1e-6, 1 - 1e-6)  # extra noise is dropped
        return mean + log_std.exp() * torch.special.ndtri(noise)

    def divergence(self, mean, log_std):  # KL to a standard normal, (N,) with gradient
        return (mean.square() / 2 + (2 * log_std).exp() / 2 - log_std - 0.5).sum(dim=1)

    def forward(self, x, beta, noise):
        moments = self.moments(x)
        log_px = self.decoder.log_prob(x, self.vectors(self.draw(*moments, noise)).unsqueeze(1))
        return elbo_loss(log_px, self.divergence(*moments), beta)

    def vectors(self, z):
        return self.project(z).unflatten(-1, (self.encoder.n_tokens, -1))

    @torch.no_grad()
    def encode(self, x, mode=False, search=0, noise=None):
        """A sample of the posterior or its mean, (N, dim) float32; there is nothing to search."""
        noise = torch.rand(len(x), self.dim, device=x.device) if noise is None else noise
        mean, log_std = self.moments(x)
        return mean if mode else self.draw(mean, log_std, noise)

    def sample(self, n):
        return self.decode(torch.randn(n, self.dim, device=self.project.weight.device))
