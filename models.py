"""The networks: recognition models q(z|x) and generative models p(x|z).

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width, P patches (P = B everywhere). x are images (N, C, height, width) in [0, 1], or motion.

A recognition model ("encoder"), in which noise (N, K, B), uniform in [0, 1), decides every token:
    encoder(x, n_samples, noise=None) -> z (N, K, B) int64, log_q (N, K) float32 with gradient;
                     with_kl=True: also the exact KL to the uniform prior along z, (N, K) or (N, 1)
    encoder.mode(x)             -> the likeliest value of each token, (N, B)
    encoder.relaxed(x, choose)  -> y, logits (N, B, V): a code sampled with gradient
A generative model ("decoder"):
    decoder(z)                  -> p(x|z) for z (..., B), with .mean, .log_prob(x) and .error(x)
    decoder.log_prob(x, z)      -> (N, K) float32 with gradient or, with a window, (N, K, B): log p
                                   of each token's own region of x, see daps.py
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from daps import TokenEncoder, draw, token_kl


@dataclass
class Sizes:
    """What all networks of a run share."""

    x_shape: tuple  # of one x as the networks see it: (C, height, width) or (rows, features)
    n_tokens: int  # B
    vocab_size: int  # V
    width: int = 64  # H
    n_layers: int = 1  # transformer blocks
    mlp_ratio: int = 4  # hidden width of a block's MLP, as a multiple of H
    n_heads: int = 4


class Scale(nn.Module):
    """Standardises pixels by numbers of the training set, which checkpoints include."""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean.float())
        self.register_buffer("std", std.float())

    def forward(self, x):
        return (x - self.mean) / self.std

    def inverse(self, x):
        return x * self.std + self.mean


class TokenLogProb(torch.autograd.Function):
    """log q of every token: logits (..., V), z (...) -> (...) float32, with gradient. It saves only
    the logits, in their own dtype; on CPUs, softmax is faster than exp where that underflows."""

    @staticmethod
    def forward(ctx, logits, z):
        ctx.save_for_backward(logits, z)
        log_q = logits.log_softmax(dim=-1, dtype=torch.float32)
        return log_q.gather(-1, z.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        (logits, z), grad = ctx.saved_tensors, grad.unsqueeze(-1)
        result = logits.softmax(dim=-1, dtype=torch.float32).mul_(-grad)  # d log q_z / d logit_v:
        result.scatter_add_(-1, z.unsqueeze(-1), grad)  # (1 if v is z else 0) - q_v
        return result.to(logits.dtype), None


token_log_prob = TokenLogProb.apply


def sinusoids(sizes):
    """Fixed positions (B, H): sines and cosines at wavelengths from 2 pi to almost 20,000 pi."""
    rate = torch.exp(-math.log(10_000.0) * torch.arange(0, sizes.width, 2) / sizes.width)
    angle = torch.arange(sizes.n_tokens).unsqueeze(1) * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Patches(nn.Module):
    """Pad images (N, C, height, width), cut them into a grid of patches with even sides: (N, P, D).
    28 x 28 in 8 patches: padded to 28 x 32, cut into 2 x 4 patches of 14 x 8."""

    def __init__(self, x_shape, n_patches):
        super().__init__()
        channels, height, width = x_shape
        rows = max(r for r in range(1, math.isqrt(n_patches) + 1) if n_patches % r == 0)
        columns = n_patches // rows
        self.size = 2 * math.ceil(height / rows / 2), 2 * math.ceil(width / columns / 2)
        y, x = rows * self.size[0] - height, columns * self.size[1] - width  # to be padded
        self.pad = x // 2, x - x // 2, y // 2, y - y // 2
        self.dim = channels * math.prod(self.size)

    def forward(self, x):
        return F.unfold(F.pad(x, self.pad), self.size, stride=self.size).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention without biases. Keys and values are computed separately: they are those
    of the input itself, of the patches (computed once), or of all tokens so far (cached)."""

    def __init__(self, width, n_heads):
        super().__init__()
        if width % n_heads or width % 2:  # even: positions are sine-cosine pairs
            raise ValueError(f"width is {width}, must be even and a multiple of {n_heads}")
        self.n_heads = n_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split(self, h):
        return h.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (N, T, H) -> (N, heads, T, d)

    def keys_values(self, h):
        return [self.split(t) for t in self.key_value(h).chunk(2, dim=-1)]  # (N, heads, T, d) each

    def forward(self, h, k, v, mask=None, causal=False):
        a = attend(self.split(self.query(h)), k, v, mask, causal)  # (N, heads, T, d)
        return self.out(a.transpose(1, 2).flatten(2))  # (N, T, H)


