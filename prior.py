"""A prior over the codes of a trained run, by discrete flow matching, and samples from it.

    python prior.py out/mnist_daps             train on the codes of a run; table, pictures
    python prior.py out/mnist_daps --sample    table and pictures of a trained prior
    python prior.py out/mnist_* --resume       train unfinished priors; one table of all
    python prior.py out/mnist_daps --max_steps=250000 --batch_size=64 --lr=1e-4
                                               the authors' budget, for a GPU

    model, prior = load("out/mnist_daps"), load_prior("out/mnist_daps")
    images = model.decode(prior.sample(torch.tensor([3, 1, 4]))).mean

Letters: N codes in a batch, B tokens per code, V values per token, H width.
"""

import json
import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from configurator import UserError, configure, settings_block
from data import cached, digest, on_device, train_indices, uniform_noise
from eval import BATCH, load, load_data, validation_noise
from flow import Flow, cross_entropy, draw, flow_bits, spread
from motion import FRAMES, film, joint_positions
from plots import grid, images_per_row
from report import print_aligned, save_picture
from run import Log, StopSignal, check_same_run, load_checkpoint, restore, save, setup_device, write

# ---------------------------------------------------------------------------------------------
# Settings. Config files and --key=value override them; --help lists them.

n_layers = 2  # transformer blocks; the authors' number, as is that of width
width = 128  # H
n_draws = 1  # codes drawn per training example; VQ-VAE and FSQ always give the same one
search = 0  # learn the best codes found in so many decodings each; 0: drawn ones
batch_size = 128  # N; the authors: 64
lr = 2e-3  # peak rate of AdamW: warm-up, then a cosine down to 0; the authors: 1e-4, constant
label_dropout = 0.1  # share of codes whose label is hidden: guidance also needs p(z)
seed = 0  # of parameters, batches and noise
# may differ when training is resumed (max_steps stretches the schedule)
max_steps = 2000  # the authors: 250,000
eval_interval = 500  # steps between validations, each of which saves prior.pt
resume = False  # continue from prior.pt, if there is one
sample = False  # do not train: table and pictures of the trained prior
n_steps = 40  # Euler steps of sampling; the authors' dt is 1/40
guidance = 1.0  # 0: ignore labels; 1: p(z | label); above: more typical of the label
n_generated = 2000  # codes generated for the table
classifier_steps = 1000  # training steps of the classifier that judges them; 0: no classifier
data_dir = ""  # where the data sets are; empty: the run's data_dir
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images
# ---------------------------------------------------------------------------------------------
# codes and prior of a run, kept in its folder

CODE_NOISE, FLOW_NOISE, FLOW_VAL_NOISE = 16, 17, 18  # streams of randomness, next to data.py's


def digest_of_model(out_dir):
    with open(os.path.join(out_dir, "best.pt"), "rb") as file:
        return digest(file.read())


