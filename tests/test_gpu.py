"""The GPU path on a machine without a GPU.

FakeTensorMode computes shapes, dtypes and devices but no numbers, so a CPU build of torch can run
every forward pass on "cuda:0": a tensor left on the CPU raises, and every moment at which the CPU
would wait for the GPU is counted. Backward passes, kernels, Triton and nccl stay untested; the
tests at the end run on a GPU if there is one.
"""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import traceback
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, TINY, log_rows, motion_dataset, run_here, succeed, train_here
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import has_bfloat16, load_checkpoint, setup_device
from configurator import defaults
from data import DATASETS, TRAIN_NOISE, Dataset, glyphs, load_dataset, uniform_noise
from eval import evaluate
from models import AUTOREGRESSIVE, METHODS, VECTORS, build_model

try:
    from torch._subclasses.fake_tensor import FakeTensorMode

    LIBC10 = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libc10.so"))
    GUARDS = (ctypes.c_void_p * 18).in_dll(LIBC10, "_ZN3c104impl26device_guard_impl_registryE")
    ensure_guard = torch._C._ensureCUDADeviceGuardSet
    why_not = ""
except (ImportError, OSError, ValueError, AttributeError) as error:
    why_not = f"this torch ({torch.__version__}) cannot pretend to have a GPU: {error}"
needs_pretence = pytest.mark.skipif(bool(why_not), reason=why_not)

GPU = "cuda:0"
STAGED = 64 * 1024  # bytes that CUDA copies from any memory without waiting

# ---------------------------------------------------------------------------------------------
# a fake GPU


class Waits(TorchDispatchMode):
    """Records every moment at which the CPU would wait for the GPU, as "what, file: line of ours",
    and continues with a made-up number. FakeTensorMode refuses shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.noted, self.pinned = [], []

    def note(self, what):
        frames = traceback.extract_stack()
        line = next((f for f in reversed(frames) if os.path.dirname(f.filename) == ROOT), frames[0])
        self.noted.append(f"{what}, {os.path.basename(line.filename)}: {line.line}")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.note("read-out")
            return {torch.bool: False, torch.float32: 0.5, torch.float64: 0.5}.get(args[0].dtype, 1)
        if name == "index_put_" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.note("mask")
        if name == "_to_copy":
            target = kwargs.get("device") or args[0].device
            self.copy(args[0], torch.device(target), kwargs.get("non_blocking"))
        if name == "copy_":
            self.copy(args[1], args[0].device, args[2:] == (True,))
        return function(*args, **kwargs)

    def copy(self, source, target, non_blocking):
        """A copy to the GPU waits unless it is from pinned memory, or small."""
        quick = source.nbytes <= STAGED or any(source is t for t in self.pinned)
        sent = target.type == "cuda" and non_blocking and quick
        if target.type != source.device.type and not sent:
            self.note(f"copy of {tuple(source.shape)}")

    def pin(self, t):
        self.pinned.append(t.clone())
        return self.pinned[-1]

    def read(self, t):
        """t.tolist(), which is one wait, however long t is."""
        self.note("read-out")
        return [0.0] * len(t)


@contextlib.contextmanager
def pretended_gpu(dtype="float32"):
    """Fake tensors without gradients: a CPU build aborts if CUDA's autograd is used."""
    GUARDS[1] = GUARDS[1] or GUARDS[17]  # a CPU build has none for CUDA; MTIA's does no harm
    ensure_guard()
    waits = Waits()
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        mock.patch("torch.Tensor.pin_memory", lambda t: waits.pin(t)),
        mock.patch("torch._subclasses.fake_tensor.FakeTensor.tolist", lambda t: waits.read(t)),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        waits,
        torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        yield waits


