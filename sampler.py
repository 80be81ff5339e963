"""Compiled sampling from the autoregressive encoder, for GPUs, where many small steps are slow.

    model.encoder.sampler = CompiledSampler()     one compiled step per token

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import copy

import torch
from torch import nn

from daps import draw
from models import KVCache


class CompiledSampler:
    """Compiled steps, one StaticSampler for each shape and dtype. As in gpt-fast, all that a step
    reads or writes keeps its address, and the position is a tensor.

    chunk        the step sees the cache in windows that grow by so many tokens: few shapes, little
                 wasted work
    cuda_graphs  replay each step as one CUDA graph
    """

    def __init__(self, chunk=128, cuda_graphs=False, backend="inductor"):
        self.chunk, self.options, self.samplers = chunk, {"backend": backend}, {}
        if cuda_graphs:
            self.options["mode"] = "reduce-overhead"

    def __call__(self, tokens, context, noise):
        """Codes (N, K, B) from a TokenDecoder, its context and noise (N, K, B)."""
        key = noise.shape, context[0][0][0].dtype
        if key not in self.samplers:
            # All samplers share one code object, of which torch compiles only a few versions.
            torch._dynamo.config.recompile_limit += 2
            self.samplers[key] = StaticSampler(tokens, context, noise, self.chunk, self.options)
        return self.samplers[key](tokens, context, noise)


class StaticSampler(nn.Module):
    """The buffers and the compiled step for codes of one shape. Matrix products have their weights
    and biases cast once per batch, not once per token; the head scales its bias in float32."""

    def __init__(self, tokens, context, noise, chunk, options):
        super().__init__()
        (memory, added), (N, K, B) = context, noise.shape
        # For each token, how many cache entries it sees: its own and earlier ones, in whole chunks.
        self.windows = [min((t // chunk + 1) * chunk, B) for t in range(B)]
        self.tokens = copy.deepcopy(tokens).requires_grad_(False)
        linear = [m for m in self.tokens.blocks.modules() if isinstance(m, nn.Linear)]
        for p in (*nn.ModuleList(linear).parameters(), self.tokens.head.weight):
            p.data = p.data.to(memory[0][0].dtype)
        # One token longer than needed: a window of the whole cache would be compiled separately.
        self.caches = nn.ModuleList(KVCache(N * K, B + 1, like=k) for k, _ in memory)
        self.register_buffer("memory", torch.stack([torch.stack(kv) for kv in memory]))
        self.register_buffer("added", added.clone())
        self.register_buffer("noise", noise.clone())
        empty = torch.full((N, K, B + 1), tokens.vocab_size, device=noise.device)
        self.register_buffer("z", empty)
        self.register_buffer("t", torch.zeros(1, dtype=torch.long, device=noise.device))
        dynamic = chunk < B or None  # one compilation for all windows
        self.compiled_step = torch.compile(self.step, fullgraph=True, dynamic=dynamic, **options)

    def forward(self, tokens, context, noise):
        memory, added = context
        state = [*self.tokens.parameters(), *self.tokens.buffers()]
        torch._foreach_copy_(state, [*tokens.parameters(), *tokens.buffers()])
        torch.stack([t for kv in memory for t in kv], out=self.memory.flatten(0, 1))
        self.added.copy_(added)
        self.noise.copy_(noise)
        self.t.zero_()
        for cache in self.caches:  # a mask hides old keys, but not if they are NaN
            cache.k.zero_()
            cache.v.zero_()
        for window in self.windows:
            self.compiled_step(window)
        return self.z[..., 1:].clone()

    def step(self, window):
        """Draw token t given those before it, store it, and advance t."""
        token = self.tokens.embed(self.z.index_select(2, self.t).squeeze(2))  # (N, K, H)
        context = [kv.unbind() for kv in self.memory], self.added
        logits = self.tokens.step(token, self.t, context, self.caches, window)  # (N, K, V)
        drawn = draw(logits, self.noise.index_select(2, self.t))
        self.t.add_(1)
        self.z.index_copy_(2, self.t, drawn)
