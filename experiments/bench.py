"""A training step of every method, side by side: time, memory, arithmetic.

    python experiments/bench.py --datasets=mnist                    a minute or two on a CPU
    python experiments/bench.py                                     all; ImageNet takes far longer
    python experiments/bench.py --datasets=imagenet --methods=daps --batch_size=8

The networks are those of config/<dataset>_<method>.py; settings of train.py on the command line
change all of them. x is made up. A step is what train.py runs for a batch (without accumulate): on
GPUs compiled, under autocast, with the compiled sampler.

    ms, examples/s   medians over rounds that run every method once: what slows the machine down
                     slows them all
    MiB              the most that the tensors made in the first step take up at once: activations,
                     gradients, the state of AdamW, the sampler's buffers
    GFLOP            matrix products, attention and convolutions of a step, 2 per multiply-add
    x roofline       ms over the time of as many FLOP in large matrix products, timed in the same
                     rounds
"""

import os
import statistics
import sys
import time
import weakref

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from build import METHODS, build_model  # noqa: E402
from configurator import UserError, configure, settings_block  # noqa: E402
from data import TRAIN_NOISE, uniform_noise  # noqa: E402
from run import setup_device  # noqa: E402
from sampler import CompiledSampler  # noqa: E402

datasets = "mnist cifar10 imagenet"  # which
methods = ""  # which; empty: all that have a config file
seconds = 20.0  # of rounds for each data set, at least three rounds
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda

CPU_BATCH = {"mnist": 256, "cifar10": 16, "imagenet": 1}  # N; on GPUs that of the config file


def settings_of(dataset, method, device, words=()):
    """Settings of train.py, config/<dataset>_<method>.py and words of the command line."""
    constants, _ = settings_block(f"{ROOT}/train.py")
    config, on_gpu = f"{ROOT}/config/{dataset}_{method}.py", device.startswith("cuda")
    batch = [] if on_gpu else [f"--batch_size={CPU_BATCH[dataset]}"]
    settings, unused = configure(constants, [config, *batch, *words], may_be_zero=constants)
    if unused:
        raise UserError(f"{unused[0]}: neither a config file (*.py) nor --key=value")
    can_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    settings["dtype"] = settings["dtype"] or ("bfloat16" if can_bfloat16 else "float32")
    return settings


def make_step(settings, device):
    """A function that makes one step of train.py on made-up x, and waits for it to end."""
    s, N, side = settings, settings["batch_size"], settings["image_size"]
    torch.manual_seed(0)
    shapes = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "imagenet": (3, side, side)}
    model = build_model(s, shapes[s["dataset"]]).to(device)
    if hasattr(model.encoder.head, "log_scale"):
        model.encoder.head.log_scale.requires_grad_(s["scale_lr"] > 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["lr"], fused=True)
    if s["use_compile"] and device.startswith("cuda") and s["method"] not in ("gumbel", "grmck"):
        model.compile()
        if model.encoder.autoregressive:
            model.encoder.sampler = CompiledSampler(cuda_graphs=s["cuda_graphs"])
    is_bfloat16 = s["dtype"] == "bfloat16"
    autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=is_bfloat16)
    x = torch.rand(N, *shapes[s["dataset"]], device=device).round()  # binary, as MNIST must be
    beta, numbers = torch.full((), 0.1, device=device), torch.arange(N, device=device)

    def step():
        noise = uniform_noise(TRAIN_NOISE, 0, 0, numbers, model.noise_shape)
        for epoch in range(model.n_epochs):
            with autocast:
                loss, _ = model(x, beta, noise=noise, **({"epoch": epoch} if epoch else {}))
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            optimizer.step()
            optimizer.zero_grad()
        return norm.item()  # the one wait for the GPU

    return step