def load_codes(out_dir, model, data, n_draws, search, seed):
    """Codes (n, B), int16 if they fit, and labels (n,), 0 if there are none: z_train, y_train,
    z_val, y_val. They are drawn once and kept in codes_*.pt. Each training example has n_draws
    codes, drawn in successive epochs; for image folders, each is of a different crop. With search,
    they are the best found in so many decodings."""
    n, shape = n_draws * data.n_train, (1, model.encoder.n_tokens)
    dtype = torch.int16 if model.encoder.vocab_size <= 2**15 else torch.int32

    def batches():
        steps, numbers, index = range(-(-n // BATCH)), torch.arange(BATCH), data.val_index()
        for step, batch in enumerate(data.train_batches(seed, steps, BATCH, n_workers=n_workers)):
            yield "train", *batch, uniform_noise(CODE_NOISE, seed, step, numbers.to(device), shape)
        found = data.val_batches(index, BATCH, n_workers)
        for part, batch in zip(index.split(BATCH), found, strict=True):
            yield "val", *batch, validation_noise(model, part, device)

    def encode():
        codes = {"z_train": [], "y_train": [], "z_val": [], "y_val": []}
        torch.manual_seed(seed)  # for the search
        for split, x, y, noise in tqdm(batches(), "codes", leave=False, disable=None):
            options = {"search": search} if search else {"noise": noise}
            z = model.encode(on_device(x, device), **options)  # what the prior learns
            codes[f"z_{split}"].append(z.to("cpu", dtype))
            codes[f"y_{split}"].append(y)
        codes = {key: torch.cat(parts) for key, parts in codes.items()}
        return codes | {key: codes[key][:n] for key in ("z_train", "y_train")}

    key = f"{digest_of_model(out_dir)}_{data.key('train', 'val')}_{n_draws}_{search}_{seed}"
    return cached(os.path.abspath(os.path.join(out_dir, f"codes_{key}.pt")), encode)


def load_prior(out_dir, device="cpu"):
    """The prior of a run, ready for use; its settings are in prior.config."""
    path = os.path.join(out_dir, "prior.pt")
    saved = load_checkpoint(path, ("config", "model", "step", "size", "codes_of"))
    prior = Flow(**saved["size"])
    restore(path, saved, model=prior)
    if saved["codes_of"] != digest_of_model(out_dir):
        raise UserError(f"{path}: best.pt has changed since; delete {path} to train another prior")
    prior.config = saved["config"] | {"step": saved["step"]}
    return prior.to(device).eval().requires_grad_(False)


def train(out_dir, codes, size):
    """Train a prior of this size to max_steps: prior.pt, and its curve in prior.jsonl."""
    path, step, codes_of = os.path.join(out_dir, "prior.pt"), 0, digest_of_model(out_dir)
    torch.manual_seed(seed)
    prior = Flow(**size).to(device)
    optimizer = torch.optim.AdamW(prior.parameters(), fused=True)
    if os.path.exists(path):
        load_prior(out_dir)  # of the same best.pt?
        saved, (_, may_differ) = load_checkpoint(path), settings_block(__file__)
        check_same_run(path, settings, saved["config"], may_differ, saved["step"])
        restore(path, saved, model=prior, optimizer=optimizer)
        step = saved["step"]

    def batch(split, rows, stream, seed, step):
        """Codes, times, labels, and noise that decides which labels are hidden, and z_t."""
        z_1, y = (codes[f"{letter}_{split}"][rows].to(device).long() for letter in "zy")
        numbers = torch.arange(len(rows), device=device)
        u = uniform_noise(stream, seed, step, numbers, (2 * prior.n_tokens + 2,))
        return z_1, spread(u[:, 0]), y, u[:, 1], u[:, 2:]

    # Validation codes may be sorted by label: in random order, every label has all times.
    order = torch.randperm(len(codes["z_val"]), generator=torch.Generator().manual_seed(0))
    order = order[: 2**15 // prior.n_tokens]
    log, stop = Log(os.path.join(out_dir, "prior.jsonl"), step), StopSignal()
    bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None)
    while step < max_steps and not stop.number:
        rate = min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * step / max_steps)) / 2
        optimizer.param_groups[0]["lr"] = lr * rate
        rows = train_indices(len(codes["z_train"]), seed, step, batch_size)
        z_1, t, labels, u_label, u = batch("train", rows, FLOW_NOISE, seed, step)
        labels = torch.where(u_label < label_dropout, prior.n_labels, labels)
        loss = cross_entropy(prior, z_1, t, labels, u)
        loss.backward()
        nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update()
        if step % 50 == 0:
            log.add({"step": step, "split": "train", "loss": loss.item()})
            bar.set_postfix(loss=f"{loss.item():.3f}")
        evaluating = step % eval_interval == 0 or step == max_steps
        if evaluating:
            z_1, t, labels, _, u = batch("val", order, FLOW_VAL_NOISE, 0, 0)
            with torch.no_grad():
                loss = cross_entropy(prior, z_1, t, labels, u).item()
            log.add({"step": step, "split": "val", "loss": loss})
            bar.write(f"step {step:6d}  val cross-entropy {loss:.4f} nats per token")
        if evaluating or stop.number:
            state = {"model": prior.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, state | dict(step=step, config=settings, size=size, codes_of=codes_of))
    bar.close()
    stop.release()
    if stop.number:
        print(f"stopped at step {step}; the same command with --resume continues from here")
        sys.exit(128 + stop.number)


