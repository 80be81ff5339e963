"""What a prior is worth: its bits against a baseline, and whether a classifier recognises samples.

    python experiments/generation.py out/mnist_daps out/mnist_fsq --guidance=2

For runs with a prior (prior.py). The baseline takes every token on its own from some training code
with the same label. The classifier is a small convolutional network, trained on real images.
"""

import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from configurator import UserError, configure
from data import cached, on_device
from eval import BATCH, load, load_data
from flow import draw, noisy, spread
from prior import generate, load_codes, load_prior
from report import print_aligned
from run import setup_device

guidance = 1.0  # 0: ignore labels; 1: p(z | label); above: more typical of the label
n_generated = 2000  # codes generated
classifier_steps = 1000  # training steps of the classifier
data_dir = ""  # where the data sets are; empty: the run's data_dir
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
n_workers = 8  # imagenet: processes that read ahead, at most one per core

TABLE = (
    ("bits per code: B log2 V", "bits", "{:g}"),
    ("  independent positions", "bits_marginals", "{:.2f}"),
    ("  flow, at most", "bits_flow", "{:.2f}"),
    ("  independent positions, given the label", "bits_marginals_label", "{:.2f}"),
    ("  flow, given the label, at most", "bits_flow_label", "{:.2f}"),
    ("accuracy of a classifier: real images", "accuracy_real", "{:.1%}"),
    ("  reconstructions", "accuracy_reconstructed", "{:.1%}"),
    ("  independent positions, given the label", "accuracy_marginals", "{:.1%}"),
    ("  flow, given the label", "accuracy_flow", "{:.1%}"),
)


def bound_rate(log_p, z_1, z_t, t):
    """The integrand over t of a bound on -log p(z_1), in nats per unit of time: (N,) float64.

    Run backwards, the noise is a Markov chain too: from t to t - dt, a token is redrawn uniformly
    with probability dt / t. In its reversal, token i goes from x to y != x at the rate

        r(y) = sum_v p(z_1^i = v | z_t) p(y | v) / p(x | v) / (t V),

    where p(y | v) is that of the path above. Given z_1, the rate is r(y | z_1), with only v = z_1^i
    in the sum. The KL divergence of the paths given z_1, which end there, from the model's paths
    bounds -log p(z_1). It is the integral over t of the mean, over z_t ~ p(z_t | z_1), of

        sum_i sum_{y != x} r(y | z_1) log(r(y | z_1) / r(y)) - r(y | z_1) + r(y)

    and equals -log p(z_1) for exact posteriors. It bounds what this chain generates in continuous
    time, not what sample() does in 40 Euler steps. With exact posteriors, this chain has the
    marginals of the one that sample() follows, but more jumps. The bound for the latter (Shaul et
    al. 2024) is looser, for uniform codes by almost 1 nat per token: given z_1, its paths show
    which tokens have arrived; z_t does not.
    """
    V, t = log_p.size(-1), t.double().view(-1, 1, 1)
    equal, other = t + (1 - t) / V, (1 - t) / V  # p(x | v) for x = v and for x != v
    x = z_t.unsqueeze(-1)

    def rates(p):  # times t V
        return 1 + p.gather(-1, x) * (other / equal - 1) + p * (equal / other - 1)  # (N, B, V)

    r, r_given = rates(log_p.double().exp()), rates(F.one_hot(z_1, V).double())
    terms = r_given * (r_given / r).log() - r_given + r
    return terms.scatter(-1, x, 0.0).sum(dim=(1, 2)) / (t * V).flatten()