def attend(q, k, v, mask=None, causal=False):
    """softmax(q k^T / sqrt(d)) v for q (N, heads, T, d), k and v (N, heads, S, d). CPU kernels are
    slow over a few keys: written out in base 2 (exp is slow at -inf), it takes 1/6 of the time."""
    if q.is_cuda or q.dtype != torch.float32 or k.size(2) > 16 or mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    scores = (q @ k.transpose(2, 3)).mul_(q.size(3) ** -0.5 * math.log2(math.e))  # (N, heads, T, S)
    if causal:
        scores.add_(scores.new_full(scores.shape[2:], -math.inf).triu_(1))
    p = scores.sub_(scores.detach().amax(dim=3, keepdim=True)).exp2_()
    return p / p.sum(dim=3, keepdim=True) @ v


class Block(nn.Module):
    """Pre-LayerNorm transformer block over patches (N, P, H): attention, MLP."""

    def __init__(self, sizes, cross=False):
        super().__init__()
        width, n_heads, hidden = sizes.width, sizes.n_heads, sizes.mlp_ratio * sizes.width
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        if cross:
            self.norm_cross, self.cross = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, h):
        a = self.norm_attention(h)
        h = h + self.attention(a, *self.attention.keys_values(a))
        return h + self.mlp(self.norm_mlp(h))


class CodeBlock(Block):
    """The same over tokens: causal attention, cross-attention to the patches, MLP."""

    def forward(self, h, memory, cache=None, *position):
        """h (N, K, T, H): whole codes or, with a cache of those before it, one token (T = 1) at its
        position, as in KVCache. memory: the patches' keys and values, (N, heads, P, d) each."""
        a = self.norm_attention(h).flatten(0, 1)  # (N * K, T, H)
        k, v = self.attention.keys_values(a)  # (N * K, heads, T, d) each
        seen = (k, v, None, True) if cache is None else cache.extend(k, v, *position)
        h = h + self.attention(a, *seen).view_as(h)
        # The K codes of one x share its patches: fold K into the queries, do not repeat memory.
        a = self.norm_cross(h).flatten(1, 2)  # (N, K * T, H)
        h = h + self.cross(a, *memory).view_as(h)
        return h + self.mlp(self.norm_mlp(h))


class KVCache(nn.Module):
    """Keys and values of the tokens so far, written in place into preallocated buffers."""

    def __init__(self, n_codes, n_tokens, like):
        super().__init__()
        shape = n_codes, like.size(1), n_tokens, like.size(3)
        self.register_buffer("k", like.new_zeros(shape))
        self.register_buffer("v", like.new_zeros(shape))

    def extend(self, k, v, t, window=None):
        """Add k and v (N * K, heads, 1, d) of token t; return all that it sees, and a mask or None.
        t is a number or, for one compiled step to serve many tokens, a tensor (1,) below window."""
        if k.requires_grad:  # autograd forbids overwriting: each token makes a longer copy
            self.k = torch.cat([self.k[:, :, :t], k], dim=2)
            self.v = torch.cat([self.v[:, :, :t], v], dim=2)
            return self.k, self.v, None
        if isinstance(t, int):
            self.k[:, :, t : t + 1], self.v[:, :, t : t + 1] = k, v
            return self.k[:, :, : t + 1], self.v[:, :, : t + 1], None
        self.k.index_copy_(2, t, k)
        self.v.index_copy_(2, t, v)
        mask = (torch.arange(window, device=k.device) <= t).unsqueeze(0)  # (1, window)
        return self.k[:, :, :window], self.v[:, :, :window], mask


# ---------------------------------------------------------------------------------------------
# recognition models


class PatchEncoder(nn.Module):
    """x -> (N, P, H): standardise, cut into patches, embed, blocks, LayerNorm."""

    def __init__(self, sizes, scale):
        super().__init__()
        self.scale = scale
        if len(sizes.x_shape) == 2:  # motion, which has a row of features for each token
            rows, features = sizes.x_shape
            if sizes.n_tokens != rows:
                raise ValueError(f"n_tokens is {sizes.n_tokens}, must be {rows} for motion")
            self.embed = nn.Linear(features, sizes.width)
        else:
            patches = Patches(sizes.x_shape, sizes.n_tokens)
            self.embed = nn.Sequential(patches, nn.Linear(patches.dim, sizes.width))
        self.register_buffer("positions", sinusoids(sizes), persistent=False)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.n_layers)))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, x):
        return self.norm(self.blocks(self.embed(self.scale(x)) + self.positions))


