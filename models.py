"""The networks: recognition models q(z|x) and generative models p(x|z).

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width, P patches (P = B everywhere).

A recognition model ("encoder") provides
    encoder(x, n_samples, noise=None) -> z (N, K, B) int64, log_q (N, K) float32 with gradient;
                                         with_kl=True: also the exact KL to the uniform prior
                                         along z, (N, K) or, if it is the same for all, (N, 1)
    encoder.sample(x, n_samples, noise=None) -> z alone
    encoder.relaxed(x, choose)        -> y, logits (N, B, V): a code sampled with gradient
    encoder.n_tokens, encoder.vocab_size
where noise (N, K, B), uniform in [0, 1), decides every token, so that a sample is a pure function
of x and noise. A generative model ("decoder") provides
    decoder.log_prob(x, z) -> (N, K) float32 with gradient, for z (N, K, B); if decoder.window is
                              set, (N, K, B): log p of each token's own region, see daps.py
    decoder(z)             -> a torch distribution over x, for z (..., B)

build_model, at the bottom, builds a method and its networks from the settings of a run.
"""

import copy
import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from baselines import FSQ, PPO, RLOO, VQVAE, Gaussian, Relaxed, kmeans, token_kl
from daps import DAPS, gather_batch


def draw(logits, u):
    """S tokens from each row of logits (..., V) by inverse CDF at u (..., S): (..., S) int64.

    u is uniform in [0, 1): one number per token, where the Gumbel-max trick would need V.
    """
    cdf = logits.float().softmax(dim=-1).cumsum(dim=-1)  # (..., V)
    # Rounding leaves the last entry near 1, not at 1. Scaled by it, u never points past the end,
    # and the first entry above u belongs to a token of non-zero probability. The clamp keeps
    # non-finite logits from crashing: they yield a meaningless but valid token.
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp_max(logits.size(-1) - 1)