# ---------------------------------------------------------------------------------------------
# table and pictures

TABLE = (
    ("steps of training", "step", "{:,}"),
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


def independent_positions(codes, labels, n_labels, vocab_size, generator):
    """A baseline, independent positions: bits per validation code by the marginals of training
    codes and by those of each label, and codes (N, B) for labels (N,), drawn from the latter. For
    bits, counts are smoothed, towards uniform and towards the marginals of all labels; the amount
    is the best for the validation codes."""
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


def load_classifier(data):
    """A small convolutional classifier of the real images; trained once and cached."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(data.shape[0], 32, 3, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(7)]
    layers += [nn.Flatten(), nn.Linear(64 * 7 * 7, 256), nn.ReLU(), nn.Dropout(0.5)]
    net = nn.Sequential(*layers, nn.Linear(256, data.n_labels)).to(device)

    def fit():
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        batches = data.train_batches(0, range(classifier_steps), 128, n_workers=n_workers)
        bar = tqdm(batches, "classifier", classifier_steps, leave=False, disable=None)
        for step, (x, y) in enumerate(bar):
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / classifier_steps)
            F.cross_entropy(net(on_device(x, device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    net.load_state_dict(cached(f"classifier_{data.key('train', 'val')}_{classifier_steps}.pt", fit))
    return net.eval().requires_grad_(False)


def generate(prior, labels, with_path=False):
    """Codes for labels (N,), sampled by the settings, the same every time."""
    options = (guidance, n_steps, torch.Generator(device).manual_seed(seed), with_path)
    parts = labels.split(max(1, 2**22 // (prior.n_tokens * prior.vocab_size)))
    return torch.cat([prior.sample(part, *options) for part in parts], dim=-2)


def measure(prior, model, data, codes):
    """The numbers of TABLE, for prior.json. The flow's bits are a bound for the chain in continuous
    time; the samples that the classifier judges take n_steps."""
    z_val, y_val, n_labels = codes["z_val"].long(), codes["y_val"], prior.n_labels
    row = {"step": prior.config["step"], "bits": prior.n_tokens * math.log2(prior.vocab_size)}
    generator, n = torch.Generator().manual_seed(0), 2**17 // prior.n_tokens
    if prior.config["label_dropout"] or not n_labels:  # else it has not learned p(z)
        none = torch.full_like(y_val, n_labels)
        row["bits_flow"], row["bits_flow_error"] = flow_bits(prior, z_val, none, generator, n)
    if n_labels:
        row["bits_flow_label"], _ = flow_bits(prior, z_val, y_val, generator, n)
    n = min(n_generated, len(y_val))
    labels = y_val[torch.arange(n) * len(y_val) // n]  # as frequent as in the validation set
    sizes = (n_labels, prior.vocab_size)
    row["bits_marginals"], given, drawn = independent_positions(codes, labels, *sizes, generator)
    if n_labels:
        row["bits_marginals_label"] = given
    if not (n_labels and classifier_steps):
        return row
    classifier, real = load_classifier(data), data.val_batches(data.val_index(), BATCH, n_workers)

    def accuracy(images, y):
        """The share of images that the classifier assigns their label y. Of binary data, decoded
        images are made binary too: each pixel is 1 if its mean is above 1/2."""
        images = (x.round() if data.shape[0] == 1 else x for x in images)
        found = torch.cat([classifier(x).argmax(dim=1).cpu() for x in images])
        return (found == y).double().mean().item()

    def decoded(z):
        return (model.decode(part.to(device)).mean for part in z.split(BATCH))

    row["accuracy_real"] = accuracy((on_device(x, device) for x, _ in real), y_val)
    row["accuracy_reconstructed"] = accuracy(decoded(z_val), y_val)
    row["accuracy_marginals"] = accuracy(decoded(drawn), labels)
    row["accuracy_flow"] = accuracy(decoded(generate(prior, labels)), labels)
    return row


def draw_pictures(prior, model, data, y_val):
    """labels.png: for each label a real image and generated ones; without labels, generated ones.
    steps.png: z_t decoded from t = 0 to t = 1, a row per code."""
    is_motion, n_labels = data.name == "lafan", prior.n_labels
    n, columns = (1, 1) if is_motion else (10, images_per_row(data.shape[2]))

    def decode(z):
        return model.decode(z.to(device)).mean.cpu()

    def page(x, columns):
        if not is_motion:
            return grid(x, columns)
        rows = [(str(i + 1), joint_positions(frames)) for i, frames in enumerate(x)]
        return film(rows, range(0, FRAMES, 4))

    path = generate(prior, torch.arange(n) * n_labels // n, with_path=True)  # (n_steps + 1, n, B)
    path = path[torch.linspace(0, n_steps, 11).round().long()].transpose(0, 1)
    pictures = {"steps.png": page(decode(path.flatten(0, 1)), 11)}
    if not n_labels:
        samples = decode(generate(prior, torch.zeros(6 * columns).long()))
        return pictures | {"labels.png": page(samples, columns)}
    labels = y_val.unique()[:63]
    first = torch.stack([(y_val == label).nonzero()[0, 0] for label in labels])
    side_by_side, columns = (3, min(columns, 8)) if n_labels > 20 else (1, columns)
    samples = decode(generate(prior, labels.repeat_interleave(columns)))
    real = on_device(data.read("val", first)[0], "cpu").unsqueeze(1)  # (labels, 1, *shape)
    gap, samples = torch.ones_like(real), samples.unflatten(0, (-1, columns))
    rows = torch.cat([real, gap, samples, gap], dim=1).flatten(0, 1)
    return pictures | {"labels.png": page(rows, side_by_side * (columns + 3))}


if __name__ == "__main__":
    settings, out_dirs = configure(globals(), sys.argv[1:])
    may_be_zero = ("label_dropout", "search", "seed", "guidance", "classifier_steps", "n_workers")
    for key, value in settings.items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and key in may_be_zero):
            raise UserError(f"{key} is {value}, must be positive")
    if width % 4 or label_dropout >= 1 or seed >= 2**32:
        raise UserError("width must be a multiple of 4, label_dropout below 1, seed below 2**32")
    if not out_dirs:
        raise UserError("name at least one run: python prior.py out/glyphs_daps")
    for path in (os.path.join(out_dir, "prior.pt") for out_dir in out_dirs):
        if os.path.exists(path) and not (resume or sample):
            advice = "--sample makes its table and pictures, --resume continues its training"
            raise UserError(f"{path}: there is a prior already; {advice}; or delete this file")
    device, lines = setup_device(device), [["", *(title for title, *_ in TABLE)]]
    for out_dir in out_dirs:
        model = load(out_dir, device=device)
        if not model.discrete:
            raise UserError(f"{out_dir}: the code of a Gaussian VAE is not discrete")
        data, n_tokens = load_data(model, data_dir), model.encoder.n_tokens
        config = load_prior(out_dir).config if sample else settings
        if guidance != 1 and data.n_labels and not config["label_dropout"]:
            raise UserError(f"guidance is {guidance}, must be 1: label_dropout = 0 learns no p(z)")
        draws = (config["n_draws"], config["search"], config["seed"])
        codes = load_codes(out_dir, model, data, *draws)
        size = dict(n_tokens=n_tokens, vocab_size=model.encoder.vocab_size, n_labels=data.n_labels)
        if not sample:
            train(out_dir, codes, size | dict(width=width, n_layers=n_layers))
        prior = load_prior(out_dir, device)
        row = {"run": os.path.normpath(out_dir), "method": model.config["method"]}
        row |= {"guidance": guidance} | measure(prior, model, data, codes)
        write(os.path.join(out_dir, "prior.json"), json.dumps(row, indent=2) + "\n")
        for name, picture in draw_pictures(prior, model, data, codes["y_val"]).items():
            save_picture(os.path.join(out_dir, name), picture)
        cells = (form.format(row[key]) if key in row else "-" for _, key, form in TABLE)
        lines.append([row["run"], *cells])
    print_aligned(list(zip(*lines, strict=True)), n_left=1)
    print("pictures in each folder: labels.png, steps.png")
