"""The networks: recognition models q(z|x) and generative models p(x|z).

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width, P patches (P = B everywhere).

A recognition model ("encoder") offers
    encoder(x, n_samples, noise=None) -> z (N, K, B) int64, log_q (N, K) float32 with gradient
    encoder.relaxed(x, choose)        -> y, logits (N, B, V): a code drawn with gradient
    encoder.kl(x, z)                  -> (N,) exact KL to the uniform prior along z (N, B)
    encoder.n_tokens, encoder.vocab_size
where noise (N, K, B), uniform in [0, 1), decides every token, so that a sample is a pure function
of x and noise. A generative model ("decoder") offers
    decoder.log_prob(x, z) -> (N, K) float32 with gradient, for z (N, K, B)
    decoder(z)             -> a torch distribution over x, for z (..., B)
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def draw(logits, u):
    """S tokens from each row of logits (..., V) by inverse CDF at u (..., S): (..., S) int64.

    u is uniform in [0, 1): one number per token, where the Gumbel-max trick would need V.
    """
    cdf = logits.float().softmax(dim=-1).cumsum(dim=-1)  # (..., V)
    # Rounding leaves the last entry near 1, not at 1. Scaled by it, u never points past the end,
    # and the first entry above u belongs to a token of non-zero probability. The clamp is for
    # logits that are not finite: they shall give a token, if a meaningless one, and no crash.
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp_max(logits.size(-1) - 1)


class TokenLogProb(torch.autograd.Function):
    """log softmax(logits) (..., V) at z (...): (...) float32. What it keeps is the logits, in their
    own dtype, where cross_entropy keeps a float32 copy and makes a third full of zeros."""

    @staticmethod
    def forward(ctx, logits, z):
        total = logits.float().logsumexp(dim=-1)
        ctx.save_for_backward(logits, total, z)
        return logits.gather(-1, z.unsqueeze(-1)).squeeze(-1).float() - total

    @staticmethod
    def backward(ctx, grad):
        logits, total, z = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        # of the chosen logit: 1 - probability; of the others: - probability
        result = (logits.float() - total.unsqueeze(-1)).exp_().mul_(-grad)
        return result.scatter_add_(-1, z.unsqueeze(-1), grad).to(logits.dtype), None


def token_log_prob(logits, z):
    """log q of every token: logits (..., V), z (...) -> (...) float32, with gradient."""
    return TokenLogProb.apply(logits, z)


def token_kl(logits):
    """KL of softmax(logits) to the uniform distribution, per token: (..., V) -> (...) float32."""
    log_q = logits.float().log_softmax(dim=-1)
    return (log_q.exp() * log_q).sum(dim=-1) + math.log(logits.size(-1))


def sinusoids(length, width):
    """Fixed positions (length, width): sines and cosines at wavelengths from 2 pi to 20,000 pi."""
    angle = torch.arange(length).unsqueeze(1) * torch.exp(
        -math.log(10_000.0) * torch.arange(0, width, 2) / width
    )
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Patches(nn.Module):
    """Cut images (N, C, height, width) into a grid of n_patches: (N, P, D).

    Patches have sides of even length; the image is padded with zeros, evenly on both sides, to
    whole patches. 28 x 28 in 8 patches: padded to 28 x 32, cut into 2 x 4 patches of 14 x 8.
    """

    def __init__(self, x_shape, n_patches):
        super().__init__()
        channels, height, width = x_shape
        self.rows = max(r for r in range(1, math.isqrt(n_patches) + 1) if n_patches % r == 0)
        self.columns = n_patches // self.rows
        self.ph, self.pw = (
            2 * math.ceil(n / parts / 2)
            for n, parts in ((height, self.rows), (width, self.columns))
        )
        extra_x, extra_y = self.columns * self.pw - width, self.rows * self.ph - height
        self.pad = (extra_x // 2, extra_x - extra_x // 2, extra_y // 2, extra_y - extra_y // 2)
        self.dim = channels * self.ph * self.pw

    def forward(self, x):
        x = F.pad(x, self.pad)  # (N, C, rows * ph, columns * pw)
        x = x.unflatten(2, (self.rows, self.ph)).unflatten(4, (self.columns, self.pw))
        x = x.permute(0, 2, 4, 1, 3, 5)  # (N, rows, columns, C, ph, pw)
        return x.reshape(x.size(0), self.rows * self.columns, self.dim)


class Resample(nn.Module):
    """Segments of motion (N, frames, features) at twice as many places: (N, P, H), P = 2 frames."""

    def __init__(self, x_shape, n_tokens, width):
        super().__init__()
        frames, features = x_shape
        if n_tokens != 2 * frames:
            raise ValueError(f"n_tokens is {n_tokens}, must be {2 * frames} for {frames} frames")
        self.conv = nn.ConvTranspose1d(features, width, 4, stride=2, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention without biases, with keys and values computed apart.

    That way one pair of methods serves self-attention (keys of the input itself), cross-attention
    (keys of the patches, computed once) and cached decoding (keys of all tokens so far).
    """

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split(self, h):
        return h.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (N, T, H) -> (N, heads, T, d)

    def keys_values(self, h):
        k, v = self.key_value(h).chunk(2, dim=-1)  # (N, T, H) each
        return self.split(k), self.split(v)  # (N, heads, T, d) each

    def forward(self, h, k, v, mask=None, causal=False):
        a = attend(self.split(self.query(h)), k, v, mask, causal)  # (N, heads, T, d)
        return self.out(a.transpose(1, 2).flatten(2))  # (N, T, H)


