"""The methods DAPS is compared with: the same networks and data, other ways to train the encoder.

    gumbel, gumbel_na   straight-through Gumbel-Softmax (Jang et al. 2016)
    grmck, grmck_na     Gumbel-Rao, Monte Carlo (Paulus et al. 2020)
    reinmax_na          ReinMax, second-order straight-through (Liu et al. 2023)
    rloo, rloo_na       REINFORCE with a leave-one-out baseline (Kool et al. 2019)
    ppo                 clipped surrogate, learned value baseline (Schulman et al. 2017)
    vqvae               nearest code vector (van den Oord et al. 2017), by EMA or by gradient
    fsq                 finite scalar quantisation (Mentzer et al. 2023)
    gaussian            Gaussian VAE whose latent takes as many bits in float32

_na: all tokens in one pass; gumbel, grmck, rloo and ppo are autoregressive. Each is a module with
the interface of DAPS: forward(x, beta, noise) -> (loss, metrics), encode(x, with_kl, noise),
decode(z), sample(n); noise, (N, *noise_shape) uniform in [0, 1), is the only source of randomness.

`python baselines.py` measures the bias and variance of the gradient estimators by enumeration.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width, M Monte Carlo samples of Gumbel-Rao.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from daps import DAPS, gather_batch


class Method(nn.Module):
    """An encoder and a decoder that encode, decode and sample as in DAPS.

    noise_shape  shape of the uniform noise per example, the only source of randomness
    tau          temperature, a buffer that the training loop anneals; None if the method has none
    n_epochs     updates per batch
    """

    n_epochs = 1
    encode, decode, sample = DAPS.encode, DAPS.decode, DAPS.sample

    def __init__(self, encoder, decoder, noise_shape):
        super().__init__()
        self.encoder, self.decoder, self.noise_shape = encoder, decoder, noise_shape
        self.register_buffer("tau", None)


def elbo_loss(log_px, kl, beta):
    """The negative beta-ELBO and its logged metrics; log_px and kl (N, ...) with gradient."""
    beta = log_px.new_zeros(()) + beta  # a number or a tensor
    metrics = {"reward": log_px.mean().detach(), "kl": kl.mean().detach(), "beta": beta}
    return beta * kl.mean() - log_px.mean(), metrics


def token_kl(logits):
    """KL of softmax(logits) to the uniform distribution, per token: (..., V) -> (...) float32, with
    gradient. That of log q alone is left out: sum_v q d(log q) = d(sum_v q) = 0."""
    q = logits.softmax(dim=-1, dtype=torch.float32)
    log_q = logits.detach().log_softmax(dim=-1, dtype=torch.float32)
    return (q * log_q).sum(dim=-1) + math.log(logits.size(-1))


# ---------------------------------------------------------------------------------------------
# Relaxations. Each turns logits (..., V) and noise into a row y (..., V) that is one-hot in value
# and carries a gradient to the logits. All in float32.


def exponential(u):
    """Exp(1) from u, a multiple of 2^-24 in [0, 1): -log(1 - u). Zero stands for all numbers up to
    the next multiple, so it becomes their mean."""
    return torch.log1p(-u).clamp_(max=-(2**-25)).neg_()


def straight_through(z, soft):
    """The one-hot row of z (...) in value, with the gradient of soft (..., V)."""
    hard = torch.zeros_like(soft).scatter_(-1, z.unsqueeze(-1), 1.0)
    return hard + soft - soft.detach()


def gumbel_softmax(logits, u, tau):
    """Straight-through Gumbel-Softmax; u (..., V)."""
    perturbed = logits - exponential(u).log()  # Gumbel noise is -log of exponential noise
    return straight_through(perturbed.argmax(dim=-1), (perturbed / tau).softmax(dim=-1))


def conditional_gumbels(log_p, z, e):
    """Perturbed log-probabilities given that z wins: log_p, e (..., V), z (...); e is Exp(1).

    In log space, the maximum is -log e_z, and the others are Gumbels truncated at it,
    -log(e_j / p_j + e_z).
    """
    z = z.expand(e.shape[:-1]).unsqueeze(-1)  # (..., 1)
    log_e = e.log()
    log_top = log_e.gather(-1, z)  # minus the maximum, (..., 1)
    return -torch.logaddexp(log_e - log_p, log_top).scatter_(-1, z, log_top)  # (..., V)


def more_noise(u, m):
    """The m-th set of extra uniform numbers made from u, of its shape, practically independent.

    A hash (the finaliser of MurmurHash3) of u's bits, its column and m: the same on any device and
    for any share of a batch. A generator would have to draw M times as many numbers on the CPU and
    copy them over.
    """
    column = torch.arange(u.size(-1), device=u.device, dtype=torch.int32)
    h = (u * 2**24).int() * 251 + column * -1640531527 + (m * 2135587861 % 2**31)
    for shift, factor in ((16, -2048144789), (13, -1028477387)):  # int32 wraps around
        h = (h ^ (h >> shift) & (1 << 32 - shift) - 1) * factor
    h = h ^ (h >> 16) & 0xFFFF
    return ((h >> 8) & 0xFFFFFF).float() / 2**24


class GumbelRao(torch.autograd.Function):
    """Gumbel-Rao: the Gumbel-Softmax gradient averaged over M Gumbels that choose the same token.

    u (..., V) decides the choice; the noise for the average is derived from it. With M = 1 this is
    the straight-through Gumbel-Softmax in distribution. The noise carries no gradient.

    Only the gradient needs the average, so the backward pass takes it, one Gumbel at a time: rows
    stay in the processor's cache, and memory does not grow with M.
    """

    @staticmethod
    def forward(ctx, logits, u, tau, mc_samples):
        z = (logits - exponential(u).log()).argmax(dim=-1)
        ctx.save_for_backward(logits, u, tau, z)
        ctx.mc_samples = mc_samples
        return F.one_hot(z, logits.size(-1)).to(logits.dtype)

    @staticmethod
    def backward(ctx, gradient):
        logits, u, tau, z = ctx.saved_tensors
        log_p, total = logits.log_softmax(dim=-1), torch.zeros_like(logits)
        for m in range(ctx.mc_samples):
            e = exponential(more_noise(u, m))
            soft = (conditional_gumbels(log_p, z, e) / tau).softmax(dim=-1)
            inner = (soft * gradient).sum(dim=-1, keepdim=True)
            total += soft * (gradient - inner)  # back through the softmax
        return total / (tau * ctx.mc_samples), None, None, None


@torch.compiler.disable  # it would unroll the loop
def gumbel_rao(logits, u, tau, mc_samples):
    return GumbelRao.apply(logits, u, tau, mc_samples)


def reinmax(logits, u, tau):
    """ReinMax: a second-order approximation of the gradient (Heun's method), on the same sample."""
    p = logits.softmax(dim=-1)
    z = (logits - exponential(u).log()).argmax(dim=-1)
    hard = F.one_hot(z, logits.size(-1)).float()
    middle = (hard + (logits / tau).softmax(dim=-1)) / 2
    middle = ((middle.log() - logits).detach() + logits).softmax(dim=-1)
    return straight_through(z, 2 * middle - p / 2)


class Relaxed(Method):
    """Back-propagate log p(x|z) through a code that is relaxed token by token.

    The KL is exact per token, with gradient. estimator: "gumbel", "grmck" or "reinmax".
    """

    def __init__(self, encoder, decoder, estimator, mc_samples=1):
        super().__init__(encoder, decoder, (encoder.n_tokens, encoder.vocab_size))
        average = functools.partial(gumbel_rao, mc_samples=mc_samples)
        self.relax = {"gumbel": gumbel_softmax, "grmck": average, "reinmax": reinmax}[estimator]
        self.tau = torch.tensor(1.0)

    def forward(self, x, beta, noise):
        def choose(logits, t):
            return self.relax(logits, noise[:, t], self.tau)

        y, logits = self.encoder.relaxed(x, choose)  # (N, B, V) each
        log_px = self.decoder.log_prob(x, y.unsqueeze(1))  # (N, 1)
        kl = token_kl(logits).sum(dim=1)  # (N,)
        loss, metrics = elbo_loss(log_px, kl, beta)
        return loss, metrics | {"tau": self.tau.clone()}


# ---------------------------------------------------------------------------------------------
# Score functions: nothing is back-propagated through sampling.


class RLOO(Method):
    """REINFORCE: each of the K codes is compared with the mean of the others.

    The KL along a code's prefixes is exact and has a gradient of its own; since the prefixes are
    sampled, it is also part of the reward. Unbiased for any K >= 2.
    """

    def __init__(self, encoder, decoder, n_samples=8):
        super().__init__(encoder, decoder, (n_samples, encoder.n_tokens))
        if n_samples < 2:
            raise ValueError(f"n_samples is {n_samples}, must be at least 2: codes are compared")
        self.n_samples = n_samples

    def forward(self, x, beta, noise):
        z, log_q, kl = self.encoder(x, self.n_samples, noise, with_kl=True)  # kl (N, K) or (N, 1)
        log_px = self.decoder.log_prob(x, z)  # (N, K)
        reward = (log_px - beta * kl).detach().expand_as(log_q)
        advantage = (reward - reward.mean(dim=1, keepdim=True)) * self.n_samples
        advantage = advantage / (self.n_samples - 1)  # = reward - mean of the others
        loss, metrics = elbo_loss(log_px, kl, beta)
        return loss - (advantage * log_q).mean(), metrics | {"log_q": log_q.mean().detach()}


class PPO(Method):
    """Clipped surrogate: several epochs of updates on codes drawn once, via forward(..., epoch).
    With a single epoch nothing is clipped: a policy gradient with a learned value.

    Every token has a ratio of its own. The product over a code of 64 tokens would be outside the
    clip for most codes after a single update.

    The advantage is log p(x|z) minus a learned value of x, standardised over the batch as is usual
    for PPO; the entropy bonus beta is divided by the same scale, so that the two keep their ratio
    in the ELBO. As usual for PPO, that bonus is not part of the reward: what a token does to the
    entropy of later ones is dropped. The value is learned relative to a running mean and scale of
    the rewards.
    """

    def __init__(self, encoder, decoder, width, n_samples=8, n_epochs=4, clip=0.2):
        super().__init__(encoder, decoder, (n_samples, encoder.n_tokens))
        self.n_samples, self.n_epochs, self.clip = n_samples, n_epochs, clip
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("reward_mean", torch.tensor(0.0))
        self.register_buffer("reward_std", torch.tensor(0.0))  # zero: nothing seen yet

    def forward(self, x, beta, noise, epoch=0):
        patches = self.encoder.patch_encoder(x)  # (N, P, H)
        if epoch == 0:
            self.z = self.encoder.sample_codes(patches, self.n_samples, noise)  # (N, K, B)
        log_px = self.decoder.log_prob(x, self.z)  # (N, K)
        self.encoder.count(self.z)
        scores = self.encoder.score(patches, self.z, with_kl=True)  # (N, K, B) each
        log_q, kl = scores[0], scores[1].sum(dim=-1)  # (N, K, B), (N, K)
        value = self.value(patches.detach().mean(dim=1))  # (N, 1), in units of reward_std
        if epoch == 0:
            rewards = gather_batch(log_px)
            rate = torch.where(self.reward_std > 0, 0.01, 1.0)
            self.reward_mean.lerp_(rewards.mean(), rate)
            self.reward_std.lerp_(rewards.std(), rate)
            self.old_log_q = log_q.detach()
            self.target = (log_px.detach() - self.reward_mean) / self.reward_std  # (N, K)
            advantage = self.target - value.detach()
            all_advantages = gather_batch(advantage)
            self.scale = all_advantages.std() + 1e-6
            self.advantage = (advantage - all_advantages.mean()) / self.scale
        ratio, advantage = (log_q - self.old_log_q).exp(), self.advantage.unsqueeze(2)  # (N, K, B)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage).sum(dim=2).mean()
        kl_weight = beta / (self.scale * self.reward_std)
        loss = kl_weight * kl.mean() - surrogate - log_px.mean()
        loss = loss + (value - self.target).square().mean()
        _, metrics = elbo_loss(log_px, kl, beta)
        metrics["clipped"] = ((ratio - 1).abs() > self.clip).float().mean()
        return loss, metrics


# ---------------------------------------------------------------------------------------------
# Quantisation: the encoder outputs vectors, there is no distribution q, and beta is not used.


def nearest(h, centres):
    """The index of the row of centres (V, H) nearest to each h (..., H): (...) int64. In float32
    (TF32 on GPUs), because distances are small differences of large numbers."""
    with torch.autocast(h.device.type, enabled=False):
        distance = centres.square().sum(dim=1) - 2 * h.float() @ centres.T
    return distance.argmin(dim=-1)


def cluster_sums(h, centres):
    """How many rows of h (n, H) are nearest to each of centres (V, H), and their sum: (V,), (V, H).
    No shape depends on values, so there is no GPU sync."""
    one_hot = F.one_hot(nearest(h, centres), len(centres)).float()  # (n, V)
    with torch.autocast(h.device.type, enabled=False):
        return one_hot.sum(dim=0), one_hot.T @ h


def kmeans(h, centres, n_rounds=10):
    """Centres (V, H) after rounds of k-means on the rows of h (n, H), float32. A centre that is
    nearest to no row stays where it is."""
    for _ in range(n_rounds):
        count, total = cluster_sums(h, centres)
        mean = total / count.clamp_min(1).unsqueeze(1)
        centres = torch.where(count.unsqueeze(1) > 0, mean, centres)
    return centres


class Quantised(Method):
    """Base of the two: log p(x|z) with a straight-through gradient from quantised vectors."""

    @torch.no_grad()
    def encode(self, x, with_kl=False, noise=None):
        """The code of each example: (N, B) int64. Nothing is random, and there is no KL."""
        z = self.quantise(self.encoder(x))[0]
        return (z, None) if with_kl else z

    def decode(self, z):
        return self.decoder(self.vectors(z))


class FSQ(Quantised):
    """Finite scalar quantisation: each of a few numbers per token is rounded to one of L levels.

    levels: the number of levels for each; their product is V.
    """

    def __init__(self, encoder, decoder, levels, width):
        super().__init__(encoder, decoder, noise_shape=(0,))
        if math.prod(levels) != encoder.vocab_size or min(levels) < 2:
            wanted = f"at least 2 each, with the product vocab_size = {encoder.vocab_size}"
            raise ValueError(f"fsq_levels is {levels}, must be {wanted}")
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = torch.tensor([1, *levels[:-1]]).cumprod(0)
        self.register_buffer("basis", basis, persistent=False)
        self.project = nn.Linear(len(levels), width)

    def quantise(self, h):
        """h (..., n) -> token (...) int64 and its numbers in [-1, 1], (..., n) with gradient."""
        half = (self.levels - 1) * (1 + 1e-3) / 2  # slightly more, so that tanh reaches the ends
        # An even number of levels has none at zero: the shift keeps h = 0 in place.
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        bounded = (h.float() + (offset / half).atanh()).tanh() * half - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        digits = rounded.detach() + self.levels // 2  # 0 ... L - 1
        return (digits * self.basis).sum(dim=-1).round().long(), rounded / (self.levels // 2)

    def vectors(self, z):
        """The decoder's vectors of tokens z: (...) -> (..., H)."""
        digits = z.unsqueeze(-1) // self.basis % self.levels
        return self.project((digits - self.levels // 2) / (self.levels // 2))

    def forward(self, x, beta, noise=None):
        _, numbers = self.quantise(self.encoder(x))
        log_px = self.decoder.log_prob(x, self.project(numbers).unsqueeze(1))  # (N, 1)
        return -log_px.mean(), {"reward": log_px.mean().detach()}


class VQVAE(Quantised):
    """Nearest code vector, straight-through, with a commitment term.

    ema: code vectors are running means of the vectors assigned to them, start from k-means on the
    first batch, and move to a vector of the batch if rarely used. Otherwise they are parameters,
    trained by the paper's codebook term. Statistics are of the whole batch, over all processes.
    """

    def __init__(self, encoder, decoder, width, commitment=0.25, ema=True, decay=0.99):
        # The noise decides which vectors revive dead codes.
        super().__init__(encoder, decoder, noise_shape=(encoder.n_tokens,))
        V = encoder.vocab_size
        self.commitment, self.ema, self.decay = commitment, ema, decay
        codebook = torch.randn(V, width)
        if ema:
            self.register_buffer("codebook", codebook)
            self.register_buffer("total", codebook.clone())  # running sum of assigned vectors
            self.register_buffer("count", torch.zeros(V))  # running number of them
            self.started = False  # whether k-means has run; a Python bool, so no GPU sync
            self.register_load_state_dict_post_hook(VQVAE.note_start)
        else:
            self.codebook = nn.Parameter(codebook)

    def note_start(self, _):
        self.started = bool(self.count.any())

    def quantise(self, h):
        """h (..., H) -> token (...) int64 and its code vector (..., H)."""
        z = nearest(h, self.codebook)
        return z, self.codebook[z]

    def vectors(self, z):
        return self.codebook[z]

    def forward(self, x, beta, noise=None):
        h = self.encoder(x)  # (N, B, H)
        if self.ema and self.training:
            self.update(gather_batch(h).flatten(0, 1), gather_batch(noise).flatten())
        z, e = self.quantise(h)
        log_px = self.decoder.log_prob(x, (h + (e - h).detach()).unsqueeze(1))  # (N, 1)
        commit = (h - e.detach()).square().sum(dim=(1, 2)).mean()
        loss = self.commitment * commit - log_px.mean()
        if not self.ema:
            loss = loss + (e - h.detach()).square().sum(dim=(1, 2)).mean()
        return loss, {"reward": log_px.mean().detach(), "commit": commit.detach()}

    @torch.no_grad()
    def update(self, h, noise):
        """One step of the running means towards vectors h (n, H) float32; noise (n,) shuffles them.
        There is no GPU sync."""
        V = len(self.codebook)
        shuffled = h[noise.argsort()].repeat(-(-V // len(h)), 1)  # (at least V, H)
        if not self.started:  # the first batch
            self.started = True
            self.codebook.copy_(kmeans(h, shuffled[:V], n_rounds=9))
            self.absorb(h, decay=0.0)  # a tenth round, which also sets the sums
        self.absorb(h, self.decay)
        # Codes used for less than a twentieth of an even share of the batch move to vectors of the
        # batch and count as used for an eighth of a share.
        share = len(h) / V
        dead = self.count < 0.05 * share  # (V,)
        vectors = shuffled[dead.cumsum(0).sub(1).clamp_min(0)]  # the next one for each dead code
        self.codebook.copy_(torch.where(dead.unsqueeze(1), vectors, self.codebook))
        self.total.copy_(torch.where(dead.unsqueeze(1), vectors * share / 8, self.total))
        self.count.masked_fill_(dead, share / 8)

    def absorb(self, h, decay):
        count, total = cluster_sums(h, self.codebook)
        self.count.lerp_(count, 1 - decay)
        self.total.lerp_(total, 1 - decay)
        mean = self.total / self.count.clamp_min(1e-6).unsqueeze(1)
        self.codebook.copy_(torch.where(self.count.unsqueeze(1) > 1e-6, mean, self.codebook))


# ---------------------------------------------------------------------------------------------
# No discrete code at all.


class Gaussian(Method):
    """A Gaussian VAE with as many float32 numbers as fit in the bits of the discrete codes."""

    def __init__(self, encoder, decoder, width):
        bits = encoder.n_tokens * math.log2(encoder.vocab_size)
        dim = max(1, int(bits) // 32)
        super().__init__(encoder, decoder, noise_shape=(dim,))
        self.dim = dim
        self.posterior = nn.Linear(encoder.n_tokens * width, 2 * self.dim)
        self.project = nn.Linear(self.dim, encoder.n_tokens * width)

    def moments(self, x):
        mean, log_std = self.posterior(self.encoder(x).flatten(1)).float().chunk(2, dim=1)
        return mean, log_std.clamp(-10, 10)  # (N, dim) each

    def draw(self, mean, log_std, noise):
        """Normal numbers from uniform ones; extra noise is dropped."""
        noise = noise.flatten(1)[:, : self.dim].clamp(1e-6, 1 - 1e-6)
        return mean + log_std.exp() * torch.special.ndtri(noise)

    def divergence(self, mean, log_std):
        return (mean.square() / 2 + (2 * log_std).exp() / 2 - log_std - 0.5).sum(dim=1)  # (N,)

    def forward(self, x, beta, noise):
        moments = self.moments(x)
        log_px = self.decoder.log_prob(x, self.vectors(self.draw(*moments, noise)).unsqueeze(1))
        return elbo_loss(log_px, self.divergence(*moments), beta)

    def vectors(self, z):
        return self.project(z).unflatten(-1, (self.encoder.n_tokens, -1))

    @torch.no_grad()
    def encode(self, x, with_kl=False, noise=None):
        """A sample of the posterior: (N, dim) float32; with_kl: also its KL to the prior, (N,)."""
        noise = torch.rand(len(x), self.dim, device=x.device) if noise is None else noise
        moments = self.moments(x)
        z = self.draw(*moments, noise)
        return (z, self.divergence(*moments)) if with_kl else z

    def decode(self, z):
        return self.decoder(self.vectors(z))

    def sample(self, n):
        return self.decode(torch.randn(n, self.dim, device=self.project.weight.device))


# ---------------------------------------------------------------------------------------------


def demo(n_draws=20_000):
    """Bias and variance of the gradient estimators where the truth is a sum over 64 codes.

    One x, an encoder that is a table of logits (B = 3, V = 4), a fixed decoder. Each estimator
    estimates the gradient of the beta-ELBO with respect to the logits n_draws times.
    """
    torch.manual_seed(0)
    B, V, beta = 3, 4, 0.5
    codes = torch.cartesian_prod(*[torch.arange(V)] * B)  # (64, B)

    class Table(nn.Module):
        """Every draw has its own copy of the logits, and so its own gradient."""

        n_tokens, vocab_size = B, V

        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.randn(B, V).repeat(n_draws, 1, 1))  # (N, B, V)

        def forward(self, x, n_samples, noise, with_kl=False):
            q = torch.distributions.Categorical(logits=self.logits.unsqueeze(1))  # (N, 1, B)
            z = (noise.unsqueeze(-1) > q.probs.cumsum(-1)).sum(-1).clamp(max=V - 1)  # (N, K, B)
            kl, log_q = (math.log(V) - q.entropy()).sum(-1), q.log_prob(z).sum(-1)
            return (z, log_q, kl) if with_kl else (z, log_q)

        def relaxed(self, x, choose):
            return choose(self.logits, slice(None)), self.logits

    class Score(nn.Module):  # stands in for log p(x|z)
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(B * V, 16), nn.Tanh(), nn.Linear(16, 1))
            self.net[2].weight.data.mul_(8)

        def log_prob(self, x, z):
            y = z if z.is_floating_point() else F.one_hot(z, V).float()
            return self.net(y.flatten(-2)).squeeze(-1)

    encoder, decoder, eta = Table(), Score(), 1e3
    methods = {f"rloo, K = {k}": (RLOO(encoder, decoder, k), None) for k in (2, 8)}
    for tau in (1.0, 0.5):
        methods[f"gumbel, tau = {tau}"] = Relaxed(encoder, decoder, "gumbel"), tau
        for m in (10, 100):
            methods[f"grmck, tau = {tau}, M = {m}"] = Relaxed(encoder, decoder, "grmck", m), tau
    methods["reinmax, tau = 1.0"] = Relaxed(encoder, decoder, "reinmax"), 1.0
    daps = DAPS(encoder, decoder, n_samples=8, eta_update="gradient")
    daps.log_eta.data.fill_(math.log(eta))
    methods["daps, K = 8, eta = 1000"] = daps, None

    logits = encoder.logits[0].detach().requires_grad_()
    log_q = logits.log_softmax(-1)[torch.arange(B), codes].sum(-1)  # (64,)
    elbo = log_q.exp() * (decoder.log_prob(None, codes) - beta * (log_q + B * math.log(V)))
    (exact,) = torch.autograd.grad(elbo.sum(), logits)
    print("Bias and standard deviation of a gradient, over the norm of the exact one:")
    print(f"{'estimator':25}  {'bias':>6}  {'+-':>6}  {'std':>6}")
    table = {}
    for name, (model, tau) in methods.items():
        if tau is not None:
            model.tau.fill_(tau)
        loss, _ = model(
            torch.zeros(n_draws, 1), beta, noise=torch.rand(n_draws, *model.noise_shape)
        )
        (draws,) = torch.autograd.grad(-n_draws * loss, encoder.logits)  # (N, B, V)
        if model is daps:  # its steps are smaller by eta + beta, and its baseline includes itself
            draws = draws * (eta + beta) * 8 / 7
        std = draws.var(dim=0).sum().sqrt() / exact.norm()
        bias = (draws.mean(dim=0) - exact).norm() / exact.norm()
        table[name] = bias.item(), std.item()
        print(f"{name:25}  {bias:6.3f}  {std / n_draws**0.5:6.3f}  {std:6.3f}")
    return table


if __name__ == "__main__":
    demo()
