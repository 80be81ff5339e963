"""Keeping all V values of the tokens in use (ours, not the paper's): two cures for one disease.

A value that the encoder does not draw is not learned by the decoder, so its reward is low when it
is drawn, so it is drawn less: most of a vocabulary can die in the first steps. `split_values` turns
dying values into copies of common ones and suits codes of few tokens. `start_from_clusters` gives
every value a meaning before the first step and suits codes of many, together with a slow encoder
(`encoder_lr`) and a fast scale (`scale_lr`). Neither serves both: docs/trials.md has the numbers.

Letters: B tokens per code, V values per token, H width.
"""

import math

import torch

from baselines import kmeans
from daps import gather_batch


@torch.no_grad()
def start_from_clusters(model, x, generator, entropy=1 / 3):
    """Before the first step, let each value stand for a cluster of what the encoder sees in x.

    The head's inputs h for x (n, *shape), with n B >= V, less their mean at each position, are
    clustered by k-means around V centres c_v. Logits become -s |h - c_v|^2 / 2, up to a constant,
    where s makes the mean entropy of a token this share of log V (for an autoregressive encoder,
    along codes drawn before the start). The decoder's vector of v becomes c_v, scaled to a mean
    square of 1, so that similar patches are decoded alike. VQ-VAE begins in the same way."""
    encoder, head, seen = model.encoder, model.encoder.head, []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    noise = torch.rand(len(x), 1, encoder.n_tokens, generator=generator).to(x.device)
    encoder(x, 1, noise)
    hook.remove()
    h = seen[-1].view(len(x), encoder.n_tokens, -1).float()  # (n, B, H); seen last: whole codes
    head.centre.copy_(h.mean(dim=0))  # (B, H)
    h = (h - head.centre).flatten(0, 1)  # (n * B, H)
    first = torch.randperm(len(h), generator=generator)[: encoder.vocab_size].to(h.device)
    centres = kmeans(h, h[first])  # (V, H)
    offset = centres.square().sum(dim=1) / 2
    scores = h @ centres.T - offset  # (n * B, V)
    low, high = 1e-4, 1e4
    for _ in range(40):  # the entropy falls as s rises
        s = math.sqrt(low * high)
        found = torch.special.entr((s * scores).softmax(dim=-1)).sum(dim=-1).mean().item()
        low, high = (s, high) if found > entropy * math.log(encoder.vocab_size) else (low, s)
    model.decoder.embed.weight.copy_(centres / centres.square().mean().sqrt())
    head.bias.copy_(-s * offset)
    head.weight.copy_(s * centres)


def count_values(decoder):
    """Let decoder.usage (V,) count how often training, in all processes, decodes each value."""
    usage = torch.zeros(decoder.embed.num_embeddings, dtype=torch.long)
    decoder.register_buffer("usage", usage)

    def count(decoder, inputs):
        if decoder.training:
            (z,) = inputs  # values, or vectors as relaxed methods have them
            z = gather_batch(z.argmax(dim=-1) if z.is_floating_point() else z).flatten()
            decoder.usage.index_add_(0, z, torch.ones_like(z))

    decoder.register_forward_pre_hook(count)


@torch.no_grad()
def split_values(model, optimizer, generator, rare=0.05, noise=0.2):
    """Turn each value used less than `rare` of an even share since the last split into a copy of a
    common one; return how many. Copies split the probability of their source, so their total does
    not change; nor does log p(x|z), except for noise on the decoder's vectors, in units of the
    table's standard deviation, which lets copies diverge. Optimizer moments are copied too."""
    encoder, table = model.encoder, model.decoder.embed.weight
    count, V = model.decoder.usage.tolist(), encoder.vocab_size
    dead = [v for v in range(V) if count[v] < rare * sum(count) / V]
    source, copies = list(range(V)), [1] * V
    for v in dead:
        source[v] = u = max(range(V), key=lambda i: count[i] / copies[i])
        copies[u] += 1
    model.decoder.usage.zero_()
    spread, (source, copies) = noise * table.std(), torch.tensor([source, copies]).to(table.device)
    tables = [encoder.head.bias, encoder.head.weight, table]
    tables += [encoder.tokens.embed.weight] if encoder.autoregressive else []
    for t in tables:
        for rows in (t, *optimizer.state.get(t, {}).values()):
            if rows.dim():  # not the number of steps
                rows[:V] = rows[source]
    encoder.head.bias.sub_(copies[source].log() / encoder.head.log_scale.exp())
    extra = torch.randn(len(dead), table.size(1), generator=generator).to(table.device)
    table[dead] += spread * extra
    return len(dead)