def attend(q, k, v, mask=None, causal=False):
    """softmax(q k^T / sqrt(d)) v for queries (N, heads, T, d) and keys and values (N, heads, S, d).

    CPU kernels are slow at softmax over rows of a handful of keys. Written out, it takes a sixth of
    the time, and sampling codes of 8 tokens three quarters.
    """
    if q.is_cuda or q.dtype != torch.float32 or k.size(2) > 16 or mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    scores = (q @ k.transpose(2, 3)).mul_(q.size(3) ** -0.5)  # (N, heads, T, S)
    if causal:
        scores.add_(scores.new_full(scores.shape[2:], -math.inf).triu_(1))
    p = scores.sub_(scores.detach().amax(dim=3, keepdim=True)).exp_()
    return p / p.sum(dim=3, keepdim=True) @ v


def mlp(width, ratio):
    return nn.Sequential(
        nn.Linear(width, ratio * width), nn.ReLU(), nn.Linear(ratio * width, width)
    )


class Block(nn.Module):
    """Pre-LayerNorm transformer block over patches: attention, MLP."""

    def __init__(self, width, n_heads, mlp_ratio):
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), mlp(width, mlp_ratio)

    def forward(self, h):
        a = self.norm_attention(h)
        h = h + self.attention(a, *self.attention.keys_values(a))
        return h + self.mlp(self.norm_mlp(h))


class Window(NamedTuple):
    """What a step sees of a cache: room for t + 1 tokens or a few more, which a mask hides."""

    k: torch.Tensor  # (N * K, heads, tokens, d)
    v: torch.Tensor
    t: torch.Tensor  # (1,)
    mask: torch.Tensor | None  # (1, tokens)

    def extend(self, k, v):
        """Add keys and values of token t, (N * K, heads, 1, d) each; return those of all so far."""
        if self.mask is None:  # the place of token t is the last
            self.k[:, :, -1:], self.v[:, :, -1:] = k, v
        else:
            self.k.index_copy_(2, self.t, k.to(self.k.dtype))
            self.v.index_copy_(2, self.t, v.to(self.v.dtype))
        return self.k, self.v, self.mask


