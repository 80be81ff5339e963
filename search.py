"""Better codes for more decodings: the same model and the same bits, a better reconstruction.

    z = search(x, z, log_prob, proposals, budget=64)

An encoder commits to a code at once, and only the decoder can tell whether it was a good one. So
ask the decoder: candidates for some tokens, drawn from the encoder's own distribution made flatter,
are decoded and kept where log p(x|z) rises. A searched code is not a draw from q(z|x): it has no KL
and no ELBO, and its rate is the B log2 V bits of any code. This file needs only torch.

Letters: N examples in a batch, C candidates, B tokens per code, V values per token.
"""

import torch
import torch.nn.functional as F


@torch.no_grad()
def search(
    x, z, log_prob, proposals, budget, noise=None, places=None, n_candidates=0, sharpness=0.5
):
    """Codes (N, B) int64 whose log p(x|z) is at least that of the best first code, per example.

    x             N examples, passed on to the two functions
    z             first codes (N, K, B) int64, of which the best is improved
    log_prob      (x, z (N, C, B)) -> log p(x|z) (N, C); with places (N, C, B), that of each token's
                  own region of x
    proposals     (x, z (N, B)) -> logits (N, B, V) of values worth trying, given the code so far
    budget        decodings per example, of which the first codes take K
    noise         (i, shape) -> the i-th uniform noise (N, *shape); by default, torch.rand
    places        how tokens lie in x: (rows, columns) or (length,). Every second one in each
                  direction is tried at the same time and judged by the 3 (x 3) regions around it.
                  None: each may change all of x, so they are tried one by one
    n_candidates  C, values tried per token and round; 0: 4 to 16, if eight rounds fit
    sharpness     factor of the logits; below 1, values that the encoder finds unlikely are tried
    """

    def fresh(i, shape):
        return torch.rand(len(row), *shape, device=z.device)

    def total(log_px):
        return log_px if places is None else log_px.sum(dim=-1)

    row, positions = torch.arange(len(z), device=z.device), groups(z.size(2), places)
    n_candidates = n_candidates or max(4, min(16, budget // (8 * len(positions))))
    log_px, left, calls = log_prob(x, z), budget - z.size(1), 0
    best = total(log_px).argmax(dim=1)
    z, log_px = z[row, best], log_px[row, best]  # (N, B); (N,) or (N, B)
    while True:
        logits = sharpness * proposals(x, z).float()  # (N, B, V), once per round
        n_candidates = min(n_candidates, logits.size(-1) - 1)
        for group in positions:
            group = group.to(z.device)  # (G,) positions
            n = min(n_candidates, left if places is None else left - 1)
            if n < 1:
                return z
            u = (noise or fresh)(calls, (len(group), logits.size(-1)))
            values = candidates(logits[:, group], z[:, group], n, u)  # (N, C, G)
            trials = z.unsqueeze(1).repeat(1, n, 1)  # (N, C, B)
            trials[:, :, group] = values
            found = log_prob(x, trials)  # (N, C) or (N, C, B)
            if places is None:
                choice = found.argmax(dim=1)
                new_z, new_log_px = trials[row, choice], found[row, choice]
            else:
                gain = around(found, places) - around(log_px.unsqueeze(1), places)
                gain, choice = gain[:, :, group].max(dim=1)  # (N, G) each
                value = values.gather(1, choice.unsqueeze(1)).squeeze(1)
                new_z = z.clone()
                new_z[:, group] = torch.where(gain > 0, value, z[:, group])
                new_log_px = log_prob(x, new_z.unsqueeze(1)).squeeze(1)  # (N, B)
                left -= 1
            left, calls = left - n, calls + 1
            better = total(new_log_px) > total(log_px)  # (N,): what was found never gets worse
            z = torch.where(better.unsqueeze(1), new_z, z)
            better = better if places is None else better.unsqueeze(1)
            log_px = torch.where(better, new_log_px, log_px)


def groups(n_tokens, places):
    """Positions that are tried at the same time: tokens with one between them in each direction."""
    if places is None:
        return torch.arange(n_tokens).split(1)
    grid = torch.arange(n_tokens).view(places)
    corners = torch.cartesian_prod(*[torch.arange(2)] * len(places)).view(-1, len(places))
    found = [grid[tuple(slice(i, None, 2) for i in corner)] for corner in corners.tolist()]
    return [group.flatten() for group in found if group.numel()]


def candidates(logits, z, n, u):
    """n different values of each token, none of them z (N, G), drawn by logits (N, G, V) and u of
    that shape, uniform in [0, 1): (N, n, G). The top n of logits with Gumbel noise are a draw."""
    gumbel = -torch.log(-torch.log(u.clamp(1e-7, 1 - 1e-7)))
    perturbed = (logits + gumbel).scatter(-1, z.unsqueeze(-1), -torch.inf)
    return perturbed.topk(n, dim=-1).indices.transpose(1, 2)


def around(log_px, places):
    """Sums of log p of regions (N, C, B) over each token's neighbourhood: (N, C, B)."""
    pool = F.avg_pool2d if len(places) == 2 else F.avg_pool1d
    sums = pool(log_px.unflatten(-1, places), 3, stride=1, padding=1) * 3 ** len(places)
    return sums.flatten(2)


def search_codes(model, x, budget, noise=None):
    """Codes (N, B) by a model like DAPS, with at most `budget` decodings per example. The encoder
    must have mode(x) and proposals(x, z); a decoder with `places` also regions(x, z)."""
    decoder, vectors = model.decoder, getattr(model, "vectors", lambda z: z)
    places = getattr(decoder, "places", None)
    proposals = getattr(model, "proposals", None) or model.encoder.proposals

    def score(x, z):
        if places:
            return decoder.regions(x, vectors(z))
        log_px = decoder.log_prob(x, vectors(z))
        return log_px if log_px.dim() == 2 else log_px.sum(dim=2)  # per token, for credit

    z = model.encode(x, mode=True).unsqueeze(1)
    n_draws = 0 if places or not model.has_kl else min(15, budget // 16)
    if n_draws:  # with few tokens, another draw may be better as a whole
        options = {} if noise is None else {"noise": noise(0, (n_draws, z.size(2)))}
        z = torch.cat([z, model.encoder(x, n_draws, **options)[0]], dim=1)
    later = noise and (lambda i, shape: noise(i + 1, shape))
    return search(x, z, score, proposals, budget, later, places)