class Head(nn.Linear):
    """Logits of tokens t, (..., T, H) -> (..., T, V), with two additions of ours. scale sets how
    sharp q is: one number is learned faster, with less noise, than all weights (`scale_lr`). centre
    (B, H) is subtracted from the input: zero, unless start_from_clusters sets it."""

    def __init__(self, sizes):
        super().__init__(sizes.width, sizes.vocab_size)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("centre", torch.zeros(sizes.n_tokens, sizes.width))

    def forward(self, h, t=slice(None)):
        scale = self.log_scale.exp()
        return F.linear((h - self.centre[t]) * scale, self.weight, self.bias * scale)


class OnePassEncoder(TokenEncoder):
    """q(z|x) = prod_t q(z_t | x), the paper's "NA": blocks over patches, one token per position."""

    autoregressive = False
    head = property(lambda self: self.net[1])

    def __init__(self, sizes, scale, per_token=False):
        net = nn.Sequential(PatchEncoder(sizes, scale), Head(sizes))
        super().__init__(net, sizes.n_tokens, sizes.vocab_size, per_token)
        init_weights(self, embedding_std=sizes.width**-0.5)

    def relaxed(self, x, choose):
        """One code per example with gradient through the choices: y and logits, (N, B, V) each.
        choose(logits, t) gives tokens t (here all) as rows y, one-hot in value, with gradient."""
        logits = self.logits(x)  # (N, B, V)
        return choose(logits, slice(None)), logits


