"""What a training step costs, in time and memory, and how far that is from what the machine can do.

    python bench.py                                 all sections, ten minutes on two CPU cores
    python bench.py --only=steps --model=mnist      one section, on one of the models
    python bench.py --json_path=bench.json --picture=bench.png

Sections, as chosen by --only:
    steps      a training step of each method: time, memory, ratio to the roofline
    bar        where the time of a step of DAPS goes (drawn into --picture)
    sampler    tokens per second, cached and not; what choosing tokens costs; growth with B
    memory     a step of autoregressive DAPS and Gumbel as codes get longer
    machine    eager and compiled; 1 and 2 threads; 1 and 2 processes
    pipeline   photographs read per second, of those in data_dir/imagenet

The roofline of a step is the time of its own matrix products and convolutions alone: recorded in a
step, forward and backward, and repeated at the same shapes, strides and dtype on the same threads.
What is compared is run by turns (A, B, A, B, ...) and the numbers are medians, so that a machine
whose speed comes and goes treats all alike. Every row has a process of its own, for its memory.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import ast
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import models
from configurator import configure, die, read_config
from daps import log_weights, solve_eta
from data import (
    DATA_DIR,
    TRAIN_NOISE,
    DataError,
    Dataset,
    example_shape,
    load_dataset,
    uniform_noise,
)
from eval import (
    AUTOREGRESSIVE,
    COLOURS,
    INK,
    METHODS,
    PAPER,
    build_model,
    check_device,
    font,
    keep_memory,
    peak_memory,
)

only = "steps bar sampler memory machine pipeline"  # sections
model = "mnist cifar10 lafan imagenet"  # steps, bar: networks of which data sets
method = "daps daps_na gumbel gumbel_na grmck rloo ppo vqvae fsq"  # steps: which methods
json_path = ""  # also write all numbers into this file
picture = ""  # draw the bar into this file
data_dir = DATA_DIR  # pipeline: where imagenet/ is
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda
n_threads = torch.get_num_threads()  # of the CPU
seconds = 4.0  # spent on each comparison; three rounds are made in any case
row = ""  # print one row alone, as JSON: what the processes are called with

PARTS = ("sampling", "teacher forcing", "decoder", "weights", "optimizer", "data")
BATCHES = {"mnist": 256, "cifar10": 16, "lafan": 8, "imagenet": 1}  # N


# ---------------------------------------------------------------------------------------------
# measuring


def on_cuda():
    return torch.device(device).type == "cuda"


def synchronize():
    if on_cuda():
        torch.cuda.synchronize()


def medians(*functions):
    """Seconds that each function takes, run by turns; once before, to warm up."""
    times = [[] for _ in functions]
    for function in functions:
        function()
    began = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - began < seconds:
        for function, taken in zip(functions, times, strict=True):
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class Products(TorchDispatchMode):
    """Takes down every matrix product and convolution that runs under it. Attention in one kernel
    counts as the plain products it is made of, without its mask: two forward, four backward."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.add(name, *args[:2])
        elif name in ("addmm", "baddbmm"):
            self.add(name.replace("add", ""), *args[1:3])
        elif name in ("convolution", "convolution_backward"):
            self.add(name, *args)
        elif name.startswith("_scaled_dot_product"):
            back = "backward" in name
            q, k, v = (t.flatten(0, 1) for t in args[back : back + 3])
            scores = q.new_empty(len(q), q.size(1), k.size(1), device="meta")
            self.add("bmm", q, k.mT)  # forward: scores; backward: of the output, to those
            self.add("bmm", scores, v)  # forward: the output; backward: to queries
            if back:
                self.add("bmm", scores.mT, q)  # to keys
                self.add("bmm", scores.mT, q)  # to values
        return function(*args, **(kwargs or {}))

    def add(self, name, *args):
        shape = tuple(
            (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else repr(a)
            for a in args
        )
        self.seen[name, shape] += 1

    def replay(self):
        """A function that computes all of it once more, on other numbers."""
        calls = []
        for (name, shape), n in self.seen.items():
            args = [operand(*a) if isinstance(a, tuple) else ast.literal_eval(a) for a in shape]
            if name == "convolution":
                args[2] = None  # the bias is no product
            if name == "convolution_backward":
                args[3], args[10] = None, [*args[10][:2], False]
            out = {"out": getattr(torch, name)(*args)} if name in ("mm", "bmm") else {}
            calls.append((getattr(torch.ops.aten, name), args, out, n))

        def run():
            for function, args, out, n in calls:
                for _ in range(n):
                    function(*args, **out)

        return run


def operand(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()


# ---------------------------------------------------------------------------------------------
# steps


def settings_of(dataset, name):
    """The settings of config/<dataset>_<method>.py; where there is none, those of DAPS."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config")
    path = os.path.join(folder, f"{dataset}_{name}.py")
    path = path if os.path.exists(path) else os.path.join(folder, f"{dataset}_daps.py")
    settings = {"aligned": False, "recompute": 0, "resnet_encoder": False, "eta_update": "solve"}
    settings |= {"decoder_layers": 2, "ppo_epochs": 4, "ppo_clip": 0.2, "mc_samples": 100}
    return settings | {key: value for key, value, _ in read_config(path)} | {"method": name}


def make(dataset, name, n=0, **changes):
    """A model and a function that makes one training step of it, on random data."""
    torch.manual_seed(0)
    x_shape = changes.pop("x_shape", example_shape(dataset, 256))
    net = build_model(settings_of(dataset, name) | changes, x_shape).to(device)
    wrapped = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    n = n or BATCHES[dataset]
    x = torch.rand(n, *x_shape, device=device).round()
    noise = torch.rand(n, *net.noise_shape, device=device)

    def step():
        for epoch in range(getattr(net, "n_epochs", 1)):
            options = {"epoch": epoch} if epoch else {}
            loss, _ = wrapped(x, torch.tensor(0.1, device=device), noise=noise, **options)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return net, step


def memory_of(step):
    """What the first step adds to the peak of this process, in MiB."""
    before = peak_memory(device)
    step()
    return peak_memory(device) - before


def steps_row(dataset, name):
    """Time, memory and roofline of a training step."""
    _, step = make(dataset, name)
    memory = memory_of(step)
    products = Products()
    with products:
        step()
    taken, roofline = medians(step, products.replay())
    return {
        "ms": 1e3 * taken,
        "roofline_ms": 1e3 * roofline,
        "ratio": taken / roofline,
        "MiB": memory,
    }


def bar_row(dataset):
    """The parts of a DAPS step, in milliseconds. Its two losses share no parameters, so that each
    can go backward on its own, which makes the whole no dearer."""
    net, _ = make(dataset, "daps")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    encoder, decoder, K, N = net.encoder, net.decoder, net.n_samples, BATCHES[dataset]
    images = torch.randint(256, (256, *example_shape(dataset, 256)), dtype=torch.uint8)
    data = Dataset("noise", images, None, images, None, 255)
    steps = []

    def timed(part, function):
        synchronize()
        start = time.perf_counter()
        result = function()
        synchronize()
        steps[-1][part] += time.perf_counter() - start
        return result

    def read():
        x = data.train_batch(0, len(steps), N).to(device)
        return x, uniform_noise(TRAIN_NOISE, 0, len(steps), N, net.noise_shape).to(device)

    def weigh(log_px, log_q):
        eta = solve_eta(log_px, log_q, 0.1, net.ess_target)
        return log_weights(log_px, log_q, eta, 0.1).exp()

    def step():
        steps.append(dict.fromkeys(PARTS, 0.0))
        x, noise = timed("data", read)
        patches = timed("teacher forcing", lambda: encoder.patch_encoder(x))
        z = timed("sampling", lambda: encoder.sample(patches.detach(), K, noise))
        (log_q,) = timed("teacher forcing", lambda: encoder.score(patches, z))
        log_px = timed("decoder", lambda: decoder.log_prob(x, z))
        w = timed("weights", lambda: weigh(log_px, log_q))
        timed("teacher forcing", lambda: ((1 / K - w) * log_q).sum(dim=1).mean().backward())
        timed("decoder", lambda: (-log_px.mean()).backward())
        timed("optimizer", lambda: (optimizer.step(), optimizer.zero_grad()))

    medians(step)
    return {part: 1e3 * statistics.median(times[part] for times in steps[1:]) for part in PARTS}


# ---------------------------------------------------------------------------------------------
# the sampler


def encoder_of(n_tokens, vocab_size):
    """An autoregressive encoder as for CIFAR-10 and ImageNet, with codes of any length."""
    torch.manual_seed(0)
    size = dict(width=128, n_heads=4, n_layers=2, mlp_ratio=4)
    return models.AutoregressiveEncoder((3, 32, 32), n_tokens, vocab_size, **size).to(device)


@torch.no_grad()
def sample_without_cache(encoder, patches, n_samples, noise):
    """What encoder.sample does, with the prefix computed anew for every token."""
    N, B = len(patches), encoder.n_tokens
    memory, query = encoder.start(patches)
    z = patches.new_full((N, n_samples, B + 1), encoder.vocab_size, dtype=torch.long)
    for t in range(B):
        h = encoder.embed(z[..., : t + 1]) + query[..., : t + 1, :]
        for block, kv in zip(encoder.blocks, memory, strict=True):
            h = block(h, kv)
        logits = encoder.head(encoder.norm(h[:, :, -1]))  # (N, K, V)
        z[..., t + 1 : t + 2] = models.draw(logits, noise[..., t : t + 1])
    return z[..., 1:]


def hugging_face(n_tokens, vocab_size, n_examples, n_samples):
    """A function that samples codes from BART of the same size; None if it is not installed."""
    try:
        from transformers import BartConfig, BartForConditionalGeneration
    except ImportError:
        return None
    sizes = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 512}
    config = BartConfig(vocab_size=vocab_size, d_model=128, max_position_embeddings=2048, **sizes)
    bart = BartForConditionalGeneration(config).to(device).eval()
    x = torch.randint(4, vocab_size, (n_examples, n_tokens), device=device)
    options = dict(do_sample=True, top_k=0, num_return_sequences=n_samples, use_cache=True)
    options |= dict(min_new_tokens=n_tokens, max_new_tokens=n_tokens)
    return lambda: bart.generate(x, **options)


def sampler_row(n_examples=16, n_samples=8, n_tokens=64, vocab_size=512):
    encoder = encoder_of(n_tokens, vocab_size)
    patches = torch.randn(n_examples, n_tokens, 128, device=device)
    noise = torch.rand(n_examples, n_samples, n_tokens, device=device)
    ways = {
        "ours": lambda: encoder.sample(patches, n_samples, noise),
        "prefix": lambda: sample_without_cache(encoder, patches, n_samples, noise),
        "hugging_face": hugging_face(n_tokens, vocab_size, n_examples, n_samples),
    }
    ways = {name: way for name, way in ways.items() if way}
    return dict(zip(ways, medians(*ways.values()), strict=True)) | {
        "tokens": n_examples * n_samples * n_tokens
    }


def choosing_row(dataset):
    """The share of noise, softmax and selection in sampling."""
    net, _ = make(dataset, "daps")
    encoder, N, (K, B) = net.encoder, BATCHES[dataset], net.noise_shape
    patches = torch.randn(N, B, net.encoder.head.in_features, device=device)
    logits = torch.randn(N, K, encoder.vocab_size, device=device)

    def noise():
        return uniform_noise(TRAIN_NOISE, 0, 0, N, (K, B)).to(device)

    def choose():
        u = noise()
        for t in range(B):
            models.draw(logits, u[..., t : t + 1])

    sampling, choosing = medians(lambda: encoder.sample(patches, K, noise()), choose)
    return {"share": choosing / sampling}


def growth_row(n_tokens):
    """Milliseconds per token of 8 codes for each of 2 examples."""
    encoder = encoder_of(n_tokens, 1024)
    patches, noise = torch.randn(2, n_tokens, 128), torch.rand(2, 8, n_tokens)
    patches, noise = patches.to(device), noise.to(device)
    (taken,) = medians(lambda: encoder.sample(patches, 8, noise))
    return {"ms_per_token": 1e3 * taken / n_tokens}


# ---------------------------------------------------------------------------------------------
# memory, machine, pipeline


def memory_row(name, n_tokens, recompute):
    """Peak of a step of the ImageNet model on 2 images that make n_tokens patches of 8 x 8."""
    side = 8 * math.isqrt(n_tokens)
    changes = dict(n_tokens=n_tokens, recompute=recompute, x_shape=(3, side, side))
    _, step = make("imagenet", name, n=2, **changes)
    return {"MiB": memory_of(step)}


def time_row(dataset, name):
    """A step, shared by all processes."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_cuda() else "gloo")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    _, step = make(dataset, name, n=BATCHES[dataset] // world_size)
    for _ in range(3):
        step()
    start, n = time.perf_counter(), 10
    for _ in range(n):
        step()
    synchronize()
    return {"ms": 1e3 * (time.perf_counter() - start) / n}


def compile_row(dataset, name):
    _, eager = make(dataset, name)
    net, compiled = make(dataset, name)
    net.compile()
    if name in AUTOREGRESSIVE:
        net.encoder.compile_sampler()
    eager_s, compiled_s = medians(eager, compiled)
    return {"eager_ms": 1e3 * eager_s, "compiled_ms": 1e3 * compiled_s}


def pipeline_row(n_workers, n=240, batch_size=16):
    """Photographs per second: bare decoding by Pillow on one core, and batches of ours."""
    try:
        data = load_dataset("imagenet", data_dir)
    except DataError as fault:
        return {"fault": str(fault)}
    files = [data.files["train"][i % data.n_train] for i in range(n)]

    def bare():
        for path in files:
            image = Image.open(path)
            image.draft("RGB", (256, 256))
            image.convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)

    def ours():  # with the start of the workers
        for _ in data.train_batches(0, 0, n // batch_size, batch_size, 0, 1, n_workers):
            pass

    bare_s, ours_s = medians(bare, ours)
    return {"bare_per_s": n / bare_s, "ours_per_s": n / ours_s}


# ---------------------------------------------------------------------------------------------
# sections: each prints its table and returns its rows


def call(*words, threads=0, processes=1):
    """One row, measured by a process of its own, or by several that share the batch."""
    options = [f"--{key}={globals()[key]}" for key in ("device", "data_dir", "seconds")]
    options += [f"--row={' '.join(map(str, words))}", f"--n_threads={threads or n_threads}"]
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(runner if processes > 1 else []), __file__, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads or n_threads)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        die(f"bench.py --row={' '.join(map(str, words))} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def show(*cells):
    print("  ".join(f"{cell:{'<' if i == 0 else '>'}{w}}" for i, (cell, w) in enumerate(cells)))


def steps():
    print("A training step: milliseconds, over its roofline, memory")
    show(("model, method", 22), ("N", 4), ("ms", 9), ("roofline", 9), ("ratio", 6), ("MiB", 7))
    rows = {}
    for dataset in model.split():
        for name in method.split():
            if dataset == "imagenet" and name in ("gumbel", "grmck"):
                show((f"{dataset} {name}", 22), ("not run", 13))  # see Limits in the README
                continue
            r = rows[f"{dataset} {name}"] = call("steps", dataset, name)
            numbers = (f"{r['ms']:.1f}", 9), (f"{r['roofline_ms']:.1f}", 9)
            numbers += (f"{r['ratio']:.2f}", 6), (f"{r['MiB']:,.0f}", 7)
            show((f"{dataset} {name}", 22), (BATCHES[dataset], 4), *numbers)
    return rows


def bar():
    print("A training step of DAPS: its parts in milliseconds")
    show(("model", 22), *((part, 15) for part in PARTS))
    rows = {}
    for dataset in model.split():
        rows[dataset] = call("bar", dataset)
        show((dataset, 22), *((f"{rows[dataset][part]:.1f}", 15) for part in PARTS))
    if picture:
        draw_bar(rows).save(picture)
        print(f"drawn in {picture}")
    return rows


def draw_bar(rows, size=(760, 40)):
    """A bar for each model, its parts as shares of the step."""
    width, height = size
    page = Image.new("RGB", (width, height * (len(rows) + 1)), PAPER)
    pen = ImageDraw.Draw(page)
    for i, (dataset, parts) in enumerate(rows.items()):
        total, left, top = sum(parts.values()), 150, i * height + 6
        label = f"{dataset}, {total:,.0f} ms"
        pen.text((8, top + height / 2 - 6), label, INK, font(), anchor="lm")
        for part, colour in zip(PARTS, COLOURS, strict=False):
            right = left + (width - 160) * parts[part] / total
            pen.rectangle((left, top, right, top + height - 12), colour)
            if right - left > 40:
                middle = ((left + right) / 2, top + height / 2 - 6)
                pen.text(middle, f"{parts[part] / total:.0%}", PAPER, font(), anchor="mm")
            left = right
    left = 150
    for part, colour in zip(PARTS, COLOURS, strict=False):
        y = page.height - height / 2
        pen.rectangle((left, y - 5, left + 10, y + 5), colour)
        pen.text((left + 15, y), part, INK, font(), anchor="lm")
        left += 30 + pen.textlength(part, font())
    return page


def sampler():
    r = call("sampler")
    print("Sampling 16 x 8 codes of 64 tokens, V = 512")
    for name, words in (
        ("ours", "with our cache"),
        ("prefix", "the prefix computed anew for every token"),
        ("hugging_face", "BART of the same size, Hugging Face"),
    ):
        if name in r:
            rate = f"{r['tokens'] / r[name]:,.0f} tokens/s"
            show((words, 42), (rate, 20), (f"{r[name] / r['ours']:.1f}x the time", 16))
        else:
            show((words, 42), ("not installed", 20))
    for dataset in ("mnist", "cifar10"):
        r[f"choosing, {dataset}"] = share = call("choosing", dataset)["share"]
        show((f"noise, softmax and selection, {dataset}", 42), (f"{share:.1%} of the time", 20))
    rows = {B: call("growth", B) for B in (8, 64, 256, 1024)}
    print("Milliseconds per token, 2 x 8 codes, V = 1,024")
    for B, numbers in rows.items():
        show((f"B = {B}", 42), (f"{numbers['ms_per_token']:.2f}", 20))
    return r | {"growth": rows}


def memory():
    print("Memory of a step of the ImageNet model, 2 examples, in MiB, and over that of Gumbel")
    names = "daps", "daps, recompute", "gumbel"
    show(("B", 6), *((name, 16) for name in names), ("ratios", 16))
    rows = {}
    for B in (64, 256, 1024):
        ways = ("daps", B, 0), ("daps", B, 2), ("gumbel", B, 0)
        found = [call("memory", *way)["MiB"] for way in ways]
        rows[B] = dict(zip(names, found, strict=True))
        ratios = f"{found[0] / found[2]:.2f}  {found[1] / found[2]:.2f}"
        show((B, 6), *((f"{value:,.0f}", 16) for value in found), (ratios, 16))
    return rows


def machine():
    print("A step of DAPS on the MNIST model, in milliseconds")
    r = call("compile", "mnist", "daps")
    show(("eager, compiled", 42), (f"{r['eager_ms']:.1f}", 9), (f"{r['compiled_ms']:.1f}", 9))
    ways = {"1 thread": (1, 1), "2 threads": (2, 1), "2 processes of 1 thread": (1, 2)}
    if on_cuda() and torch.cuda.device_count() < 2:
        del ways["2 processes of 1 thread"]
    times = {name: [] for name in ways}
    for _ in range(3):
        for name, (threads, processes) in ways.items():
            found = call("time", "mnist", "daps", threads=threads, processes=processes)
            times[name].append(found["ms"])
    for name, found in times.items():
        r[name] = statistics.median(found)
        show((name, 42), (f"{r[name]:.1f}", 9))
    return r


def pipeline():
    print("Photographs per second: decoded and resized by Pillow on one core; our batches")
    rows = {}
    for n_workers in (1, 2):
        r = rows[n_workers] = call("pipeline", n_workers)
        if "fault" in r:
            print(f"not measured: {r['fault']}")
            break
        bare, ours = r["bare_per_s"], r["ours_per_s"]
        label = f"{n_workers} worker{'s' if n_workers > 1 else ''}"
        show((label, 22), (f"{bare:.0f}", 9), (f"{ours:.0f}", 9), (f"{ours / bare:.2f}x", 9))
    return rows


ROWS = {"steps": steps_row, "bar": bar_row, "sampler": sampler_row, "growth": growth_row}
ROWS |= {
    "choosing": choosing_row,
    "memory": memory_row,
    "time": time_row,
    "compile": compile_row,
    "pipeline": pipeline_row,
}
SECTIONS = {f.__name__: f for f in (steps, bar, sampler, memory, machine, pipeline)}

if __name__ == "__main__":
    _, unused = configure(globals(), sys.argv[1:])
    if unused:
        die(f"{unused[0]}: neither a config file (*.py) nor --key=value")
    for key, known in (("only", SECTIONS), ("model", BATCHES), ("method", METHODS)):
        for word in globals()[key].split():
            if word not in known:
                die(f"{key} has {word!r}, must have some of: {', '.join(known)}")
    if n_threads < 1:
        die(f"n_threads is {n_threads}, must be at least 1")
    try:
        check_device(device)
    except ValueError as fault:
        die(fault)
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if on_cuda():
        torch.cuda.set_device(device)
    torch.set_num_threads(n_threads)
    keep_memory()
    if row:
        name, *words = row.split()
        words = [int(word) if word.isdigit() else word for word in words]
        found = ROWS[name](*words)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found))
    else:
        results = {}
        for name in only.split():
            results[name] = SECTIONS[name]()
            print()
            if json_path:  # what is measured is kept, whatever comes
                with open(json_path, "w") as file:
                    json.dump(results, file, indent=2)