class TokenLogProb(torch.autograd.Function):
    """log softmax(logits) (..., V) at z (...): (...) float32. It saves only the logits, in their
    own dtype, where cross_entropy saves a float32 copy and allocates a third, full of zeros.

    It avoids exp and logsumexp: on CPUs, exp is 10 times slower where it underflows, and most of a
    confident encoder's probabilities do."""

    @staticmethod
    def forward(ctx, logits, z):
        ctx.save_for_backward(logits, z)
        log_q = logits.log_softmax(dim=-1, dtype=torch.float32)
        return log_q.gather(-1, z.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        logits, z = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        # for the chosen logit: 1 - probability; for the others: - probability
        result = logits.softmax(dim=-1, dtype=torch.float32).mul_(-grad)
        return result.scatter_add_(-1, z.unsqueeze(-1), grad).to(logits.dtype), None


def token_log_prob(logits, z):
    """log q of every token: logits (..., V), z (...) -> (...) float32, with gradient."""
    return TokenLogProb.apply(logits, z)


def sinusoids(length, width):
    """Fixed positions (length, width): sines and cosines at wavelengths from 2 pi up to, but not
    including, 20,000 pi."""
    angle = torch.arange(length).unsqueeze(1) * torch.exp(
        -math.log(10_000.0) * torch.arange(0, width, 2) / width
    )
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Patches(nn.Module):
    """Cut images (N, C, height, width) into a grid of n_patches: (N, P, D).

    Patches have sides of even length; the image is zero-padded, evenly on both sides, to whole
    patches. 28 x 28 in 8 patches: padded to 28 x 32, cut into 2 x 4 patches of 14 x 8.
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
    """Segments of motion (N, frames, features) at twice the frame rate: (N, P, H), P = 2 frames."""

    def __init__(self, x_shape, n_tokens, width):
        super().__init__()
        frames, features = x_shape
        if n_tokens != 2 * frames:
            raise ValueError(f"n_tokens is {n_tokens}, must be {2 * frames} for {frames} frames")
        self.conv = nn.ConvTranspose1d(features, width, 4, stride=2, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention without biases, with keys and values computed separately.

    The same two methods thus serve self-attention (keys of the input itself), cross-attention
    (keys of the patches, computed once) and cached decoding (keys of all tokens so far).
    """

    def __init__(self, width, n_heads):
        super().__init__()
        if width % n_heads or width % 2:  # even: positions are sine-cosine pairs
            raise ValueError(
                f"width is {width}, must be even and a multiple of {n_heads} (n_heads)"
            )
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

    CPU kernels are slow at softmax over a handful of keys. Written out, it takes a sixth of the
    time, and sampling codes of 8 tokens three quarters.
    """
    if q.is_cuda or q.dtype != torch.float32 or k.size(2) > 16 or mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    # In base 2: exp is slow where it underflows, and for -inf.
    scores = (q @ k.transpose(2, 3)).mul_(q.size(3) ** -0.5 * math.log2(math.e))  # (N, heads, T, S)
    if causal:
        scores.add_(scores.new_full(scores.shape[2:], -math.inf).triu_(1))
    p = scores.sub_(scores.detach().amax(dim=3, keepdim=True)).exp2_()
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


class KVCache(nn.Module):
    """Keys and values of the tokens so far, written in place into preallocated buffers."""

    def __init__(self, n_codes, n_tokens, like):
        super().__init__()
        _, heads, _, d = like.shape
        for name in ("k", "v"):
            self.register_buffer(name, like.new_zeros(n_codes, heads, n_tokens, d))

    def extend(self, t, window, k, v):
        """Add keys and values of token t, (N * K, heads, 1, d) each; return those of the first
        `window` tokens, with a mask that hides future ones.

        t is a number, which needs no mask if window = t + 1, or a tensor (1,), with which one
        compiled step serves all tokens.
        """
        if isinstance(t, int):
            self.k[:, :, t : t + 1], self.v[:, :, t : t + 1], mask = k, v, None
        else:
            self.k.index_copy_(2, t, k)
            self.v.index_copy_(2, t, v)
            mask = (torch.arange(window, device=k.device) <= t).unsqueeze(0)  # (1, window)
        return self.k[:, :, :window], self.v[:, :, :window], mask


class CodeBlock(nn.Module):
    """Pre-LayerNorm block over tokens: causal attention, cross-attention to the patches, MLP."""

    def __init__(self, width, n_heads, mlp_ratio):
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_cross, self.cross = nn.LayerNorm(width), Attention(width, n_heads)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), mlp(width, mlp_ratio)

    def forward(self, h, memory, extend=None):
        """h (N, K, T, H); memory: the patches' keys and values, (N, heads, P, d) each.

        Without `extend`, h holds whole codes. With it, h holds only the next token (T = 1), and
        extend(k, v) adds its keys and values to the cache and returns all of them and a mask.
        """
        N, K, T, H = h.shape
        a = self.norm_attention(h).view(N * K, T, H)
        k, v = self.attention.keys_values(a)  # (N * K, heads, T, d) each
        if extend is None:
            a = self.attention(a, k, v, causal=True)  # (N * K, T, H)
        else:
            a = self.attention(a, *extend(k, v))
        h = h + a.view(N, K, T, H)
        # The K codes of one x share its patches: fold K into the queries, do not repeat memory.
        a = self.norm_cross(h).view(N, K * T, H)
        h = h + self.cross(a, *memory).view(N, K, T, H)
        return h + self.mlp(self.norm_mlp(h))


class PatchEncoder(nn.Module):
    """x -> (N, P, H): standardise, cut into patches, embed, transformer blocks, LayerNorm. Motion
    is resampled, not cut."""

    def __init__(self, x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio):
        super().__init__()
        self.register_buffer("input_mean", torch.tensor(0.0))
        self.register_buffer("input_std", torch.tensor(1.0))
        if len(x_shape) == 2:
            self.embed = Resample(x_shape, n_tokens, width)
        else:
            patches = Patches(x_shape, n_tokens)
            self.embed = nn.Sequential(patches, nn.Linear(patches.dim, width))
        self.register_buffer("positions", sinusoids(n_tokens, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, n_heads, mlp_ratio) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.embed((x - self.input_mean) / self.input_std) + self.positions  # (N, P, H)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def standardise(self, mean, std):
        """Standardise inputs by these two numbers from now on; checkpoints include them."""
        self.input_mean.fill_(mean)
        self.input_std.fill_(std)


class TokenEncoder(nn.Module):
    """Base of the recognition models with a distribution over tokens.

    per_token  log_q is (N, K, B), one number per token, instead of their sum (N, K)
    counting   count in `usage` (V,) how often each value is drawn, over all processes
    centre     subtracted from the head's input, (B, H): zero, or see start_from_clusters
    """

    def __init__(self, n_tokens, vocab_size, width):
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size
        self.per_token = self.counting = False
        self.register_buffer("usage", torch.zeros(vocab_size, dtype=torch.long))
        self.register_buffer("centre", torch.zeros(n_tokens, width))

    def read_out(self, h, t=slice(None)):
        """Logits of tokens t from what the blocks say about them: (..., T, H) -> (..., T, V)."""
        return self.head(h - self.centre[t])

    def count(self, z):
        if self.counting and self.training:
            z = gather_batch(z).flatten()
            self.usage.index_add_(0, z, torch.ones_like(z))


class Head(nn.Linear):
    """Logits of the V values, (..., H) -> (..., V), with a scale common to all of them.

    The scale, 1 / temperature, says how sharp q is. It adds nothing that weights and bias could not
    express, but as one number it can be learned fast and with little noise (`scale_lr`). Ours, not
    the paper's.
    """

    def __init__(self, width, vocab_size):
        super().__init__(width, vocab_size)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, h):
        scale = self.log_scale.exp()
        return F.linear(h * scale, self.weight, self.bias * scale)


class TiedHead(nn.Module):
    """Logits of the V values as products with the decoder's vectors, so that what is learned about
    one value carries over to those that decode alike. The decoder's table gets no gradient from
    here. The scale is that of Head. Ours, not the paper's."""

    def __init__(self, width, table):
        super().__init__()
        self.table = [table]  # in a list: it belongs to the decoder, not to this module
        self.query = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        self.log_scale = nn.Parameter(torch.zeros(()))
        init_weights(self, embedding_std=0)

    def forward(self, h):
        table, scale = self.table[0].weight.detach(), self.log_scale.exp()  # (V, H), ()
        return F.linear(self.query(h) * (scale * table.size(1) ** -0.5), table, self.bias * scale)


class AutoregressiveEncoder(TokenEncoder):
    """q(z|x) = prod_t q(z_t | z_<t, x): an encoder over patches, a causal decoder over tokens.

    aligned: the decoder's input at step t also holds the patch encoder's output at position t, so
    that its query knows the content there, not only the position. Ours, not the paper's.
    recompute: score codes in this many pieces of the batch; each keeps only its result and is
    computed again in the backward pass, which trades time for memory. 0 keeps all activations.
    """

    def __init__(self, x_shape, n_tokens, vocab_size, *size, aligned=False, recompute=0):
        width, n_heads, n_layers, mlp_ratio = size
        super().__init__(n_tokens, vocab_size, width)
        self.aligned, self.recompute = aligned, recompute
        self.compile_options, self.static_samplers = None, {}  # see compile_sampler
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, *size)
        # Token t - 1 enters at step t. Step 0 has a row of its own, the last: with a real token
        # there, codes that contain this token would be ambiguous.
        self.embed = nn.Embedding(vocab_size + 1, width)
        self.register_buffer("positions", sinusoids(n_tokens, width), persistent=False)
        self.blocks = nn.ModuleList(CodeBlock(width, n_heads, mlp_ratio) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = Head(width, vocab_size)
        init_weights(self, embedding_std=width**-0.5)

    def forward(self, x, n_samples, noise=None, with_kl=False):
        patches = self.patch_encoder(x)  # (N, P, H)
        z = self.sample_codes(patches, n_samples, noise)  # (N, K, B)
        self.count(z)
        log_q, *kl = self.score(patches, z, with_kl)
        return z, log_q if self.per_token else log_q.sum(dim=-1), *(t.sum(dim=-1) for t in kl)

    def sample(self, x, n_samples, noise=None):
        return self.sample_codes(self.patch_encoder(x), n_samples, noise)

    def start(self, patches):
        """What the tokens need from the patches: keys and values per layer, and the term added to
        the tokens' embeddings, (B, H) or, if aligned, (N, 1, B, H)."""
        memory = [block.cross.keys_values(patches) for block in self.blocks]
        return memory, self.positions + patches.unsqueeze(1) if self.aligned else self.positions

    @torch.compiler.disable
    @torch.no_grad()
    def sample_codes(self, patches, n_samples, noise=None):
        """Codes (N, K, B), token by token, with the past in one preallocated cache per layer."""
        # The weights that autocast casts here carry no gradient, so the scoring pass must not
        # reuse them, as some versions of torch would (pytorch #165068).
        kind = patches.device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
            return self.sample_tokens(patches, n_samples, noise)

    def sample_tokens(self, patches, n_samples, noise):
        N, B = len(patches), self.n_tokens
        if noise is None:
            noise = torch.rand(N, n_samples, B, device=patches.device)
        memory, query = self.start(patches)
        if self.compile_options is not None:
            key = noise.shape, memory[0][0].dtype
            if key not in self.static_samplers:
                sampler = StaticSampler(self, memory, query, noise, **self.compile_options)
                self.static_samplers[key] = sampler
            return self.static_samplers[key](memory, query, noise)
        caches = [KVCache(N * n_samples, B, like=k) for k, _ in memory]
        z = patches.new_full((N, n_samples, B + 1), self.vocab_size, dtype=torch.long)
        for t in range(B):
            h = self.embed(z[..., t : t + 1]) + query[..., t : t + 1, :]  # (N, K, 1, H)
            for block, kv, cache in zip(self.blocks, memory, caches, strict=True):
                h = block(h, kv, functools.partial(cache.extend, t, t + 1))
            logits = self.read_out(self.norm(h), t).squeeze(2)  # (N, K, V)
            z[..., t + 1 : t + 2] = draw(logits, noise[..., t : t + 1])
        return z[..., 1:].contiguous()

    def compile_sampler(self, **options):
        """Sample with compiled steps from now on; see StaticSampler for the options."""
        self.compile_options, self.static_samplers = options, {}

    def hidden(self, patches, z):
        """What the head reads, for all tokens, each given those before it: (N, K, B, H)."""
        memory, query = self.start(patches)
        previous = F.pad(z[..., :-1], (1, 0), value=self.vocab_size)  # (N, K, B)
        h = self.embed(previous) + query  # (N, K, B, H)
        for block, kv in zip(self.blocks, memory, strict=True):
            h = block(h, kv)
        return self.norm(h)

    def logits(self, patches, z):
        """Logits of all tokens, each given those before it: z (N, K, B) -> (N, K, B, V)."""
        return self.read_out(self.hidden(patches, z))

    def features(self, x, noise):
        """What the head reads, for one code per example: (N, B, H); noise (N, 1, B)."""
        patches = self.patch_encoder(x)
        return self.hidden(patches, self.sample_codes(patches, 1, noise)).squeeze(1)

    def score(self, patches, z, with_kl=False):
        """log q of codes z (N, K, B) by teacher forcing, and with_kl the exact KL along them: one
        or two tensors (N, K, B) float32, with gradient."""

        def score(patches, z):
            logits = self.logits(patches, z)  # (N, K, B, V)
            scores = [token_log_prob(logits, z), *([token_kl(logits)] if with_kl else [])]
            return torch.stack(scores)  # (1 or 2, N, K, B)

        if not self.recompute:
            return score(patches, z).unbind()
        pieces = zip(patches.chunk(self.recompute), z.chunk(self.recompute), strict=True)
        options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random here
        parts = [checkpoint(score, *piece, **options) for piece in pieces]
        return torch.cat(parts, dim=1).unbind()

    def relaxed(self, x, choose):
        """One code per example with gradient through every choice: y and logits, (N, B, V) each.

        choose(logits (N, V), t) returns token t as a row y (N, V), one-hot in value and with
        gradient; y times the embedding table enters the next step.
        """
        memory, query = self.start(self.patch_encoder(x))
        pasts = [[k[:, :, :0] for k in kv] for kv in memory]  # keys and values, none yet

        def extend(layer, k, v):  # a copy: autograd forbids overwriting the cache
            pasts[layer] = [
                torch.cat(pair, dim=2) for pair in zip(pasts[layer], (k, v), strict=True)
            ]
            return *pasts[layer], None

        token = self.embed.weight[-1].expand(len(x), -1)  # (N, H)
        all_y, all_logits = [], []
        for t in range(self.n_tokens):
            h = token[:, None, None] + query[..., t : t + 1, :]  # (N, 1, 1, H)
            for layer, (block, kv) in enumerate(zip(self.blocks, memory, strict=True)):
                h = block(h, kv, functools.partial(extend, layer))
            all_logits.append(self.read_out(self.norm(h), t).flatten(0, 2).float())  # (N, V)
            all_y.append(choose(all_logits[-1], t))  # (N, V)
            token = all_y[-1] @ self.embed.weight[:-1]
        y = torch.stack(all_y, dim=1)
        self.count(y.argmax(dim=-1))
        return y, torch.stack(all_logits, dim=1)


def windows(n_tokens, chunk):
    """For each token, how many cache entries it sees: its own and those before it, rounded up to a
    multiple of chunk."""
    return [min((t // chunk + 1) * chunk, n_tokens) for t in range(n_tokens)]


class StaticSampler(nn.Module):
    """sample_codes for torch.compile, in the style of gpt-fast: everything a step reads or writes
    keeps its memory address across steps, the position is a tensor, and one compiled function
    embeds a token, runs the blocks, draws the next token and stores it.

    The step sees the cache in windows that grow by `chunk` tokens: few shapes, little wasted work.
    The weights of matrix products are cast to autocast's dtype once per batch, instead of once per
    token. cuda_graphs: replay each step as one CUDA graph.
    """

    def __init__(
        self, encoder, memory, query, noise, chunk=128, cuda_graphs=False, backend="inductor"
    ):
        super().__init__()
        N, K, B = noise.shape
        self.chunk = chunk
        parts = nn.ModuleList([encoder.embed, encoder.blocks, encoder.norm, encoder.head])
        parts.extend(getattr(encoder.head, "table", []))
        self.source = list(parts.parameters())
        self.parts = copy.deepcopy(parts).requires_grad_(False)
        self.embed, self.blocks, self.norm, self.head, *tables = self.parts
        for module in self.modules():
            if isinstance(module, nn.Linear) or module in tables:
                module.weight.data = module.weight.data.to(memory[0][0].dtype)
        # One token longer than needed: a window of the whole cache would be compiled separately.
        self.caches = nn.ModuleList(KVCache(N * K, B + 1, like=k) for k, _ in memory)
        self.register_buffer("memory", torch.stack([torch.stack(kv) for kv in memory]))
        self.register_buffer("query", query.clone())
        self.register_buffer("centre", encoder.centre)
        self.register_buffer("noise", noise.clone())
        self.register_buffer(
            "z", torch.full((N, K, B + 1), encoder.vocab_size, device=noise.device)
        )
        self.register_buffer("t", torch.zeros(1, dtype=torch.long, device=noise.device))
        mode = "reduce-overhead" if cuda_graphs else None
        dynamic = chunk < B or None  # one compilation for all windows
        options = dict(fullgraph=True, dynamic=dynamic, backend=backend, mode=mode)
        self.compiled_step = torch.compile(self.step, **options)

    def forward(self, memory, query, noise):
        """Codes (N, K, B) from the output of encoder.start and noise (N, K, B)."""
        torch._foreach_copy_(list(self.parameters()), self.source)
        torch.stack([t for kv in memory for t in kv], out=self.memory.flatten(0, 1))
        self.query.copy_(query)
        self.noise.copy_(noise)
        self.t.zero_()
        for cache in self.caches:  # a mask hides old keys, but not if they are NaN
            cache.k.zero_()
            cache.v.zero_()
        for window in windows(noise.size(2), self.chunk):
            self.compiled_step(window)
        return self.z[..., 1:].clone()

    def step(self, window):
        """Draw token t given those before it, store it, and advance t."""
        h = self.embed(self.z.index_select(2, self.t)) + self.query.index_select(-2, self.t)
        for i, (block, cache) in enumerate(zip(self.blocks, self.caches, strict=True)):
            extend = functools.partial(cache.extend, self.t, window)
            h = block(h, self.memory[i].unbind(), extend)  # (N, K, 1, H)
        h = self.norm(h) - self.centre.index_select(0, self.t)
        logits = self.head(h).squeeze(2)  # (N, K, V)
        token = draw(logits, self.noise.index_select(2, self.t))
        self.t.add_(1)
        self.z.index_copy_(2, self.t, token)


class OnePassEncoder(TokenEncoder):
    """q(z|x) = prod_t q(z_t | x), the paper's "NA": blocks over patches, one token per position."""

    def __init__(self, x_shape, n_tokens, vocab_size, width, *size):
        super().__init__(n_tokens, vocab_size, width)
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, width, *size)
        self.head = Head(width, vocab_size)
        init_weights(self, embedding_std=width**-0.5)

    def forward(self, x, n_samples, noise=None, with_kl=False):
        logits = self.read_out(self.patch_encoder(x)).float()  # (N, B, V)
        if noise is None:
            noise = torch.rand(len(x), n_samples, self.n_tokens, device=x.device)
        z = draw(logits.detach(), noise.transpose(1, 2).contiguous())  # (N, B, K)
        log_q = logits.log_softmax(dim=-1).gather(2, z)  # (N, B, K)
        log_q = log_q.transpose(1, 2) if self.per_token else log_q.sum(dim=1)  # (N, K, B) or (N, K)
        z = z.transpose(1, 2)  # (N, K, B)
        self.count(z)
        return (z, log_q, token_kl(logits).sum(dim=1, keepdim=True)) if with_kl else (z, log_q)

    def sample(self, x, n_samples, noise=None):
        return self(x, n_samples, noise)[0]

    def features(self, x, noise):
        """What the head reads: (N, B, H). No noise is needed."""
        return self.patch_encoder(x)

    def relaxed(self, x, choose):
        """As in AutoregressiveEncoder, with one choice for all tokens: t is slice(None)."""
        logits = self.read_out(self.patch_encoder(x)).float()  # (N, B, V)
        y = choose(logits, slice(None))
        self.count(y.argmax(dim=-1))
        return y, logits


class VectorEncoder(nn.Module):
    """A vector of `dim` numbers per token, not logits, for vqvae, fsq and gaussian."""

    def __init__(self, x_shape, n_tokens, vocab_size, width, n_heads, n_layers, mlp_ratio, dim):
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size
        self.patch_encoder = PatchEncoder(x_shape, n_tokens, width, n_heads, n_layers, mlp_ratio)
        self.head = nn.Linear(width, dim)
        init_weights(self, embedding_std=1.0)

    def forward(self, x):
        return self.head(self.patch_encoder(x)).float()  # (N, B, dim)


class Decoder(nn.Module):
    """Base of the generative models: turns tokens into vectors.

    A code is given as tokens (..., B) int64, as one-hot rows with gradient (..., B, V), or, if
    there is no embedding table (vocab_size = 0), as vectors (..., B, H).
    """

    window = 0  # side of the window for credit per token, in tokens; 0: credit whole codes

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
        return (x * logits - F.softplus(logits)).sum(dim=-1)  # float32 even under autocast

    def forward(self, z):
        logits = self.logits(z).unflatten(-1, self.x_shape)
        return independent(torch.distributions.Bernoulli(logits=logits, validate_args=False), 3)


def independent(distribution, n_dims):
    """Make the last n_dims of a batch of distributions one event."""
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


@torch.compiler.disable  # compiled, its backward pass would not sum over processes
def all_reduce(t):
    return AllReduce.apply(t)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm over the whole batch, even if several processes share it, on GPUs and CPUs."""

    def forward(self, h):
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(h)
        # Moments around the running mean: a difference of two large squares would lose precision.
        around = self.running_mean.clone()
        shifted = h.float() - around.view(-1, 1, 1)
        moments = torch.stack([shifted.mean(dim=(0, 2, 3)), shifted.square().mean(dim=(0, 2, 3))])
        offset, square = all_reduce(moments) / dist.get_world_size()  # (C,) each
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
    """How many times to halve a square image until it has one pixel per token."""
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

    The log variance is learned, clipped to a variance in [0.01, 1] (x is standardised); the clip
    passes no gradient outside that range. K is folded into the batch for BatchNorm.
    """

    LOG_VAR = math.log(0.01), 0.0

    def __init__(self, x_shape, n_tokens, vocab_size, width, hidden=64, n_blocks=2):
        super().__init__(vocab_size, width)
        self.side = math.isqrt(n_tokens)
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
        nn.init.constant_(layers[-1].bias[x_shape[0] :], math.log(0.5))  # inside the clip

    def moments(self, z):
        """Mean and log variance of x given z: (..., C, height, width) each, float32."""
        h = self.vectors(z)  # (..., B, H)
        lead = h.shape[:-2]
        h = h.reshape(-1, self.side, self.side, h.size(-1)).permute(0, 3, 1, 2)
        h = self.net(h).float()
        mean, log_var = h.view(*lead, *h.shape[1:]).chunk(2, dim=-3)
        return mean, log_var.clamp(*self.LOG_VAR)

    def log_prob(self, x, z):
        log_px = gaussian_log_prob(x.unsqueeze(1), *self.moments(z))  # (N, K, C, height, width)
        if not self.window:
            return log_px.flatten(2).sum(dim=-1)  # (N, K)
        patch = log_px.size(-1) // self.side
        return F.avg_pool2d(log_px.sum(dim=2), patch).flatten(2) * patch**2  # (N, K, B)

    def credit(self, log_px):
        """log p of each token's own region (N, K, B) -> log p of the window around it."""
        log_px = log_px.unflatten(2, (self.side, self.side))
        window = F.avg_pool2d(log_px, self.window, stride=1, padding=self.window // 2)
        return window.flatten(2) * self.window**2

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
        h = h.reshape(-1, *h.shape[-2:]) + self.positions  # (M, B, H)
        for block in self.blocks:
            h = block(h)
        h = self.conv(self.out(self.norm(h)).transpose(1, 2)).transpose(1, 2)  # (M, frames, H)
        h = self.head(h).float()
        return h.view(*lead, *h.shape[1:])

    def log_prob(self, x, z):
        mean = self.mean(z)  # (N, K, frames, features)
        log_var = mean.new_full((), math.log(self.VARIANCE))
        log_px = gaussian_log_prob(x.unsqueeze(1), mean, log_var)  # (N, K, frames, features)
        if not self.window:
            return log_px.flatten(2).sum(dim=-1)  # (N, K)
        return log_px.sum(dim=-1).repeat_interleave(2, dim=2) / 2  # (N, K, B): two tokens per frame

    def credit(self, log_px):
        return F.avg_pool1d(log_px, self.window, 1, padding=self.window // 2) * self.window

    def forward(self, z):
        mean = self.mean(z)
        std = mean.new_full((), self.VARIANCE**0.5)  # created on the device: no sync
        return independent(torch.distributions.Normal(mean, std, validate_args=False), 2)


class ResNetEncoder(nn.Module):
    """A vector of `dim` numbers per token, like VectorEncoder, but by strided convolutions: the
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
    reward at first, so the encoder learns from noise. In an encoder with large ones, the previous
    tokens, random at first, drown out x.
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


# ---------------------------------------------------------------------------------------------
# From the settings of a run to its model

METHODS = {  # from an encoder e, a decoder d and settings s
    "daps": lambda e, d, s: DAPS(
        e, d, s["n_samples"], s["ess_target"], s["eta_update"], s["centred"]
    ),
    "gumbel": lambda e, d, s: Relaxed(e, d, "gumbel"),
    "grmck": lambda e, d, s: Relaxed(e, d, "grmck", s["mc_samples"]),
    "rloo": lambda e, d, s: RLOO(e, d, s["n_samples"]),
    "ppo": lambda e, d, s: PPO(e, d, s["width"], s["n_samples"], s["ppo_epochs"], s["ppo_clip"]),
    "reinmax_na": lambda e, d, s: Relaxed(e, d, "reinmax"),
    "vqvae": lambda e, d, s: VQVAE(e, d, s["width"], s["commitment"], s["vq_ema"]),
    "fsq": lambda e, d, s: FSQ(e, d, fsq_levels(s), s["width"]),
    "gaussian": lambda e, d, s: Gaussian(e, d, s["width"]),
}
METHODS |= {f"{name}_na": METHODS[name] for name in ("daps", "gumbel", "grmck", "rloo")}
AUTOREGRESSIVE = ("daps", "gumbel", "grmck", "rloo", "ppo")  # the others see x in one pass
VECTORS = ("vqvae", "fsq", "gaussian")  # methods whose encoder gives vectors, not logits


def fsq_levels(settings):
    """The setting "8 8 4" as numbers; FSQ checks that their product is vocab_size."""
    words = settings["fsq_levels"].split()
    if not words or not all(word.isdecimal() for word in words):
        wanted = "numbers whose product is vocab_size"
        raise ValueError(f"fsq_levels is {settings['fsq_levels']!r}, must be {wanted}")
    return [int(word) for word in words]


def build_model(settings, x_shape):
    """The method and networks for a run's settings, freshly initialised."""
    s, method = settings, settings["method"]
    code = (x_shape, s["n_tokens"], s["vocab_size"])
    size = (s["width"], s["n_heads"], s["n_layers"], s["mlp_ratio"])
    if method in VECTORS:
        dim = len(fsq_levels(s)) if method == "fsq" else s["width"]
        if s["resnet_encoder"]:
            encoder = ResNetEncoder(*code, dim)
        else:
            encoder = VectorEncoder(*code, *size, dim)
    elif method in AUTOREGRESSIVE:
        encoder = AutoregressiveEncoder(
            *code, *size, aligned=s["aligned"], recompute=s["recompute"]
        )
    else:
        encoder = OnePassEncoder(*code, *size)
    n_vectors = 0 if method in VECTORS else s["vocab_size"]
    shape = (x_shape, s["n_tokens"], n_vectors, s["width"])
    if s["dataset"] == "lafan":
        decoder = MotionDecoder(*shape, s["n_heads"], s["decoder_layers"], s["mlp_ratio"])
    else:
        decoder = ResNetDecoder(*shape) if x_shape[0] == 3 else MLPDecoder(*shape)
    if s["tied"] and method not in VECTORS:
        encoder.head = TiedHead(s["width"], decoder.embed)
    if s["credit_window"] and method in ("daps", "daps_na") and hasattr(decoder, "credit"):
        encoder.per_token, decoder.window = True, s["credit_window"]
    return METHODS[method](encoder, decoder, s)


@torch.no_grad()
def start_from_clusters(model, x, generator, entropy=1 / 3):
    """Before the first step, let each value stand for a cluster of what the encoder sees in x.

    With random tables, a value means nothing until both networks have learned what it means. Here
    the head's inputs h for x (n, *shape), with n B >= V, less their mean at each position, are
    clustered by k-means around V centres c_v. Logits become -s |h - c_v|^2 / 2, up to a constant,
    where s makes the mean entropy of a token this share of log V. The decoder's vector of v becomes
    c_v, scaled to a mean square of 1: similar patches are decoded alike. VQ-VAE begins in the same
    way. Ours, not the paper's.
    """
    encoder, head = model.encoder, model.encoder.head
    noise = torch.rand(len(x), 1, encoder.n_tokens, generator=generator).to(x.device)
    h = encoder.features(x, noise)  # (n, B, H)
    encoder.centre.copy_(h.mean(dim=0))  # (B, H)
    h = (h - encoder.centre).flatten(0, 1)  # (n * B, H)
    first = torch.randperm(len(h), generator=generator)[: encoder.vocab_size].to(h.device)
    centres = kmeans(h, h[first])  # (V, H)
    offset = centres.square().sum(dim=1) / 2
    scores = h @ centres.T - offset  # (n * B, V)
    low, high = 1e-4, 1e4
    for _ in range(40):  # the entropy falls as s rises
        s = math.sqrt(low * high)
        found = torch.special.entr((s * scores).softmax(dim=-1)).sum(dim=-1).mean().item()
        low, high = (s, high) if found > entropy * math.log(encoder.vocab_size) else (low, s)
    rms = centres.square().mean().sqrt()
    model.decoder.embed.weight.copy_(centres / rms)
    head.bias.copy_(-s * offset)
    if isinstance(head, TiedHead):
        nn.init.eye_(head.query.weight).mul_(s * rms * h.size(1) ** 0.5)
        nn.init.zeros_(head.query.bias)
    else:
        head.weight.copy_(s * centres)


@torch.no_grad()
def split_values(model, optimizer, generator, rare=0.05, noise=0.2):
    """Turn values that the encoder rarely draws into copies of common ones; return how many.

    A value that drops out early would never come back: the encoder does not draw it, so the decoder
    does not learn it, so its reward is low when drawn. Each value used less than `rare` of an even
    share becomes a copy of a common one, and the copies split its probability. Their total
    probability and log p(x|z) do not change, except for noise on the decoder's vectors, in units of
    the table's standard deviation, which lets the copies diverge. Optimizer moments are copied too.
    """
    encoder, table = model.encoder, model.decoder.embed.weight
    count, V = encoder.usage.tolist(), encoder.vocab_size
    dead = [v for v in range(V) if count[v] < rare * sum(count) / V]
    source, copies = list(range(V)), [1] * V
    for v in dead:
        source[v] = u = max(range(V), key=lambda i: count[i] / copies[i])
        copies[u] += 1
    encoder.usage.zero_()
    spread = noise * table.std()
    source = torch.tensor(source, device=table.device)
    copies = torch.tensor(copies, device=table.device)[source]
    tables = [encoder.head.bias, table, getattr(encoder.head, "weight", None)]
    tables.append(encoder.embed.weight if hasattr(encoder, "embed") else None)
    for t in tables:
        state = optimizer.state.get(t, {})
        for rows in (t, state.get("exp_avg"), state.get("exp_avg_sq")):
            if rows is not None:
                rows[:V] = rows[source]
    encoder.head.bias.sub_(copies.log() / encoder.head.log_scale.exp())
    extra = torch.randn(len(dead), table.size(1), generator=generator).to(table.device)
    table[dead] += spread * extra
    return len(dead)


def n_parameters(model):
    """Number of parameters of the recognition and the generative model, the latter with the code
    vectors. Eta, a value function and the scale of the logits are not counted."""
    learned = dict(model.named_parameters())
    if hasattr(model, "codebook"):
        learned["codebook"] = model.codebook  # a buffer if it is a running mean
    sizes = {"encoder": 0, "decoder": 0}
    for name, p in learned.items():
        if not name.startswith(("log_eta", "value.")) and not name.endswith("log_scale"):
            part = "encoder" if name.startswith(("encoder.", "posterior.")) else "decoder"
            sizes[part] += p.numel()
    return sizes["encoder"], sizes["decoder"]