class TokenDecoder(nn.Module):
    """The causal half of the autoregressive encoder: logits of each token, given those before it
    and the patches. Token t - 1 enters at step t; at step 0, the last row of the embedding does."""

    def __init__(self, sizes, aligned):
        super().__init__()
        self.aligned, self.vocab_size = aligned, sizes.vocab_size
        self.embed = nn.Embedding(sizes.vocab_size + 1, sizes.width)
        self.register_buffer("positions", sinusoids(sizes), persistent=False)
        self.blocks = nn.ModuleList(CodeBlock(sizes, cross=True) for _ in range(sizes.n_layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), Head(sizes)

    def context(self, patches):
        """Keys and values of the patches per layer, and what is added to tokens: (..., B, H)."""
        memory = [block.cross.keys_values(patches) for block in self.blocks]
        return memory, self.positions + patches.unsqueeze(1) if self.aligned else self.positions

    def logits(self, context, z):
        """Logits of all tokens of codes z (N, K, B) by teacher forcing: (N, K, B, V)."""
        memory, added = context
        previous = F.pad(z[..., :-1], (1, 0), value=self.vocab_size)  # (N, K, B)
        h = self.embed(previous) + added  # (N, K, B, H)
        for block, kv in zip(self.blocks, memory, strict=True):
            h = block(h, kv)
        return self.head(self.norm(h))

    def step(self, token, t, context, caches, window=None):
        """Logits (N, K, V) of token t from the embedding of the token before it, (N, K, H). caches,
        one per layer, hold the keys and values of earlier ones and are extended; see KVCache."""
        memory, added = context
        at = slice(t, t + 1) if isinstance(t, int) else t
        h = token.unsqueeze(2) + added[..., at, :]  # (N, K, 1, H)
        for block, kv, cache in zip(self.blocks, memory, caches, strict=True):
            h = block(h, kv, cache, t, window)
        return self.head(self.norm(h), at).squeeze(2)


class AutoregressiveEncoder(nn.Module):
    """q(z|x) = prod_t q(z_t | z_<t, x): an encoder over patches, a causal decoder over tokens.

    per_token  log_q is (N, K, B), one number per token, instead of their sum
    aligned    add the patch at t to the input of step t (ours): its query knows the content there
    """

    autoregressive = True
    sampler = None  # see sampler.py
    head = property(lambda self: self.tokens.head)

    def __init__(self, sizes, scale, per_token=False, aligned=False, patch_encoder=None):
        super().__init__()
        self.n_tokens, self.vocab_size = sizes.n_tokens, sizes.vocab_size
        self.per_token = per_token
        self.patch_encoder = patch_encoder or PatchEncoder(sizes, scale)  # policy.py has its own
        self.tokens = TokenDecoder(sizes, aligned)
        init_weights(self, embedding_std=sizes.width**-0.5)

    def forward(self, x, n_samples, noise=None, with_kl=False):
        patches = self.patch_encoder(x)  # (N, P, H)
        if noise is None:
            noise = torch.rand(len(patches), n_samples, self.n_tokens, device=patches.device)
        z = self.sample(patches, noise)  # (N, K, B)
        log_q, *kl = self.score(patches, z, with_kl)  # (N, K, B) each
        return z, log_q if self.per_token else log_q.sum(dim=-1), *(t.sum(dim=-1) for t in kl)

    def mode(self, x):  # greedy: each token given those before it
        patches = self.patch_encoder(x)
        unused = patches.new_zeros(len(patches), 1, self.n_tokens)
        return self.sample(patches, unused, lambda logits, _: logits.argmax(-1, True)).squeeze(1)

    def proposals(self, x, z):
        """Logits (N, B, V) of each token, given those of z (N, B) before it."""
        context = self.tokens.context(self.patch_encoder(x))
        return self.tokens.logits(context, z.unsqueeze(1)).squeeze(1)

    @torch.compiler.disable
    @torch.no_grad()
    def sample(self, patches, noise, choose=draw):
        """Codes (N, K, B), token by token, with the past in one preallocated cache per layer."""
        # The weights that autocast casts here carry no gradient, so the scoring pass must not
        # reuse them, as some versions of torch would (pytorch #165068).
        kind = patches.device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
            context = self.tokens.context(patches)
            if self.sampler is not None and choose is draw:
                return self.sampler(self.tokens, context, noise)
            N, K, B = noise.shape
            caches = [KVCache(N * K, B, like=k) for k, _ in context[0]]
            z = patches.new_full((N, K, B + 1), self.vocab_size, dtype=torch.long)
            for t in range(B):
                logits = self.tokens.step(self.tokens.embed(z[..., t]), t, context, caches)
                z[..., t + 1 : t + 2] = choose(logits, noise[..., t : t + 1])
            return z[..., 1:].contiguous()

    def score(self, patches, z, with_kl=False):
        """log q of codes z and, with_kl, the exact KL along them: (N, K, B) each, with gradient."""
        logits = self.tokens.logits(self.tokens.context(patches), z)  # (N, K, B, V)
        return token_log_prob(logits, z), *([token_kl(logits)] if with_kl else [])

    def relaxed(self, x, choose):
        """As in OnePassEncoder, but y (N, V) of a token, times the table, enters the next step."""
        context = self.tokens.context(self.patch_encoder(x))
        caches = [KVCache(len(x), self.n_tokens, like=k) for k, _ in context[0]]
        table, start = self.tokens.embed.weight.split([self.vocab_size, 1])  # (V, H), (1, H)
        token, all_y, all_logits = start.expand(len(x), 1, -1), [], []  # (N, 1, H)
        for t in range(self.n_tokens):
            all_logits.append(self.tokens.step(token, t, context, caches).squeeze(1).float())
            all_y.append(choose(all_logits[-1], t))  # (N, V)
            token = (all_y[-1] @ table).unsqueeze(1)
        return torch.stack(all_y, dim=1), torch.stack(all_logits, dim=1)


class VectorEncoder(nn.Module):
    """A vector of `dim` (or width) numbers per token, not logits, for vqvae, fsq and gaussian."""

    autoregressive = False

    def __init__(self, sizes, scale, dim=None):
        super().__init__()
        self.n_tokens, self.vocab_size = sizes.n_tokens, sizes.vocab_size
        self.patch_encoder = PatchEncoder(sizes, scale)
        self.head = nn.Linear(sizes.width, dim or sizes.width)
        init_weights(self, embedding_std=1.0)

    def forward(self, x):
        return self.head(self.patch_encoder(x)).float()  # (N, B, dim)


# ---------------------------------------------------------------------------------------------
# generative models


class Bernoulli:
    """p(x|z) of binary images, given logits (..., C, height, width)."""

    mean = property(lambda self: self.logits.sigmoid())

    def __init__(self, logits):
        self.logits = logits

    def terms(self, x):  # log p of every pixel, in nats
        return x * self.logits - F.softplus(self.logits)

    def log_prob(self, x):
        return self.terms(x).flatten(-3).sum(dim=-1)  # (...)

    def error(self, x):  # of the mean, as a share of the signal's range
        return self.mean - x


class Normal:
    """p(x|z) of colour images and motion: Gaussian with this mean and log variance in standardised
    units, in which log_prob is measured, as in the paper. `mean` is in the units of x."""

    mean = property(lambda self: self.scale.inverse(self.standard_mean))

    def __init__(self, mean, log_var, scale, n_dims):
        self.standard_mean, self.log_var, self.scale, self.n_dims = mean, log_var, scale, n_dims

    def terms(self, x):
        square = (self.scale(x) - self.standard_mean).square()
        return -(square * (-self.log_var).exp() + self.log_var + math.log(2 * math.pi)) / 2

    def log_prob(self, x):
        return self.terms(x).flatten(-self.n_dims).sum(dim=-1)

    def error(self, x):
        if self.n_dims == 3:  # images, whose pixels cannot leave [0, 1]
            return self.mean.clamp(0, 1) - x
        return (self.scale.to_frames(self.standard_mean) - x) / self.scale.span


class Decoder(nn.Module):
    """Base of the generative models. Codes are tokens (..., B) int64, one-hot rows with gradient
    (..., B, V) or, without an embedding table (vocab_size = 0), vectors (..., B, H). window: side
    of the window for credit per token, in tokens; 0: credit whole codes. places: how tokens lie in
    x, (rows, columns) or (length,); None: each may change all of it."""

    places = None

    def __init__(self, sizes, scale=None, window=0):
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab_size, sizes.width) if sizes.vocab_size else None
        self.scale, self.window = scale, window

    def vectors(self, z):
        if self.embed is None:
            return z
        return z @ self.embed.weight if z.is_floating_point() else self.embed(z)  # (..., B, H)

    def log_prob(self, x, z):
        """(N, K) or, with a window, (N, K, B); float32 even under autocast."""
        return self.regions(x, z) if self.window else self(z).log_prob(x.unsqueeze(1))

    def regions(self, x, z):
        """log p of each token's own region of x, if tokens have places: (N, K, B)."""
        return self.by_token(self(z).terms(x.unsqueeze(1)))


