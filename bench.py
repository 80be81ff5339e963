"""The time and memory of a training step, compared with what the machine can do.

    python bench.py                                 all sections, minutes on two CPU cores
    python bench.py --only=steps --model=mnist      one section, on one of the models
    python bench.py --json_path=bench.json --picture=bench.png

Sections, selected by --only:
    steps      a training step of each method: time, ratio to the roofline, memory
    bar        where the time of a DAPS step goes (drawn in --picture)
    sampler    tokens per second with and without a cache; cost of choosing tokens; growth with B
    memory     a step of autoregressive DAPS and Gumbel as codes get longer

The roofline of a step is the time of only its matrix products and convolutions: recorded during a
step, forward and backward, and repeated with the same shapes, strides and dtype on the same
threads. Compared functions run in alternation (A, B, A, B, ...) and the numbers are medians, so
changes in the machine's speed affect all alike. Every row is measured in its own process, so its
peak memory is its own.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import ast
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter

import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import models
from checkpoint import as_bytes, setup_device, write
from configurator import UserError, configure, defaults, read_config
from daps import log_weights, solve_eta
from data import TRAIN_NOISE, ArrayDataset, example_shape, uniform_noise
from models import METHODS, build_model
from plots import draw_bars

try:
    import resource
except ImportError:  # Windows
    resource = None

only = "steps bar sampler memory"  # sections
model = "mnist cifar10 lafan imagenet"  # steps, bar: which data sets' networks
method = "daps daps_na gumbel gumbel_na grmck rloo ppo vqvae fsq"  # steps: which methods
json_path = ""  # also write all numbers to this file
picture = ""  # draw the bar section in this file
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda
n_threads = torch.get_num_threads()  # of the CPU
seconds = 4.0  # spent on each comparison, for at least three rounds
row = ""  # measure one row in this process and print it as JSON; used by bench.py itself

HERE = os.path.dirname(os.path.abspath(__file__))
PARTS = ("sampling", "teacher forcing", "decoder", "weights", "optimizer", "data")
BATCHES = {"mnist": 256, "cifar10": 16, "lafan": 8, "imagenet": 1}  # N


# ---------------------------------------------------------------------------------------------
# measuring


def synchronize():
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def stopwatch(function):
    """The function's result and the seconds it took."""
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return result, time.perf_counter() - start


def medians(*functions):
    """Median seconds of each function, run in alternation after one warm-up call."""
    times = [[] for _ in functions]
    for function in functions:
        function()
    start = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - start < seconds:
        for function, taken in zip(functions, times, strict=True):
            taken.append(stopwatch(function)[1])
    return [statistics.median(taken) for taken in times]