@torch.no_grad()
def flow_bits(flow, z, labels, generator, n):
    """The bound of bound_rate, on the code length of the continuous-time chain, in bits per code:
    mean over codes z given labels, from n draws of z_t, and its standard error.

    Integrated over u with t = 1 - u^2, dt = 2 u du: with t uniform, rare jumps at rate 1 / (1 - t)
    would make the variance infinite.
    """
    rows = torch.cat([torch.randperm(len(z), generator=generator) for _ in range(0, n, len(z))])[:n]
    u = spread(torch.rand(n, generator=generator, dtype=torch.float64)).clamp_min(1e-4)
    bits = []
    for part in torch.arange(n).split(max(1, 2**21 // (flow.n_tokens * flow.vocab_size))):
        noise = torch.rand(len(part), 2 * flow.n_tokens, generator=generator)
        values = (z[rows[part]], 1 - u[part].square(), noise, labels[rows[part]])
        z_1, t, noise, y = (value.to(flow.positions.device) for value in values)
        z_t = noisy(z_1, t, noise, flow.vocab_size)
        rate = bound_rate(flow(z_t, t, y), z_1, z_t, t)
        bits.append(rate.cpu() * 2 * u[part] / math.log(2))
    bits = torch.cat(bits)
    return bits.mean().item(), (bits.std() / n**0.5).item()


def bits_per_code(flow, codes):
    """Bounds on the bits per validation code of a prior, without and given the label."""
    z_val, y_val, n = codes["z_val"].long(), codes["y_val"], 2**17 // flow.n_tokens
    row, generator = {"bits": flow.n_tokens * math.log2(flow.vocab_size)}, torch.Generator()
    none = torch.full_like(y_val, flow.n_labels)
    row["bits_flow"], _ = flow_bits(flow, z_val, none, generator.manual_seed(0), n)
    if flow.n_labels:
        row["bits_flow_label"], _ = flow_bits(flow, z_val, y_val, generator.manual_seed(1), n)
    return row


def independent_positions(codes, labels, n_labels, vocab_size, generator):
    """Bits per validation code by the marginals of training codes and by those of each label, and
    codes (N, B) for labels (N,), drawn from the latter. For bits, counts are smoothed, towards
    uniform and towards the marginals of all labels; the amount is the best for validation codes."""
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(-1, 1, 1)
    bits, tokens = torch.zeros(2, len(weights)), []
    for z, z_val in zip(codes["z_train"].T.long(), codes["z_val"].T.long(), strict=True):
        counts = torch.zeros(max(n_labels, 1), vocab_size)
        counts.index_put_((codes["y_train"], z), torch.ones(len(z)), accumulate=True)
        p = (counts.sum(dim=0) + weights / vocab_size) / (len(z) + weights)  # (4, 1, V)
        p_given = (counts + weights * p) / (counts.sum(dim=1, keepdim=True) + weights)
        bits[0] -= p[:, 0, z_val].log2().mean(dim=1)
        bits[1] -= p_given[:, codes["y_val"], z_val].log2().mean(dim=1)
        tokens.append(draw(counts[labels], torch.rand(len(labels), 1, generator=generator)))
    return *bits.amin(dim=1).tolist(), torch.cat(tokens, dim=1)


def load_classifier(data, n_steps, device="cpu", n_workers=0):
    """A small convolutional classifier of the real images; trained once and cached."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(data.shape[0], 32, 3, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(7)]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 256), nn.ReLU(), nn.Dropout(0.5)]
    net = nn.Sequential(*layers, nn.Linear(256, data.n_labels)).to(device)

    def fit():
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batches = data.train_batches(0, range(n_steps), 128, n_workers=n_workers)
        for step, (x, y) in enumerate(tqdm(batches, "classifier", n_steps, False, disable=None)):
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / n_steps)
            F.cross_entropy(net(on_device(x, device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    net.load_state_dict(cached(f"classifier_{data.key('train', 'val')}_{n_steps}.pt", fit))
    return net.eval().requires_grad_(False)


def judge(out_dir):
    """The numbers of TABLE for the prior of a run. Samples take 40 steps, and are the same every
    time."""
    model, prior = load(out_dir, device=device), load_prior(out_dir, device)
    data = load_data(model, data_dir)
    config = prior.config
    codes = load_codes(out_dir, model, data, config["search"], config["seed"], n_workers)
    y_val, n = codes["y_val"], min(n_generated, data.n_val)
    labels = y_val[torch.arange(n) * len(y_val) // n]  # as frequent as in the validation set
    row, generator = bits_per_code(prior, codes), torch.Generator().manual_seed(0)
    found = independent_positions(codes, labels, data.n_labels, prior.vocab_size, generator)
    row["bits_marginals"], bits_given, drawn = found
    if not data.n_labels:
        return row
    row["bits_marginals_label"] = bits_given
    classifier = load_classifier(data, classifier_steps, device, n_workers)

    def accuracy(images, y):
        """The share of images that the classifier assigns their label y. Of binary data, decoded
        images are made binary too: each pixel is 1 if its mean is above 1/2."""
        images = (x.round() if data.shape[0] == 1 else x for x in images)
        guesses = torch.cat([classifier(x).argmax(dim=1).cpu() for x in images])
        return (guesses == y).double().mean().item()

    def decoded(z):
        return (model.decode(part.to(device).long()).mean for part in z.split(BATCH))

    real = data.val_batches(data.val_index(), BATCH, n_workers)
    row["accuracy_real"] = accuracy((on_device(x, device) for _, x, _ in real), y_val)
    row["accuracy_reconstructed"] = accuracy(decoded(codes["z_val"]), y_val)
    row["accuracy_marginals"] = accuracy(decoded(drawn), labels)
    row["accuracy_flow"] = accuracy(decoded(generate(prior, labels, guidance)), labels)
    return row


if __name__ == "__main__":
    _, out_dirs = configure(globals(), sys.argv[1:], may_be_zero=("guidance", "n_workers"))
    if not out_dirs:
        raise UserError("name runs with a prior: python experiments/generation.py out/glyphs_daps")
    device, lines = setup_device(device), [["", *(title for title, *_ in TABLE)]]
    for out_dir in out_dirs:
        row = judge(out_dir)
        cells = (form.format(row[key]) if key in row else "-" for _, key, form in TABLE)
        lines.append([os.path.normpath(out_dir), *cells])
    print_aligned(list(zip(*lines, strict=True)), n_left=1)