class Cache:
    """Keys and values of the tokens so far, written in place into preallocated buffers.

    It grows by `chunk` tokens at a time. With 1 no work is wasted on tokens that are yet to come;
    compiled steps want few different shapes, and so a larger one.
    """

    def __init__(self, n_codes, n_tokens, chunk, like):
        _, heads, _, d = like.shape
        new = like.new_empty if chunk == 1 else like.new_zeros  # a mask hides numbers, but no NaN
        self.k, self.v = (new(n_codes, heads, n_tokens, d) for _ in range(2))
        self.steps = torch.arange(n_tokens, device=like.device)
        self.chunk = chunk

    def window(self, t):
        n = min((t // self.chunk + 1) * self.chunk, self.k.size(2))
        here = self.steps[t : t + 1]
        mask = None if self.chunk == 1 else (self.steps[:n] <= here).unsqueeze(0)
        return Window(self.k[:, :, :n], self.v[:, :, :n], here, mask)


class GrowingCache:
    """The same with gradient: nothing may be written in place, so every step copies the past."""

    def __init__(self):
        self.past = []

    def extend(self, k, v):
        past = self.past or (k[:, :, :0], v[:, :, :0])
        self.past = [torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True)]
        return *self.past, None


class CodeBlock(nn.Module):
    """Pre-LayerNorm block over tokens: causal attention, cross-attention to the patches, MLP."""

    def __init__(self, width, n_heads, mlp_ratio):
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_cross, self.cross = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), mlp(width, mlp_ratio)

    def forward(self, h, memory, cache=None):
        """h (N, K, T, H); memory: the patches' keys and values, (N, heads, P, d) each.

        Without a cache, h holds whole codes. With one, h holds the next token alone (T = 1), and
        the cache the keys and values of those before it.
        """
        N, K, T, H = h.shape
        a = self.norm_attention(h).view(N * K, T, H)
        k, v = self.attention.keys_values(a)  # (N * K, heads, T, d) each
        if cache is None:
            a = self.attention(a, k, v, causal=True)  # (N * K, T, H)
        else:
            a = self.attention(a, *cache.extend(k, v))
        h = h + a.view(N, K, T, H)
        # The K codes of one x ask the same patches: fold K into the queries, repeat no memory.
        a = self.norm_cross(h).view(N, K * T, H)
        h = h + self.cross(a, *memory).view(N, K, T, H)
        return h + self.mlp(self.norm_mlp(h))