class MLPDecoder(Decoder):
    """Binary x, Bernoulli per pixel: embed tokens, flatten, 64, 256, logits (as in the paper)."""

    def __init__(self, sizes, hidden=(64, 256)):
        super().__init__(sizes)
        widths = [sizes.n_tokens * sizes.width, *hidden, math.prod(sizes.x_shape)]
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1], nn.Unflatten(-1, sizes.x_shape))
        init_weights(self, embedding_std=1.0)

    def forward(self, z):
        return Bernoulli(self.net(self.vectors(z).flatten(-2)).float())


@torch.library.custom_op("daps::all_reduce", mutates_args=())
def all_reduce(t: torch.Tensor) -> torch.Tensor:
    """The sum of t over all processes, with gradient. As an operator, it does not break graphs."""
    t = t.clone()
    dist.all_reduce(t)
    return t


all_reduce.register_fake(torch.empty_like)
all_reduce.register_autograd(lambda ctx, grad: all_reduce(grad))


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over the whole batch, even if several processes share it, on GPUs and CPUs."""

    def forward(self, h):
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(h)
        n_processes, over = dist.get_world_size(), (0, 2, 3)
        mean = all_reduce(h.float().mean(over)) / n_processes  # (C,)
        centred = h.float() - mean.view(-1, 1, 1)
        var = all_reduce(centred.square().mean(over)) / n_processes  # E[h^2] - mean^2 would cancel
        with torch.no_grad():
            n = h.numel() // h.size(1) * n_processes
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (var + self.eps).rsqrt()
        return (centred * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)).to(h.dtype)


class Residual(nn.Module):
    """ReLU, 3x3, BatchNorm, ReLU, 1x1, BatchNorm, add."""

    def __init__(self, width):
        super().__init__()
        first = nn.Conv2d(width, width, 3, padding=1), BatchNorm(width)
        second = nn.Conv2d(width, width, 1), BatchNorm(width)
        self.net = nn.Sequential(nn.ReLU(), *first, nn.ReLU(), *second)

    def forward(self, h):
        return h + self.net(h)


class ResNetDecoder(Decoder):
    """Colour images, Gaussian per pixel with a variance in [0.01, 1] of standardised x: lay tokens
    out as a square, 3x3 convolution, residual blocks, transposed convolutions up to the image."""

    def __init__(self, sizes, scale, window=0, hidden=64, n_blocks=2):
        super().__init__(sizes, scale, window)
        channels, height, width = sizes.x_shape
        self.side = math.isqrt(sizes.n_tokens)
        self.places = self.side, self.side
        doublings = max(1, (height // self.side).bit_length() - 1)
        if not self.side << doublings == height == width or self.side**2 != sizes.n_tokens:
            found = f"n_tokens is {sizes.n_tokens} for images of {height} x {width}"
            sides = [height >> n for n in range(1, 12) if height >> n << n == height > 1 << n]
            raise ValueError(f"{found}, must be one of {', '.join(str(s * s) for s in sides)}")
        layers = [nn.Conv2d(sizes.width, hidden, 3, padding=1)]  # (M, 64, side, side)
        layers += [Residual(hidden) for _ in range(n_blocks)]
        widths = [max(4, hidden >> n) for n in range(doublings)] + [2 * channels]
        for n_in, n_out in pairwise(widths):  # each doubles the side
            layers += [nn.ReLU(), nn.ConvTranspose2d(n_in, n_out, 4, 2, 1), BatchNorm(n_out)]
        self.net = nn.Sequential(*layers[:-1])
        init_weights(self, embedding_std=1.0)
        nn.init.constant_(self.net[-1].bias[channels:], math.log(0.5))  # inside the clip

    def forward(self, z):
        h = self.vectors(z)  # (..., B, H)
        square = h.reshape(-1, self.side, self.side, h.size(-1)).permute(0, 3, 1, 2)
        out = self.net(square).float()  # (M, 2 * C, height, width): K is in the batch of BatchNorm
        mean, log_var = out.view(*h.shape[:-2], *out.shape[1:]).chunk(2, dim=-3)
        return Normal(mean, log_var.clamp(math.log(0.01), 0.0), self.scale, n_dims=3)

    def by_token(self, terms):
        patch = terms.size(-1) // self.side
        return F.avg_pool2d(terms.sum(dim=2), patch).flatten(2) * patch**2  # (N, K, B)

    def credit(self, log_px):
        """log p of each token's own region (N, K, B) -> log p of the window around it."""
        log_px = log_px.unflatten(2, (self.side, self.side))
        window = F.avg_pool2d(log_px, self.window, stride=1, padding=self.window // 2)
        return window.flatten(2) * self.window**2


class MotionDecoder(Decoder):
    """Segments of motion, Gaussian with a fixed standard deviation of 0.1 radians of a joint: embed
    tokens, transformer blocks, LayerNorm, linear. Each token has its own row of x."""

    def __init__(self, sizes, scale, window=0, n_layers=2):
        super().__init__(sizes, scale, window)
        self.places = (sizes.n_tokens,)
        self.register_buffer("positions", sinusoids(sizes), persistent=False)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(n_layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.x_shape[1])
        init_weights(self, embedding_std=1.0)

    def forward(self, z):
        vectors = self.vectors(z)  # (..., B, H)
        h = self.blocks(vectors.reshape(-1, *vectors.shape[-2:]) + self.positions)  # (M, B, H)
        mean = self.head(self.norm(h)).float().view(*vectors.shape[:-1], -1)
        log_var = 2 * (0.1 / self.scale.std).log()  # (B, features), in standardised units
        return Normal(mean, log_var, self.scale, n_dims=2)

    def by_token(self, terms):
        return terms.sum(dim=-1)  # (N, K, B)

    def credit(self, log_px):
        return F.avg_pool1d(log_px, self.window, 1, padding=self.window // 2) * self.window


def init_weights(module, embedding_std):
    """LeCun-normal matrices, zero biases, normal embeddings: large in a decoder, or all codes have
    nearly the same reward at first; small in an encoder, or its random tokens drown out x."""
    for m in module.modules():
        if isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=embedding_std)
        elif isinstance(m, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            fan_in = m.weight[0].numel()
            if isinstance(m, nn.ConvTranspose2d):  # weight (in, out, 4, 4), gaps between inputs
                fan_in = m.weight[:, 0].numel() / math.prod(m.stride)
            nn.init.normal_(m.weight, std=fan_in**-0.5)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