class Memory(TorchDispatchMode):
    """Follows the bytes of all tensors that are made under it: held now, and at most."""

    def __init__(self):
        super().__init__()
        self.known, self.held, self.peak = set(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.note((args, kwargs), counts=False)  # made before, if not known yet
        result = function(*args, **(kwargs or {}))
        self.note(result, counts=True)
        return result

    def note(self, tree, counts):
        for storage in (t.untyped_storage() for t in tree_leaves(tree) if torch.is_tensor(t)):
            if storage._cdata not in self.known:
                size = counts * storage.nbytes()
                self.known.add(storage._cdata)
                self.held += size
                weakref.finalize(storage, self.forget, storage._cdata, size)
        self.peak = max(self.peak, self.held)

    def forget(self, storage, size):
        self.known.remove(storage)
        self.held -= size


def peak_memory(function, device):
    """The most that tensors made during a call take up at once, in MiB. On a GPU, of the second:
    the first compiles, and tries algorithms in large workspaces."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.reset_peak_memory_stats()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with Memory() as memory:
        function()
    return memory.peak / 2**20


def count_flops(function):
    """FLOP of a call, forward and backward. The counter does not know the attention kernel of CPUs;
    plain matrix products in its place are counted, those that a causal mask hides included."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        function()
    return counter.get_total_flops()


def step_flops(settings):
    """FLOP of a step: N times those for one example, counted on the CPU."""
    step = make_step(settings | {"batch_size": 1, "dtype": "float32"}, "cpu")
    step()  # the first step of VQ-VAE also looks for code vectors
    return settings["batch_size"] * count_flops(step)


def make_product(dtype, device):
    """A function that computes a large matrix product, and its FLOP."""
    n = 8192 if device.startswith("cuda") else 1024
    a, b = torch.randn(2, n, n, device=device, dtype=getattr(torch, dtype))
    return lambda: (a @ b)[0, 0].item(), 2 * n**3


def medians(functions, seconds):
    """Median seconds of each function, over rounds that call each once, after a call to warm up."""
    for function in functions:
        function()
    times, start = [[] for _ in functions], time.perf_counter()
    while len(times[-1]) < 3 or time.perf_counter() - start < seconds:
        for function, taken in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def measure(dataset, names, words, seconds, device):
    """Print the table of a data set; return the numbers of each row by its method."""
    torch._dynamo.reset()  # or shapes that differ from those of the last data set become dynamic
    every = [settings_of(dataset, name, device, words) for name in names]
    steps = [make_step(settings, device) for settings in every]
    memory = [peak_memory(step, device) for step in steps]
    N, dtype = every[0]["batch_size"], every[0]["dtype"]
    flops = [step_flops(settings) for settings in every]
    product, product_flops = make_product(dtype, device)
    *times, product_time = medians([*steps, product], seconds)
    speed = product_flops / product_time
    where = f"{device}, threads: {torch.get_num_threads()}" if device == "cpu" else device
    print(f"\n{dataset}, N = {N}, {dtype} on {where}; large products: {speed / 1e9:,.0f} GFLOP/s")
    print("method              ms  examples/s      MiB      GFLOP  x roofline")
    rows = {}
    for name, taken, size, count in zip(names, times, memory, flops, strict=True):
        rows[name] = 1e3 * taken, N / taken, size, count / 1e9, taken * speed / count
        print("{:12} {:9.1f} {:11,.0f} {:8,.0f} {:10,.1f} {:11.2f}".format(name, *rows[name]))
    return rows


if __name__ == "__main__":
    words = sys.argv[1:]
    own = [w for w in words if w[2:].split("=")[0] in ("datasets", "methods", "seconds", "device")]
    own_words = own + [w for w in words if w in ("-h", "--help")]
    configure(globals(), own_words, may_be_zero=("seconds",))
    device = setup_device(device)
    for dataset in datasets.split():
        if dataset not in CPU_BATCH:
            raise UserError(f"datasets has {dataset!r}, must have some of: {', '.join(CPU_BATCH)}")
        known = [m for m in METHODS if os.path.exists(f"{ROOT}/config/{dataset}_{m}.py")]
        names = methods.split() or known
        measure(dataset, names, [w for w in words if w not in own], seconds, device)