class PatchEncoder(nn.Module):
    """x -> (N, P, H): standardise, cut into patches, embed, transformer blocks, LayerNorm. Motion
    is resampled instead of cut."""

    def __init__(self, x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio):
        super().__init__()
        self.register_buffer("x_mean", torch.tensor(0.0))
        self.register_buffer("x_std", torch.tensor(1.0))
        if len(x_shape) == 2:
            self.embed = Resample(x_shape, n_tokens, width)
        else:
            patches = Patches(x_shape, n_tokens)
            self.embed = nn.Sequential(patches, nn.Linear(patches.dim, width))
        self.register_buffer("positions", sinusoids(n_tokens, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, n_heads, mlp_ratio) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.embed((x - self.x_mean) / self.x_std) + self.positions  # (N, P, H)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def standardise(self, mean, std):
        """Standardise inputs by these two numbers from now on; a checkpoint remembers them."""
        self.x_mean.fill_(mean)
        self.x_std.fill_(std)


class AutoregressiveEncoder(nn.Module):
    """q(z|x) = prod_t q(z_t | z_<t, x): an encoder over patches, a causal decoder over tokens.

    aligned: the decoder's input at step t also holds the patch encoder's output at position t, so
    that its query knows what stands there and not only where it is. Ours, not the paper's.
    recompute: into how many pieces of the batch the scoring of codes is cut, each of which keeps
    nothing but its result and is computed again in the backward pass; 0 keeps all. Memory for time.
    """

    def __init__(
        self,
        x_shape,
        n_tokens,
        vocab_size,
        width,
        n_heads,
        n_layers,
        mlp_ratio,
        aligned=False,
        recompute=0,
    ):
        super().__init__()
        self.n_tokens, self.vocab_size, self.aligned = n_tokens, vocab_size, aligned
        self.recompute = recompute
        self.cache_chunk = 1  # tokens by which the sampler's cache grows
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio)
        # Token t - 1 enters at step t. What enters at step 0 has a row of its own, the last: with a
        # real token in that place, codes that hold this token would be ambiguous.
        self.embed = nn.Embedding(vocab_size + 1, width)
        self.register_buffer("positions", sinusoids(n_tokens, width), persistent=False)
        self.blocks = nn.ModuleList(CodeBlock(width, n_heads, mlp_ratio) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)
        init_weights(self, embedding_std=width**-0.5)

    def forward(self, x, n_samples, noise=None, with_kl=False):
        patches = self.patch_encoder(x)  # (N, P, H)
        z = self.sample(patches, n_samples, noise)  # (N, K, B)
        return z, *self.score(patches, z, with_kl)

    def score(self, patches, z, with_kl=False):
        """log q of codes z (N, K, B), and the exact KL along them if asked for, by teacher forcing:
        a list of one or two (N, K) float32, with gradient."""

        def score(patches, z):
            logits = self.logits(patches, z)  # (N, K, B, V)
            scores = [token_log_prob(logits, z).sum(dim=-1)]  # (N, K)
            if with_kl:
                scores.append(token_kl(logits).sum(dim=-1))
            return torch.stack(scores)  # (1 or 2, N, K)

        if not self.recompute:
            return score(patches, z).unbind()
        pieces = zip(patches.chunk(self.recompute), z.chunk(self.recompute), strict=True)
        options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random here
        parts = [checkpoint(score, *piece, **options) for piece in pieces]
        return torch.cat(parts, dim=1).unbind()

    def kl(self, x, z):
        return self.score(self.patch_encoder(x), z.unsqueeze(1), with_kl=True)[1].squeeze(1)

    def start(self, patches):
        """What the steps need of the patches: keys and values per layer, and what is added to the
        tokens' embeddings, (B, H) or, if aligned, (N, 1, B, H)."""
        memory = [block.cross.keys_values(patches) for block in self.blocks]
        return memory, self.positions + patches.unsqueeze(1) if self.aligned else self.positions

    def logits(self, patches, z):
        """Logits of all tokens, each given those before it: z (N, K, B) -> (N, K, B, V)."""
        memory, query = self.start(patches)
        previous = F.pad(z[..., :-1], (1, 0), value=self.vocab_size)  # (N, K, B)
        h = self.embed(previous) + query  # (N, K, B, H)
        for block, kv in zip(self.blocks, memory, strict=True):
            h = block(h, kv)
        return self.head(self.norm(h))

    def step(self, token, query, memory, windows):
        """Logits (N, K, V) of a token, given the one before it (N, K, 1) and what is added to its
        embedding, (1, H) or (N, 1, 1, H)."""
        h = self.embed(token) + query  # (N, K, 1, H)
        for block, kv, window in zip(self.blocks, memory, windows, strict=True):
            h = block(h, kv, window)
        return self.head(self.norm(h)).squeeze(2)

    def compile_sampler(self, chunk=64):
        """Compile the step of the sampler, not its loop; few shapes keep compilations few."""
        self.step, self.cache_chunk = torch.compile(self.step), chunk

    @torch.compiler.disable
    @torch.no_grad()
    def sample(self, patches, n_samples, noise=None):
        """Codes (N, K, B), token by token, with the past in one preallocated cache per layer."""
        N, B = len(patches), self.n_tokens
        memory, query = self.start(patches)
        noise = uniform_like(patches, N, n_samples, B) if noise is None else noise
        caches = [Cache(N * n_samples, B, self.cache_chunk, like=k) for k, _ in memory]
        z = patches.new_full((N, n_samples, B + 1), self.vocab_size, dtype=torch.long)
        for t in range(B):
            windows = [cache.window(t) for cache in caches]
            here = slice(t, t + 1)
            logits = self.step(z[..., here], query[..., here, :], memory, windows)  # (N, K, V)
            z[..., t + 1 : t + 2] = draw(logits, noise[..., here])
        return z[..., 1:].contiguous()

    def relaxed(self, x, choose):
        """One code per example with gradient through every choice: y and logits, (N, B, V) each.

        choose(logits (N, V), t) gives token t as a row y (N, V), one-hot in value, that carries a
        gradient; it enters the next step as y times the table of embeddings.
        """
        memory, query = self.start(self.patch_encoder(x))
        caches = [GrowingCache() for _ in self.blocks]
        token = self.embed.weight[-1].expand(len(x), -1)  # (N, H)
        all_y, all_logits = [], []
        for t in range(self.n_tokens):
            h = token[:, None, None] + query[..., t : t + 1, :]  # (N, 1, 1, H)
            for block, kv, cache in zip(self.blocks, memory, caches, strict=True):
                h = block(h, kv, cache)
            all_logits.append(self.head(self.norm(h)).flatten(0, 2).float())  # (N, V)
            all_y.append(choose(all_logits[-1], t))  # (N, V)
            token = all_y[-1] @ self.embed.weight[:-1]
        return torch.stack(all_y, dim=1), torch.stack(all_logits, dim=1)