def move(model, device=GPU):
    """model.to(device or dtype) for fake tensors: registered tensors move, others stay."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(p.to(device), requires_grad=False)
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.to(device)
    return model


SIZES = dict(vocab_size=16, width=16, n_heads=2, mlp_ratio=2, decoder_layers=1, n_samples=4)
SIZES |= dict(mc_samples=2, ppo_epochs=2, fsq_levels="4 4")
SHAPES = {  # of x, and what else is particular to the runs on it
    "mnist": ((1, 28, 28), dict(n_tokens=2)),
    "cifar10": ((3, 32, 32), dict(n_tokens=4, aligned=False, n_layers=2, vq_ema=False)),
    "imagenet": ((3, 16, 16), dict(n_tokens=4, recompute=2, eta_update="gradient")),
    "lafan": ((1, 121), dict(n_tokens=2)),
}
CASES = list(itertools.product(METHODS, SHAPES))


def settings(method, dataset, **changes):
    """Settings of a small run, for build_model."""
    own = SHAPES[dataset][1] | SIZES | dict(method=method, dataset=dataset)
    own["resnet_encoder"] = method in VECTORS and dataset == "imagenet"
    if method not in ("daps", "rloo", "ppo"):
        own["recompute"] = 0
    return defaults(os.path.join(ROOT, "train.py")) | own | changes


class FakeData(Dataset):
    """Examples as uint8; those of validation are too few for a batch."""

    name, n_train, n_val = "fake", 12, 3

    def __init__(self, shape):
        self.shape, self.mean, self.std = shape, torch.zeros(()), torch.ones(())

    def val_examples(self, index):
        return self.train_examples(index), slice(None)

    def train_examples(self, index):
        return torch.zeros(len(index), *self.shape, dtype=torch.uint8)


# How often evaluate() waits: once for each of its results that are lists or numbers, when all is
# done, and with the errors of motion, which are computed by the CPU, 2 + 2 copies per batch.
EVALUATION = 5
MOTION_BATCH = 4


@needs_pretence
@pytest.mark.parametrize("method, dataset", CASES)
def test_a_step_and_an_evaluation_stay_on_the_gpu_and_never_wait(method, dataset):
    shape, _ = SHAPES[dataset]
    for dtype in ("float32", "bfloat16"):
        with pretended_gpu(dtype) as waits:
            model = move(build_model(settings(method, dataset), shape))
            model.encoder.counting = True
            data = FakeData(shape).to(GPU)
            waits.noted.clear()
            x = data.standardise(torch.zeros(4, *shape, dtype=torch.uint8))
            noise = uniform_noise(TRAIN_NOISE, 0, 0, 4, model.noise_shape, device=GPU)
            beta = torch.full((), 0.1, device=GPU)
            assert x.is_cuda and noise.is_cuda
            for epoch in range(model.n_epochs):
                options = {"epoch": epoch} if epoch else {}
                loss, metrics = model(x, beta, noise=noise, **options)
                assert loss.is_cuda and all(value.is_cuda for value in metrics.values())
            assert all(b.is_cuda for b in model.buffers())
            assert waits.noted == []
            if dtype == "bfloat16":  # as train.py calls it, in the autocast of the steps
                _, counts = evaluate(model, data, 0.1, 4, GPU)
                assert counts is None or counts.is_cuda
                assert len(waits.noted) <= EVALUATION, waits.noted


@needs_pretence
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # by a copy of fake tensors
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("dataset", SHAPES)
def test_the_sampler_stays_on_the_gpu_in_both_forms(dataset, dtype):
    """The static one with its step as Python runs it: torch.compile is for real tensors."""
    shape, _ = SHAPES[dataset]
    with (
        pretended_gpu(dtype) as waits,
        mock.patch("torch.compile", lambda step, **_: step),
        mock.patch("torch.nn.Module.to", move),
    ):
        encoder = move(build_model(settings("daps", dataset), shape)).encoder
        x = torch.zeros(3, *shape, device=GPU)
        noise = torch.rand(3, 2, encoder.n_tokens, device=GPU)
        waits.noted.clear()
        codes = [encoder.sample(x, 2, noise)]
        encoder.compile_sampler(chunk=2)
        codes += [encoder.sample(x, 2, noise) for _ in range(2)]  # a new one, and again
        for z in codes:
            assert z.is_cuda and z.dtype == torch.long and z.shape == noise.shape
        (sampler,) = encoder.static_samplers.values()
        assert all(t.is_cuda for t in (*sampler.parameters(), *sampler.buffers()))
        query = sampler.blocks[0].attention.query
        assert query.weight.dtype == sampler.caches[0].k.dtype == getattr(torch, dtype)
        assert waits.noted == []


@needs_pretence
@pytest.mark.parametrize("method", ("daps_na", "vqvae"))
def test_motion_is_evaluated_on_the_gpu_but_for_its_errors(method):
    real = motion_dataset(n_val=1, n=32)
    real.keep = real.keep.nonzero()[:, 0]  # a mask's shape would depend on numbers
    with pretended_gpu() as waits:
        data = real.to(GPU)
        model = move(build_model(settings(method, "lafan", n_tokens=64), data.shape))
        waits.noted.clear()
        metrics, _ = evaluate(model, data, 0.1, 4, GPU)
        assert metrics.keys() >= {"cm", "degrees"}
        assert len(waits.noted) <= EVALUATION + MOTION_BATCH, waits.noted


@needs_pretence
def test_the_pretended_gpu_notices_what_waits_and_what_stays_behind():
    """Each of these is a mistake that the tests above should find."""
    with pretended_gpu() as waits:
        t, big = torch.zeros(3, 4, device=GPU), torch.zeros(2**17)
        for mistake in (
            lambda: t.sum().item(),
            lambda: bool(t.any()),
            lambda: t[0].tolist(),
            lambda: t.cpu(),
            lambda: torch.tensor(0.5, device=GPU),
            lambda: t.new_tensor([1.0, 2.0]),
            lambda: big.to(GPU),
            lambda: big.to(GPU, non_blocking=True),  # not pinned
            lambda: t.copy_(torch.zeros(3, 4)),
            lambda: t.masked_fill_(t > 0, 1).index_put_((t > 0,), t.sum()),
        ):
            waits.noted.clear()
            mistake()
            assert len(waits.noted) == 1
        waits.noted.clear()
        big.pin_memory().to(GPU, non_blocking=True)
        torch.full((), 0.5, device=GPU)
        t.fill_(0.5)
        assert waits.noted == []
        with pytest.raises(RuntimeError, match="device"):
            t + torch.zeros(3, 4)
        for refused in (lambda: t[t > 0], t.nonzero, t.unique):
            with pytest.raises(Exception, match="(?i)dynamic|aten"):
                refused()


def fake_backward(loss, parameters=()):
    """Leaves gradients of the right shape and device, with arbitrary values."""
    assert loss.is_cuda and loss.dim() == 0
    for p in parameters:
        p.grad = torch.zeros_like(p)


@needs_pretence
@pytest.mark.parametrize("method", ("daps", "ppo", "vqvae", "gumbel_na"))
def test_a_step_of_the_training_loop_waits_once(method, tmp_path, monkeypatch):
    """train.py itself, without its backward pass, checkpoints and report: runs that differ by two
    steps differ by two read-outs."""
    built = []

    def build(*options):
        built.append(build_model(*options))
        return built[-1]

    def backward(loss):
        fake_backward(loss, built[-1].parameters())

    monkeypatch.setitem(DATASETS, "glyphs", lambda data_dir: FakeData((1, 28, 28)))
    load_dataset.cache_clear()
    monkeypatch.setattr("models.build_model", build)
    monkeypatch.setattr("torch.Tensor.backward", backward)
    monkeypatch.setattr("torch.nn.Module.to", move)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("checkpoint.as_bytes", lambda *content: b"")
    monkeypatch.setattr("eval.report", lambda *runs, **options: None)
    found = {}
    for n_steps in (1, 3):
        options = (*TINY, "--batch_size=4", "--n_tokens=2", f"--max_steps={n_steps}")
        options += ("--log_interval=9", "--eval_interval=9", "--ppo_epochs=2", f"--method={method}")
        with pretended_gpu() as waits:
            options += (f"--out_dir={tmp_path / str(n_steps)}", "--use_compile=False")
            done = run_here("train.py", *options, f"--device={GPU}", "--dtype=bfloat16")
        assert done.code == 0, done.errors
        found[n_steps] = [line for line in waits.noted if "train.py" in line or "data.py" in line]
    load_dataset.cache_clear()
    extra = len(found[3]) - len(found[1])
    assert extra == 2, found


# ---------------------------------------------------------------------------------------------
# which GPU, which dtype


@pytest.mark.parametrize(
    "device, local_rank, chosen",
    (("cuda", "", "cuda:0"), ("cuda", "1", "cuda:1"), ("cuda:1", "", "cuda:1")),
)
def test_a_gpu_is_chosen_by_its_index_and_no_other_is_touched(
    device, local_rank, chosen, monkeypatch
):
    touched, precision = [], torch.get_float32_matmul_precision()

    def set_device(device):  # as strict as torch's
        assert torch.device(device).index is not None
        touched.append(device)

    def zeros(n, device):
        touched.append(device)
        return torch.ones(n)

    monkeypatch.setattr("torch.cuda.set_device", set_device)
    monkeypatch.setattr("torch.zeros", zeros)
    monkeypatch.setenv("LOCAL_RANK", local_rank) if local_rank else None
    try:
        assert setup_device(device) == chosen
        assert touched == [chosen, chosen]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("native", (False, True))
def test_bfloat16_is_for_gpus_that_compute_in_it(native, monkeypatch):
    asked = []

    def is_supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation or native

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", is_supported)
    assert has_bfloat16() == native and asked == [False]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not has_bfloat16() and asked == [False]


def test_a_run_on_the_cpu_beside_a_gpu_is_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    options = (*TINY, "--max_steps=1", f"--out_dir={tmp_path}", "--device=cpu")
    done = run_here("train.py", *options, "--use_compile=False")
    assert done.code == 0, done.errors
    with open(tmp_path / "config.json") as file:
        assert json.load(file)["dtype"] == "float32"


# ---------------------------------------------------------------------------------------------
# every method in every way to compute, on the CPU

stress = pytest.mark.stress


def two_steps(method, dtype, compiled, dataset="mnist"):
    """Two steps as train.py takes them: the mean log p(x|z) of each pass. All stays finite."""
    torch.manual_seed(0)
    shape, _ = SHAPES[dataset]
    model = build_model(settings(method, dataset), shape)
    if compiled and method not in ("gumbel", "grmck"):  # which train.py does not compile
        model.compile(backend="aot_eager")
        if method in AUTOREGRESSIVE:
            model.encoder.compile_sampler(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, beta, rewards = torch.rand(6, *shape).round(), torch.full((), 0.1), []
    for step in range(2):
        noise = uniform_noise(TRAIN_NOISE, 0, step, 6, model.noise_shape)
        for epoch in range(model.n_epochs):
            options = {"epoch": epoch} if epoch else {}
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                loss, metrics = model(x, beta, noise=noise, **options)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rewards.append(metrics["reward"].item())
            assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        assert t.isfinite().all() and t.dtype != torch.bfloat16, name
    return rewards


@pytest.mark.parametrize("dataset", ("mnist", "cifar10"))
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_two_steps_in_float32_and_bfloat16(method, dataset):
    single, half = (two_steps(method, dtype, False, dataset) for dtype in ("float32", "bfloat16"))
    assert half[0] == pytest.approx(single[0], rel=0.05)
    assert half != single  # bfloat16 is what was asked for


COMPILED = {"daps": "bfloat16", "vqvae": "bfloat16", "daps_na": "float32", "gumbel_na": "float32"}


@pytest.mark.parametrize(
    "method, dtype",
    [
        pytest.param(method, dtype, marks=() if COMPILED.get(method) == dtype else stress)
        for method, dtype in itertools.product(METHODS, ("float32", "bfloat16"))
    ],
)
def test_every_method_takes_two_compiled_steps(method, dtype):
    torch._dynamo.reset()
    compiled, eager = two_steps(method, dtype, True), two_steps(method, dtype, False)
    torch._dynamo.reset()
    assert compiled[0] == pytest.approx(eager[0], rel=1e-4 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("method, n_graphs", (("daps_na", 1), ("gumbel_na", 1), ("daps", 3)))
def test_a_step_compiles_into_few_graphs(method, n_graphs, fresh_dynamo):
    """One, where no sampler with its own compiled step comes in between; also while values are
    counted for splitting."""
    model = build_model(settings(method, "mnist"), (1, 28, 28))
    model.encoder.counting = True
    model.compile(backend="aot_eager")
    noise = torch.rand(6, *model.noise_shape)
    for _ in range(2):
        loss, _ = model(torch.rand(6, 1, 28, 28).round(), torch.full((), 0.1), noise=noise)
        loss.backward()
    assert counters["stats"]["unique_graphs"] == n_graphs
    assert model.encoder.usage.sum() > 0


def test_a_run_with_evaluations_compiles_the_sampler_once_for_training_and_once_for_them(
    fresh_dynamo, monkeypatch, tmp_path
):
    compile = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda f, **options: compile(f, **options | {"backend": "aot_eager"})
    )
    monkeypatch.setattr("eval.report", lambda *runs, **options: None)
    letters = glyphs(n_train=64, n_val=40)  # its last batch of 16 is not full
    monkeypatch.setitem(DATASETS, "glyphs", lambda data_dir: letters)
    load_dataset.cache_clear()
    clear_compilation_metrics()
    options = (*TINY, "--n_tokens=4", "--max_steps=4", "--eval_interval=2", "--use_compile=True")
    train_here(*options, "--method=daps", f"--out_dir={tmp_path / 'run'}")
    load_dataset.cache_clear()
    names = [row.co_name for row in get_compilation_metrics()]
    assert names.count("step") == 2, names


# ---------------------------------------------------------------------------------------------
# two processes

COLOUR = """
few = torch.Generator().manual_seed(0)
images = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8, generator=few)
colour = data.ArrayDataset("cifar10", images[:48], None, images[48:], None, 255)
data.DATASETS["cifar10"] = lambda data_dir: colour
"""
CHECKSUMS = """
models, start, end = [], torch.nn.parallel.DistributedDataParallel.__init__, None
def remember(self, model, **options):
    models.append(model)
    start(self, model, **options)