def peak_memory():
    """Peak memory of the GPU, or else of this process, in MiB; 0 if unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if not resource:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes on macOS, KiB elsewhere


def memory_of(step):
    """What the first step adds to the peak memory, in MiB."""
    before = peak_memory()
    step()
    return peak_memory() - before


class Products(TorchDispatchMode):
    """Records every matrix product and convolution that runs under it. Fused attention counts as
    the plain products it consists of, without the mask: two forward, four backward."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()  # (name, operands): how often

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.add(name, *args[:2])
        elif name in ("addmm", "baddbmm"):
            self.add(name.replace("add", ""), *args[1:3])
        elif name in ("convolution", "convolution_backward"):
            self.add(name, *args)
        elif name.startswith("_scaled_dot_product"):
            backward = "backward" in name
            q, k, v = (t.flatten(0, 1) for t in args[backward : backward + 3])
            scores = q.new_empty(len(q), q.size(1), k.size(1), device="meta")
            self.add("bmm", q, k.mT)  # forward: scores; backward: their gradient
            self.add("bmm", scores, v)  # forward: output; backward: gradient of queries
            if backward:
                self.add("bmm", scores.mT, q)  # gradient of keys
                self.add("bmm", scores.mT, q)  # gradient of values
        return function(*args, **(kwargs or {}))

    def add(self, name, *args):
        operands = tuple(
            (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else repr(a)
            for a in args
        )
        self.calls[name, operands] += 1

    def replay(self):
        """A function that repeats all recorded calls on random numbers."""
        calls = []
        for (name, operands), n in self.calls.items():
            args = [random(*a) if isinstance(a, tuple) else ast.literal_eval(a) for a in operands]
            if name == "convolution":
                args[2] = None  # adding the bias is not a product
            if name == "convolution_backward":
                args[3], args[10] = None, [*args[10][:2], False]
            out = {"out": getattr(torch, name)(*args)} if name in ("mm", "bmm") else {}
            calls.append((getattr(torch.ops.aten, name), args, out, n))

        def run():
            for function, args, out, n in calls:
                for _ in range(n):
                    function(*args, **out)

        return run


def random(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()


# ---------------------------------------------------------------------------------------------
# training steps


def settings_of(dataset, method):
    """Settings of train.py and config/<dataset>_<method>.py; without that file, those of DAPS."""
    path = os.path.join(HERE, "config", f"{dataset}_{method}.py")
    if not os.path.exists(path):
        path = os.path.join(HERE, "config", f"{dataset}_daps.py")
    settings = defaults(os.path.join(HERE, "train.py"))
    return settings | {key: value for key, value, _ in read_config(path)} | {"method": method}


def make(dataset, method, n=0, **changes):
    """A model and a function that trains it for one step on n random examples."""
    torch.manual_seed(0)
    n = n or BATCHES[dataset]
    settings = settings_of(dataset, method)
    x_shape = changes.pop("x_shape", example_shape(dataset, settings["image_size"]))
    net = build_model(settings | changes, x_shape).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x = torch.rand(n, *x_shape, device=device).round()
    noise = torch.rand(n, *net.noise_shape, device=device)
    beta = torch.tensor(0.1, device=device)

    def step():
        for epoch in range(net.n_epochs):
            loss, _ = net(x, beta, noise=noise, **({"epoch": epoch} if epoch else {}))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return net, step


def steps_row(dataset, method):
    """Time, roofline and memory of a training step."""
    _, step = make(dataset, method)
    memory = memory_of(step)
    products = Products()
    with products:
        step()
    taken, roofline = medians(step, products.replay())
    times = {"ms": 1e3 * taken, "roofline_ms": 1e3 * roofline, "ratio": taken / roofline}
    return times | {"MiB": memory}


def bar_row(dataset):
    """The parts of a DAPS step, in milliseconds. Its two losses share no parameters, so separate
    backward passes cost nothing extra."""
    net, _ = make(dataset, "daps")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    encoder, decoder, K, N = net.encoder, net.decoder, net.n_samples, BATCHES[dataset]
    images = torch.randint(256, (256, *example_shape(dataset, 256)), dtype=torch.uint8)
    data = ArrayDataset("noise", images, None, images, None, 255).to(device)
    steps = []

    def timed(part, function):
        result, taken = stopwatch(function)
        steps[-1][part] += taken
        return result

    def read():
        x = data.standardise(data.train_batch(0, len(steps), N))
        return x, uniform_noise(TRAIN_NOISE, 0, len(steps), N, net.noise_shape, device=device)

    def weigh(log_px, log_q):
        eta = solve_eta(log_px, log_q, 0.1, net.ess_target)
        return log_weights(log_px, log_q, eta, 0.1).exp()

    def step():
        steps.append(dict.fromkeys(PARTS, 0.0))
        x, noise = timed("data", read)
        patches = timed("teacher forcing", lambda: encoder.patch_encoder(x))
        z = timed("sampling", lambda: encoder.sample_codes(patches.detach(), K, noise))
        log_q = timed("teacher forcing", lambda: encoder.score(patches, z)[0].sum(dim=-1))
        log_px = timed("decoder", lambda: decoder.log_prob(x, z))
        w = timed("weights", lambda: weigh(log_px, log_q))
        timed("teacher forcing", lambda: ((1 / K - w) * log_q).sum(dim=1).mean().backward())
        timed("decoder", lambda: (-log_px.mean()).backward())
        timed("optimizer", lambda: (optimizer.step(), optimizer.zero_grad()))

    medians(step)
    return {part: 1e3 * statistics.median(times[part] for times in steps[1:]) for part in PARTS}


def memory_row(method, n_tokens, recompute):
    """Memory of a step of the ImageNet model on 2 images of n_tokens patches of 8 x 8 pixels."""
    side = 8 * math.isqrt(n_tokens)
    changes = dict(n_tokens=n_tokens, recompute=recompute, x_shape=(3, side, side))
    _, step = make("imagenet", method, n=2, **changes)
    return {"MiB": memory_of(step)}


# ---------------------------------------------------------------------------------------------
# the sampler


def encoder_of(n_tokens, vocab_size):
    """The autoregressive encoder of CIFAR-10 (the same as ImageNet's), with codes of any size."""
    torch.manual_seed(0)
    settings = settings_of("cifar10", "daps")
    size = (settings[key] for key in ("width", "n_heads", "n_layers", "mlp_ratio"))
    return models.AutoregressiveEncoder((3, 32, 32), n_tokens, vocab_size, *size).to(device)


@torch.no_grad()
def sample_without_cache(encoder, patches, n_samples, noise):
    """The same as encoder.sample_codes, but the whole prefix is recomputed for every token."""
    N, B = len(patches), encoder.n_tokens
    memory, query = encoder.start(patches)
    z = patches.new_full((N, n_samples, B + 1), encoder.vocab_size, dtype=torch.long)
    for t in range(B):
        h = encoder.embed(z[..., : t + 1]) + query[..., : t + 1, :]
        for block, kv in zip(encoder.blocks, memory, strict=True):
            h = block(h, kv)
        logits = encoder.read_out(encoder.norm(h[:, :, -1]), t)  # (N, K, V)
        z[..., t + 1 : t + 2] = models.draw(logits, noise[..., t : t + 1])
    return z[..., 1:]


def sampler_row(N, K, B, V):
    """Tokens per second, with our cache and without."""
    encoder = encoder_of(B, V)
    patches, noise = torch.randn(N, B, 128, device=device), torch.rand(N, K, B, device=device)
    cached, prefix = medians(
        lambda: encoder.sample_codes(patches, K, noise),
        lambda: sample_without_cache(encoder, patches, K, noise),
    )
    return {"cached": N * K * B / cached, "prefix": N * K * B / prefix}


def choosing_row(dataset):
    """The share of sampling time spent on noise, softmax and selection."""
    net, _ = make(dataset, "daps")
    encoder, N, (K, B) = net.encoder, BATCHES[dataset], net.noise_shape
    patches = torch.randn(N, B, encoder.head.in_features, device=device)
    logits = torch.randn(N, K, encoder.vocab_size, device=device)

    def noise():
        return uniform_noise(TRAIN_NOISE, 0, 0, N, (K, B), device=device)

    def choose():
        u = noise()
        for t in range(B):
            models.draw(logits, u[..., t : t + 1])

    sampling, choosing = medians(lambda: encoder.sample_codes(patches, K, noise()), choose)
    return {"share": choosing / sampling}


def growth_row(B):
    """Milliseconds per token, for 8 codes of each of 2 examples."""
    encoder = encoder_of(B, 1024)
    patches, noise = torch.randn(2, B, 128, device=device), torch.rand(2, 8, B, device=device)
    (taken,) = medians(lambda: encoder.sample_codes(patches, 8, noise))
    return {"ms_per_token": 1e3 * taken / B}


# ---------------------------------------------------------------------------------------------
# sections: each prints its table and returns its rows


def measure(*words):
    """One row, measured in its own process."""
    words = " ".join(map(str, words))
    options = [f"--{key}={globals()[key]}" for key in ("device", "seconds", "n_threads")]
    command = [sys.executable, os.path.abspath(__file__), *options, f"--row={words}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(n_threads)}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise UserError(f"bench.py --row={words!r} failed; its own error is above")
    return json.loads(done.stdout.splitlines()[-1])


def steps():
    print("A training step: milliseconds, over its roofline, memory")
    print(f"{'model, method':22}     N         ms   roofline   ratio      MiB")
    rows = {}
    for dataset, name in itertools.product(model.split(), method.split()):
        label = f"{dataset} {name}"
        if dataset == "imagenet" and name in ("gumbel", "grmck"):
            print(f"{label:22}  {'not run':>13}")  # memory grows with B squared
            continue
        r = rows[label] = measure("steps", dataset, name)
        print(f"{label:22}  {BATCHES[dataset]:4}  {r['ms']:9.1f}  {r['roofline_ms']:9.1f}", end="")
        print(f"  {r['ratio']:6.2f}  {r['MiB']:7,.0f}")
    return rows


def bar():
    print("A training step of DAPS: its parts in milliseconds")
    print(f"{'model':22}", *(f"{part:>15}" for part in PARTS), sep="  ")
    rows = {}
    for dataset in model.split():
        r = rows[dataset] = measure("bar", dataset)
        print(f"{dataset:22}", *(f"{r[part]:15.1f}" for part in PARTS), sep="  ")
    if picture:
        write(picture, as_bytes(Image.Image.save, draw_bars(rows), "PNG"))
        print(f"drawn in {picture}")
    return rows


def sampler():
    print("Sampling 16 x 8 codes of 64 tokens, V = 512")
    rows = measure("sampler", 16, 8, 64, 512)
    for name, label in (("cached", "with our cache"), ("prefix", "prefix recomputed every token")):
        ratio = rows["cached"] / rows[name]
        print(f"{label:42}  {rows[name]:11,.0f} tokens/s  {ratio:7.1f}x the time")
    for dataset in ("mnist", "cifar10"):
        share = rows[f"choosing, {dataset}"] = measure("choosing", dataset)["share"]
        print(f"{f'noise, softmax and selection, {dataset}':42}  {share:8.1%} of the time")
    print("Milliseconds per token, 2 x 8 codes, V = 1,024")
    rows["growth"] = {}
    for B in (8, 64, 256, 1024):
        taken = rows["growth"][B] = measure("growth", B)["ms_per_token"]
        print(f"{f'B = {B}':42}  {taken:20.2f}")
    return rows


def memory():
    print("Memory of a step of the ImageNet model, 2 examples, in MiB, and over that of Gumbel")
    names = "daps", "daps, recompute", "gumbel"
    print(f"{'B':6}", *(f"{name:>16}" for name in names), f"{'ratios':>16}", sep="  ")
    rows = {}
    for B in (64, 256, 1024):
        ways = ("daps", B, 0), ("daps", B, 2), ("gumbel", B, 0)
        found = [measure("memory", *way)["MiB"] for way in ways]
        rows[B] = dict(zip(names, found, strict=True))
        ratios = f"{found[0] / found[2]:.2f}  {found[1] / found[2]:.2f}"
        print(f"{B:<6}", *(f"{value:16,.0f}" for value in found), f"{ratios:>16}", sep="  ")
    return rows


ROWS = {"steps": steps_row, "bar": bar_row, "memory": memory_row}
ROWS |= {"sampler": sampler_row, "choosing": choosing_row, "growth": growth_row}
SECTIONS = {section.__name__: section for section in (steps, bar, sampler, memory)}

if __name__ == "__main__":
    _, unused = configure(globals(), sys.argv[1:])
    if unused:
        raise UserError(f"{unused[0]}: neither a config file (*.py) nor --key=value")
    for key, known in (("only", SECTIONS), ("model", BATCHES), ("method", METHODS)):
        for word in globals()[key].split():
            if word not in known:
                raise UserError(f"{key} has {word!r}, must have some of: {', '.join(known)}")
    if n_threads < 1:
        raise UserError(f"n_threads is {n_threads}, must be at least 1")
    setup_device(device)
    torch.set_num_threads(n_threads)
    if row:
        name, *words = row.split()
        words = [int(word) if word.isdigit() else word for word in words]
        print(json.dumps(ROWS[name](*words)))
    else:
        results = {}
        for name in only.split():
            results[name] = SECTIONS[name]()
            print()
            if json_path:  # after every section: an interruption keeps the finished ones
                write(json_path, json.dumps(results, indent=2) + "\n")