class OnePassEncoder(nn.Module):
    """q(z|x) = prod_t q(z_t | x), the paper's "NA": blocks over patches, one token per position."""

    def __init__(self, x_shape, n_tokens, vocab_size, width, n_heads, n_layers, mlp_ratio):
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio)
        self.head = nn.Linear(width, vocab_size)
        init_weights(self, embedding_std=width**-0.5)

    def forward(self, x, n_samples, noise=None, with_kl=False):
        logits = self.head(self.patch_encoder(x)).float()  # (N, B, V)
        if noise is None:
            noise = uniform_like(logits, logits.size(0), n_samples, self.n_tokens)
        z = draw(logits.detach(), noise.transpose(1, 2).contiguous())  # (N, B, K)
        log_q = logits.log_softmax(dim=-1).gather(2, z).sum(dim=1)  # (N, K)
        z = z.transpose(1, 2)  # (N, K, B)
        return (z, log_q, token_kl(logits).sum(dim=1, keepdim=True)) if with_kl else (z, log_q)

    def relaxed(self, x, choose):
        """As in AutoregressiveEncoder, with one choice for all tokens: t is slice(None)."""
        logits = self.head(self.patch_encoder(x)).float()  # (N, B, V)
        return choose(logits, slice(None)), logits

    def kl(self, x, z):
        return token_kl(self.head(self.patch_encoder(x))).sum(dim=1)


class VectorEncoder(nn.Module):
    """A vector of `dim` numbers per token instead of logits, for methods that quantise it."""

    def __init__(self, x_shape, n_tokens, vocab_size, width, n_heads, n_layers, mlp_ratio, dim):
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio)
        self.head = nn.Linear(width, dim)
        init_weights(self, embedding_std=1.0)

    def forward(self, x):
        return self.head(self.patch_encoder(x)).float()  # (N, B, dim)


def uniform_like(t, *shape):
    return torch.rand(shape, device=t.device)


class Decoder(nn.Module):
    """What generative models share: tokens become vectors.

    A code is given as tokens (..., B) int64, as one-hot rows with gradient (..., B, V), or, if
    there is no table of embeddings (vocab_size = 0), as vectors (..., B, H).
    """

    def __init__(self, vocab_size, width):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width) if vocab_size else None

    def vectors(self, z):
        if self.embed is None:
            return z
        return z @ self.embed.weight if z.is_floating_point() else self.embed(z)  # (..., B, H)