def compare():
    for name, buffer in models[0].named_buffers():
        print("buffer", name, data.digest(buffer.cpu().numpy()))
    end()
torch.nn.parallel.DistributedDataParallel.__init__ = remember
end, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, compare
"""


def buffers_of(forker, *arguments, fault=COLOUR):
    """The final buffers of two processes that train together."""
    everyone = forker.ranks(*[(arguments, fault + CHECKSUMS)] * 2)
    for done in everyone:
        assert done.code == 0, done.output + done.errors
    lines = [[x for x in done.output.splitlines() if "buffer " in x] for done in everyone]
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.parametrize(
    "choice, buffers",
    (
        ("--method=vqvae", ("codebook", "total", "count")),
        ("--method=ppo", ("reward_mean", "reward_std")),
        ("--method=daps --dataset=cifar10", ("running_mean", "running_var")),
        ("--method=vqvae --dataset=cifar10 --resnet_encoder=True", ("codebook", "running_var")),
    ),
)
def test_buffers_are_equal_on_all_ranks_though_nobody_sends_them(choice, buffers, forker, tmp_path):
    lines = buffers_of(forker, *SMALL, *choice.split(), f"--out_dir={tmp_path / 'run'}")
    for name in buffers:
        assert any(name in line for line in lines)


def test_the_k_means_start_is_the_same_for_any_number_of_processes(forker, tmp_path):
    options = (*SMALL, "--method=daps_na", "--kmeans_start=True", "--max_steps=1", "--lr=1e-12")
    forker.finish(*options, f"--out_dir={tmp_path / 'one'}")
    buffers_of(forker, *options, f"--out_dir={tmp_path / 'two'}", fault="")
    ours, theirs = (load_checkpoint(tmp_path / d / "last.pt")["model"] for d in ("one", "two"))
    for name in ("encoder.centre", "encoder.head.bias", "decoder.embed.weight"):
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-6)
        assert ours[name].abs().max() > 0.01  # not the zeros of a random start


AOT_EAGER = """
compile = torch.compile
torch.compile = lambda *what, **options: compile(*what, **options | {"backend": "aot_eager"})
"""


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=stress)))
def test_two_processes_train_a_resnet_with_batchnorm_as_one_eager_process_does(
    compiled, forker, tmp_path
):
    """Up to rounding. The decoder's biases before a BatchNorm, and so its running means, are left
    out: their gradient is only rounding, and Adam turns it into steps as large as any."""
    options = (*SMALL, "--dataset=cifar10", "--n_tokens=4", "--max_steps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    forker.finish(*options, f"--out_dir={one}", fault=COLOUR)
    fault = COLOUR + AOT_EAGER  # inductor itself, with two processes: see test_train.py
    buffers_of(forker, *options, f"--out_dir={two}", f"--use_compile={compiled}", fault=fault)
    for a, b in zip(log_rows(one), log_rows(two), strict=True):
        a, b = ({k: v for k, v in row.items() if isinstance(v, float)} for row in (a, b))
        assert len(a) >= 4 and a == pytest.approx(b, rel=1e-3, abs=1e-4)
    ours, theirs = (load_checkpoint(d / "last.pt")["model"] for d in (one, two))
    for name, t in ours.items():
        if "running_var" in name or name.startswith("encoder"):
            torch.testing.assert_close(theirs[name], t, atol=1e-4, rtol=1e-3, msg=name)


# ---------------------------------------------------------------------------------------------
# on a GPU, if there is one

needs_gpu = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no GPU: no nvidia-smi")


@needs_gpu
@pytest.mark.parametrize(
    "choice",
    (
        "--use_compile=False",
        "--use_compile=True",
        "--use_compile=True --cuda_graphs=True",
        "--dtype=bfloat16",
    ),
)
def test_a_run_on_a_gpu_starts_out_as_on_the_cpu(choice, finished_run, tmp_path):
    """The noise is the same on all devices, so the first batch has nearly the same codes."""
    options = (*TINY, "--device=cuda", "--dtype=float32", *choice.split(), "--max_steps=12")
    succeed("train.py", *options, f"--out_dir={tmp_path / 'run'}", CUDA_VISIBLE_DEVICES="0")
    ours, theirs = log_rows(tmp_path / "run"), log_rows(finished_run)
    assert len(ours) == len(theirs)
    assert ours[0]["reward"] == pytest.approx(theirs[0]["reward"], rel=0.01)


@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_is_evaluated_on_a_gpu(method, tmp_path):
    options = (*TINY, f"--method={method}", "--fsq_levels=8 4", "--max_steps=4", "--device=cuda")
    succeed("train.py", *options, f"--out_dir={tmp_path / 'run'}", CUDA_VISIBLE_DEVICES="0")
    assert all(row["skipped"] == 0 for row in log_rows(tmp_path / "run", "train"))
