"""What an autoregressive encoder would lose if its tokens were independent given x.

    python experiments/correlation.py out/mnist_daps out/mnist_beta1

The total correlation of q(z|x) is the KL from q to the product of its marginals,

    sum_t H(z_t | x) - H(z_t | z_<t, x),

in nats, a mean over validation examples. Both entropies come from q(z_t | z_<t, x) along M codes:
H(z_t | z_<t) is the mean of its entropies, the marginal of z_t the mean of its probabilities. With
few draws that mean is too sharp and the total correlation too small, so there is also one of M / 2.

A factorised encoder with these marginals would have a KL to the prior that is smaller by the total
correlation, but tokens that no longer go together. Tokens shuffled among the M codes of an example
are such codes: "shuffled" is their log p(x|z), and "loses" what the beta-ELBO would lose.

Letters: N examples, M codes drawn for each, B tokens per code, V values per token.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from configurator import UserError, configure
from data import on_device
from eval import load, load_data
from report import print_aligned
from run import setup_device

n_examples = 200  # N
n_draws = 512  # M
data_dir = ""  # where the data sets are; empty: the run's data_dir


def entropies(logits):
    """Logits of q(z_t | z_<t, x) along M codes, (M, B, V) -> sum of H(z_t), H(z)."""
    p = logits.double().softmax(dim=-1)
    conditional = torch.special.entr(p).sum(dim=-1).mean(dim=0)
    return torch.special.entr(p.mean(dim=0)).sum(), conditional.sum()


@torch.no_grad()
def measure(model, x):
    """For one x (1, ...): sum of H(z_t), H(z), total correlation, the same from half of the draws,
    log p(x|z), log p(x|z) of shuffled tokens, and the loss in beta-ELBO."""
    encoder, beta = model.encoder, model.config["beta_final"]
    z, *_ = encoder(x, n_draws)  # (1, M, B)
    logits = encoder.tokens.logits(encoder.tokens.context(encoder.patch_encoder(x)), z)
    marginal, joint = entropies(logits[0])
    half = entropies(logits[0, : n_draws // 2])
    shuffled = z.gather(1, torch.rand(z.shape).argsort(dim=1))  # each position on its own
    drawn, mixed = (model.decoder.log_prob(x, codes).double() for codes in (z, shuffled))
    drawn, mixed = (log_px.sum() / n_draws for log_px in (drawn, mixed))
    loss = drawn - mixed - beta * (marginal - joint)
    values = marginal, joint, marginal - joint, half[0] - half[1], drawn, mixed, loss
    return torch.stack(values)


if __name__ == "__main__":
    _, runs = configure(globals(), sys.argv[1:])
    if not runs:
        raise UserError("name runs of daps: python experiments/correlation.py out/glyphs_daps")
    setup_device("cpu")
    lines = [
        ("run", "beta", "sum of H(z_t)", "H(z)", "TC", "from M/2", "log p", "shuffled", "loses")
    ]
    for run in runs:
        model = load(run)
        if not getattr(model.encoder, "autoregressive", False) or not model.has_kl:
            raise UserError(f"{run} has no autoregressive q(z|x)")
        torch.manual_seed(0)
        data = load_data(model, data_dir)
        images = on_device(data.read("val", data.val_index(n_examples))[0], "cpu")
        rows = torch.stack([measure(model, x) for x in images.split(1)])  # (N, 7)
        cells = [f"{value:.2f}" for value in rows.mean(dim=0)]
        cells[-1] += f" +- {rows[:, -1].std() / len(rows) ** 0.5:.2f}"
        lines.append((run, f"{model.config['beta_final']:g}", *cells))
    print_aligned(lines, n_left=1)