class MLPDecoder(Decoder):
    """Binary x, Bernoulli per pixel: embed tokens, flatten, 64, 256, logits (as in the paper)."""

    def __init__(self, x_shape, n_tokens, vocab_size, width, hidden=(64, 256)):
        super().__init__(vocab_size, width)
        self.x_shape = tuple(x_shape)
        sizes = [n_tokens * width, *hidden, math.prod(x_shape)]
        layers = [nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
        self.net = nn.Sequential(layers[0], *(m for n in layers[1:] for m in (nn.ReLU(), n)))
        init_weights(self, embedding_std=1.0)

    def logits(self, z):
        return self.net(self.vectors(z).flatten(-2)).float()  # (..., pixels)

    def log_prob(self, x, z):
        logits = self.logits(z)  # (N, K, pixels)
        x = x.flatten(1).unsqueeze(1)  # (N, 1, pixels)
        return (x * logits - F.softplus(logits)).sum(dim=-1)  # no matrix product: float32, always

    def forward(self, z):
        logits = self.logits(z).unflatten(-1, self.x_shape)
        return independent(torch.distributions.Bernoulli(logits=logits, validate_args=False), 3)


def independent(distribution, n_dims):
    """The last n_dims of a batch of distributions are one event."""
    return torch.distributions.Independent(distribution, n_dims, validate_args=False)


# ---------------------------------------------------------------------------------------------
# ResNets


class AllReduce(torch.autograd.Function):
    """The sum of t over all processes, with gradient."""

    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    backward = forward


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over the whole batch, also when several processes share it: on GPUs and CPUs."""

    def forward(self, h):
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(h)
        # Moments around the running mean: the difference of two large squares would be rounded.
        around = self.running_mean.clone()
        shifted = h.float() - around.view(-1, 1, 1)
        moments = torch.stack([shifted.mean(dim=(0, 2, 3)), shifted.square().mean(dim=(0, 2, 3))])
        offset, square = AllReduce.apply(moments) / dist.get_world_size()  # (C,) each
        mean, var = around + offset, (square - offset.square()).clamp_min(0)
        with torch.no_grad():
            n = h.numel() / h.size(1) * dist.get_world_size()
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / max(n - 1, 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (var + self.eps).rsqrt()
        shift = self.bias - mean * scale
        return (h * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).to(h.dtype)


class Residual(nn.Module):
    """ReLU, 3x3, BatchNorm, ReLU, 1x1, BatchNorm, add."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            BatchNorm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            BatchNorm(width),
        )

    def forward(self, h):
        return h + self.net(h)


def halvings(x_shape, n_tokens):
    """How often a square image is halved until it has one place per token."""
    side, rest = math.isqrt(n_tokens), 0
    if side * side == n_tokens and x_shape[1] % side == 0:
        factor = x_shape[1] // side
        rest = factor.bit_length() - 1 if factor & (factor - 1) == 0 else 0
    if x_shape[1] != x_shape[2] or rest < 1:
        raise ValueError(
            f"n_tokens is {n_tokens} for images of {x_shape[1]} x {x_shape[2]}, must be a square "
            "number whose root, doubled once or more, is the side of a square image"
        )
    return rest


class ResNetDecoder(Decoder):
    """Colour images, Gaussian per pixel with mean and variance: embed tokens, lay them out as a
    square, 3x3 convolution, residual blocks, then transposed convolutions up to the image.

    The variance is learned as its logarithm and clipped to [0.01, 1] (x is standardised): inside
    there is gradient, outside none. K is folded into the batch for BatchNorm.
    """

    LOG_VAR = math.log(0.01), 0.0

    def __init__(self, x_shape, n_tokens, vocab_size, width, hidden=64, n_blocks=2):
        super().__init__(vocab_size, width)
        self.x_shape, self.side = tuple(x_shape), math.isqrt(n_tokens)
        layers = [nn.Conv2d(width, hidden, 3, padding=1)]  # (M, 64, side, side)
        layers += [Residual(hidden) for _ in range(n_blocks)]
        n = halvings(x_shape, n_tokens)
        for i in range(n):  # each doubles the side and halves the channels
            last = i == n - 1
            channels = 2 * x_shape[0] if last else max(4, hidden // 2)
            layers += [nn.ReLU(), nn.ConvTranspose2d(hidden, channels, 4, stride=2, padding=1)]
            layers += [] if last else [BatchNorm(channels)]
            hidden = channels
        self.net = nn.Sequential(*layers)
        init_weights(self, embedding_std=1.0)
        nn.init.constant_(layers[-1].bias[x_shape[0] :], math.log(0.5))  # in the clip's range

    def moments(self, z):
        """Mean and log variance of x given z: (..., C, height, width) each, float32."""
        h = self.vectors(z)  # (..., B, H)
        lead = h.shape[:-2]
        h = h.reshape(-1, self.side, self.side, h.size(-1)).permute(0, 3, 1, 2)
        mean, log_var = self.net(h).float().unflatten(0, lead).chunk(2, dim=-3)
        return mean, log_var.clamp(*self.LOG_VAR)

    def log_prob(self, x, z):
        return gaussian_log_prob(x.unsqueeze(1), *self.moments(z)).flatten(2).sum(dim=-1)  # (N, K)

    def forward(self, z):
        mean, log_var = self.moments(z)
        std = (log_var / 2).exp()
        return independent(torch.distributions.Normal(mean, std, validate_args=False), 3)


def gaussian_log_prob(x, mean, log_var):
    return -((x - mean).square() * (-log_var).exp() + log_var + math.log(2 * math.pi)) / 2


class MotionDecoder(Decoder):
    """Segments of motion, Gaussian per feature with a fixed variance of 0.25: embed tokens,
    transformer blocks, LayerNorm, linear, strided convolution to half the length, linear."""

    VARIANCE = 0.25

    def __init__(self, x_shape, n_tokens, vocab_size, width, n_heads, n_layers, mlp_ratio):
        super().__init__(vocab_size, width)
        self.register_buffer("positions", sinusoids(n_tokens, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, n_heads, mlp_ratio) for _ in range(n_layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 4, stride=2, padding=1)
        self.head = nn.Linear(width, x_shape[1])
        init_weights(self, embedding_std=1.0)

    def mean(self, z):
        """The mean of x given z: (..., frames, features) float32."""
        h = self.vectors(z)  # (..., B, H)
        lead = h.shape[:-2]
        h = h.flatten(0, -3) + self.positions  # (M, B, H)
        for block in self.blocks:
            h = block(h)
        h = self.conv(self.out(self.norm(h)).transpose(1, 2)).transpose(1, 2)  # (M, frames, H)
        return self.head(h).float().unflatten(0, lead)

    def log_prob(self, x, z):
        mean = self.mean(z)  # (N, K, frames, features)
        log_var = mean.new_tensor(math.log(self.VARIANCE))
        return gaussian_log_prob(x.unsqueeze(1), mean, log_var).flatten(2).sum(dim=-1)

    def forward(self, z):
        mean = self.mean(z)
        normal = torch.distributions.Normal(mean, self.VARIANCE**0.5, validate_args=False)
        return independent(normal, 2)


class ResNetEncoder(nn.Module):
    """A vector of `dim` numbers per token, like VectorEncoder, from strided convolutions: the
    encoder of the VQ-VAE paper."""

    def __init__(self, x_shape, n_tokens, vocab_size, dim, hidden=128, n_blocks=2):
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size
        n, channels = halvings(x_shape, n_tokens), x_shape[0]
        layers = []
        for i in range(n):  # each halves the side and doubles the channels
            wider = max(4, hidden >> n - 1 - i)
            layers += [nn.Conv2d(channels, wider, 4, stride=2, padding=1), nn.ReLU()]
            channels = wider
        layers += [nn.Conv2d(hidden, hidden, 3, padding=1)]
        layers += [Residual(hidden) for _ in range(n_blocks)]
        self.net = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(hidden, dim, 1))
        init_weights(self, embedding_std=1.0)

    def forward(self, x):
        return self.net(x).flatten(2).transpose(1, 2).float()  # (N, B, dim)


def init_weights(module, embedding_std):
    """LeCun-normal matrices, zero biases, normal embeddings.

    The scale of embeddings matters. A decoder with small ones gives all codes nearly the same
    reward at first, and from differences that are noise the encoder learns noise. An encoder with
    large ones lets the tokens before, at first random, drown what it sees of x.
    """
    for m in module.modules():
        if isinstance(m, nn.Embedding):
            std = embedding_std
        elif isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            std = m.weight[0].numel() ** -0.5
        elif isinstance(m, (nn.ConvTranspose1d, nn.ConvTranspose2d)):  # (in, out, 4, ...)
            std = (m.weight[:, 0].numel() / math.prod(m.stride)) ** -0.5  # with gaps between inputs
        else:
            continue
        nn.init.normal_(m.weight, std=std)
        if getattr(m, "bias", None) is not None:
            nn.init.zeros_(m.bias)
