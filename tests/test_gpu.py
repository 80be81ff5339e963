"""The GPU path on a machine without a GPU.

FakeTensorMode computes shapes, dtypes and devices but no numbers, so a CPU build of torch can run
every forward pass on "cuda:0": a tensor left on the CPU raises, and every moment at which the CPU
would wait for the GPU is counted. inductor even writes its code for an A100, of which launches are
counted. Gradients of compiled code are computed on the CPU; kernels and nccl stay untested.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import traceback
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, motion_frames, run_here
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import compile_fx, config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from build import METHODS, build_model
from configurator import settings_block
from data import DATASETS, Dataset, load_dataset, on_device, uniform_noise
from eval import evaluate
from models import Scale
from policy import Policy, describe_window
from run import setup_device
from sampler import CompiledSampler, StaticSampler

LIBC10 = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libc10.so"))
GUARDS = (ctypes.c_void_p * 18).in_dll(LIBC10, "_ZN3c104impl26device_guard_impl_registryE")
GPU = "cuda:0"
SHAPES = {  # of x as networks see it, and what else is particular to the runs on it
    "mnist": ((1, 28, 28), dict(n_tokens=2, split_interval=1)),
    "cifar10": ((3, 32, 32), dict(n_tokens=4, n_layers=2, vq_ema=False, eta_update="gradient")),
    "lafan": ((8, 6), dict(n_tokens=8, aligned=True)),
}


def x_shape(dataset):
    return (32, 26) if dataset == "lafan" else SHAPES[dataset][0]  # motion: of frames


def settings(method, dataset, **changes):
    """Settings of a small run, for build_model."""
    small = dict(vocab_size=16, width=16, mlp_ratio=2, n_samples=4, mc_samples=2, ppo_epochs=2)
    small |= dict(fsq_levels="4 4", method=method, dataset=dataset)
    return settings_block(f"{ROOT}/train.py")[0] | SHAPES[dataset][1] | small | changes


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
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal"):
            if args[0].is_cuda:
                self.note("read-out")
            is_float = args[0].dtype.is_floating_point
            return name == "equal" or (0.5 if is_float else args[0].dtype != torch.bool)
        if name == "_to_copy":
            target = kwargs.get("device") or args[0].device
            self.copy(args[0], torch.device(target), kwargs.get("non_blocking"))
        if name == "copy_":
            self.copy(args[1], args[0].device, args[2:] == (True,))
        return function(*args, **kwargs)

    def copy(self, source, target, non_blocking):
        # CUDA copies from pinned memory without waiting, and 64 KiB from any.
        quick = source.nbytes <= 2**16 or any(source is t for t in self.pinned)
        sent = target.type == "cuda" and non_blocking and quick
        if target.type != source.device.type and not sent:
            self.note(f"copy of {tuple(source.shape)}")

    def pin(self, t):
        self.pinned.append(t.clone())
        return self.pinned[-1]

    def read(self, t):
        self.note("read-out")  # one, however long t is
        return [0.0] * len(t)


@contextlib.contextmanager
def pretended_gpu(dtype="float32", counting=True):
    """Fake tensors without gradients: a CPU build aborts if CUDA's autograd is used."""
    GUARDS[1] = GUARDS[1] or GUARDS[17]  # a CPU build has none for CUDA; MTIA's does no harm
    torch._C._ensureCUDADeviceGuardSet()
    waits = Waits()
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        mock.patch("torch.Tensor.pin_memory", lambda t: waits.pin(t)),
        mock.patch("torch._subclasses.fake_tensor.FakeTensor.tolist", lambda t: waits.read(t)),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        waits if counting else contextlib.nullcontext(),
        torch.autocast("cuda", torch.bfloat16, dtype == "bfloat16", cache_enabled=False),
    ):
        yield waits


def move(model, device=GPU):
    """model.to(device) for fake tensors: registered tensors move, others stay."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else nn.Parameter(p.to(device), False)
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.to(device)
    return model


class FakeData(Dataset):
    name, n_train, n_val = "fake", 12, 3  # those of validation are too few for a batch

    def __init__(self, shape):
        self.shape, ones = shape, torch.ones(shape[0], 1, 1)
        self.scale = Scale(0 * ones, ones)

    def read(self, split, index, keys=None):
        return torch.zeros(len(index), *self.shape, dtype=torch.uint8), None


@pytest.mark.parametrize("method, dataset", list(itertools.product(METHODS, SHAPES)))
def test_a_step_and_an_evaluation_stay_on_the_gpu_and_a_step_never_waits(method, dataset):
    shape, _ = SHAPES[dataset]
    for dtype in ("bfloat16", "float32") if dataset == "mnist" else ("bfloat16",):
        with pretended_gpu(dtype) as waits:
            model = move(build_model(settings(method, dataset), shape))
            data = FakeData(x_shape(dataset))
            waits.noted.clear()
            x = on_device(data.train_batch(0, 0, 4)[0], GPU)
            noise = uniform_noise(0, 0, 0, torch.arange(4, device=GPU), model.noise_shape)
            for epoch in range(model.n_epochs):
                options = {"epoch": epoch} if epoch else {}
                loss, metrics = model(x, torch.full((), 0.1, device=GPU), noise=noise, **options)
                assert loss.is_cuda and all(value.is_cuda for value in metrics.values())
            assert all(b.is_cuda for b in model.buffers())
            assert waits.noted == []
            if dtype == "bfloat16":  # as train.py calls it; it waits for numbers and results
                _, counts = evaluate(model, data, 0.1, data.val_index(), GPU, batch_size=4)
                assert counts is None or counts.is_cuda
                assert len(waits.noted) <= 5, waits.noted


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # by a copy of fake tensors
@pytest.mark.parametrize("dataset, dtype", [*itertools.product(SHAPES, ("float32", "bfloat16"))])
def test_every_sampler_stays_on_the_gpu(dataset, dtype):
    """The compiled ones as Python runs them: torch.compile is for real tensors."""
    shape, _ = SHAPES[dataset]
    with pretended_gpu(dtype) as waits, mock.patch("torch.compile", lambda step, **_: step):
        encoder = move(build_model(settings("daps", dataset), shape)).encoder
        x = torch.zeros(3, *x_shape(dataset), device=GPU)
        noise = torch.rand(3, 2, encoder.n_tokens).to(GPU)
        waits.noted.clear()
        codes = [encoder(x, 2, noise)[0]]
        encoder.sampler = CompiledSampler(chunk=2)
        codes += [encoder(x, 2, noise)[0] for _ in range(2)]  # a new one, and again
        (static,) = encoder.sampler.samplers.values()
        assert all(t.is_cuda for t in (*static.parameters(), *static.buffers()))
        assert static.caches[0].k.dtype == getattr(torch, dtype) and waits.noted == []
        for z in codes:
            assert z.is_cuda and z.dtype == torch.long and z.shape == noise.shape


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_policy_is_prepared_trained_and_followed_on_the_gpu():
    vectors = {word: torch.eye(2)[i] for i, word in enumerate(("walk", "run"))}
    windows = torch.from_numpy(np.stack([motion_frames(64, i) for i in range(6)]))
    model = build_model(settings("daps_na", "lafan", n_tokens=64), (64, 6))
    with pretended_gpu():
        policy = move(Policy(64, 16, 16, 1, vectors))
        policy.autoencoder = move(model)
        policy.prepare(windows, model.decoder.scale, model.decoder.embed.weight)
        rows = describe_window(windows).to(GPU)
        x = rows, torch.zeros(6, 2, device=GPU), torch.ones(6, 3, device=GPU).bool()
        z = policy.act(x, torch.rand(6, 2, 64).to(GPU), guidance=2.0)
        (log_p,) = policy.score(policy.patch_encoder(x), z)
        assert z.is_cuda and log_p.is_cuda and log_p.shape == (6, 2, 64)
        frames, _ = policy.rollout(windows[:, :32], "walk", torch.zeros(40, 2), n_draws=2)
        assert frames.shape == (6, 40, 26) and not frames.is_cuda


def test_the_pretended_gpu_notices_what_waits_and_what_stays_behind():
    with pretended_gpu() as waits:
        t, big = torch.zeros(3, 4, device=GPU), torch.zeros(2**17)
        for mistake in (
            lambda: bool(t.any()),
            lambda: torch.equal(t, t),
            lambda: t.cpu(),
            lambda: torch.tensor(0.5, device=GPU),
            lambda: big.to(GPU, non_blocking=True),  # not pinned
            lambda: t.copy_(torch.zeros(3, 4)),
        ):
            waits.noted.clear()
            mistake()
            assert len(waits.noted) == 1
        big.pin_memory().to(GPU, non_blocking=True)
        assert len(waits.noted) == 1  # as before
        with pytest.raises(RuntimeError, match="device"):
            t + torch.zeros(3, 4)


@pytest.mark.parametrize("method", ("daps", "ppo", "vqvae"))
def test_a_step_of_the_training_loop_waits_once(method, tmp_path, monkeypatch):
    """train.py without backward pass, checkpoints and report: two steps more, two read-outs."""
    built = []

    def build(*options):
        built.append(build_model(*options))
        return built[-1]

    def backward(loss):
        assert loss.is_cuda and loss.dim() == 0
        for p in built[-1].parameters():
            p.grad = torch.zeros_like(p)

    monkeypatch.setitem(DATASETS, "glyphs", lambda data_dir: FakeData((1, 28, 28)))
    load_dataset.cache_clear()
    monkeypatch.setattr("build.build_model", build)
    monkeypatch.setattr("torch.Tensor.backward", backward)
    monkeypatch.setattr("torch.nn.Module.to", move)
    for name in ("torch.cuda.set_device", "run.save", "eval.evaluate_runs"):
        monkeypatch.setattr(name, lambda *_, **__: None)
    found = {}
    for n_steps in (1, 3):
        options = (*TINY, "--batch_size=4", "--n_tokens=2", f"--max_steps={n_steps}")
        options += ("--log_interval=9", "--eval_interval=9", "--ppo_epochs=2", f"--method={method}")
        options += (f"--out_dir={tmp_path / str(n_steps)}", "--use_compile=False")
        with pretended_gpu() as waits:
            done = run_here("train.py", *options, f"--device={GPU}", "--dtype=bfloat16")
        assert done.code == 0, done.errors
        found[n_steps] = sum(line.startswith("read-out, train.py") for line in waits.noted)
    load_dataset.cache_clear()
    assert found[3] - found[1] == 2, (done.output, waits.noted)


MOST = ("token", 38), pytest.param("step", 125, marks=pytest.mark.stress)


def attention(q, k, v, attn_mask=None, is_causal=False):
    """The kernels that torch chooses on an A100, in bfloat16."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = bias.expand(*q.shape[:3], k.size(2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False)[0]


def launches(function, *inputs):
    """How many kernels each graph of a function launches, if compiled for an A100."""
    found, device = [], types.SimpleNamespace(major=8, minor=0, multi_processor_count=108)

    def lower(graph, inputs, **_):
        mode = torch._guards.detect_fake_mode(inputs)
        with mode:
            outputs = graph(*inputs)
        view_to_reshape(graph)
        available = mock.patch("torch.cuda.is_available", lambda: True)
        with inductor.set_fake_mode(mode), inductor.set_debug_handler(DebugContext()), available:
            compile_fx.fake_tensor_prop(graph, inputs)
            compile_fx._recursive_record_original_output_strides(graph)
            compile_fx._recursive_post_grad_passes(graph, is_inference=True)
            lowering = GraphLowering(graph, inputs, mode.shape_env, is_inference=True)
            with inductor.set_graph_handler(lowering), inductor.set_extern_kernel_nodes([]):
                lowering.run(*inputs)
                code = lowering.codegen()[0].value
        call = code[code.index("def call") :]
        found.append(len(re.findall(r"triton_\w+\.run\(|extern_kernels\.|= torch\.ops\.", call)))
        return make_boxed_func(lambda *_: outputs)

    backend = functools.partial(compile_fx.compile_fx, inner_compile=lower)
    fakes = {
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch.cuda.get_device_properties": lambda *_: device,
        "torch.cuda.get_device_capability": lambda *_: (8, 0),
        "torch._dynamo.device_interface.CudaInterface.get_device_properties": lambda *_: device,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        "torch.nn.functional.scaled_dot_product_attention": attention,
    }
    with contextlib.ExitStack() as stack, config.patch(joint_graph_constant_folding=False):
        for name, fake in fakes.items():
            stack.enter_context(mock.patch(name, fake))
        torch.compile(function, dynamic=False, backend=backend)(*inputs)
    return found


@pytest.mark.parametrize("what, most", MOST)
def test_a_token_and_a_step_are_one_graph_of_few_launches(what, most, fresh_dynamo):
    shape, _ = SHAPES["cifar10"]
    with pretended_gpu("bfloat16", counting=False):
        noise, x = torch.zeros(3, 4, 4, device=GPU), torch.zeros(3, *shape, device=GPU)
        if what == "step":
            model = move(build_model(settings("daps_na", "cifar10", eta_update="solve"), shape))
            found = launches(functools.partial(model, noise=noise), x, x.new_ones(()))
        else:
            tokens = move(build_model(settings("daps", "cifar10"), shape)).encoder.tokens
            context = tokens.context(torch.zeros(3, 4, 16, device=GPU))
            static = StaticSampler(tokens, context, noise, 128, {"backend": "eager"})
            found = launches(static.step, 4)
    assert len(found) == 1 and most * 0.8 < found[0] <= most, found


def gradients(method, dataset, compiled=False):
    """Gradients and buffers of a step on small images, of which this process computes its share."""
    rank, n = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    torch.manual_seed(0)
    shape = (SHAPES[dataset][0][0], 4, 4)
    model = wrapped = build_model(settings(method, dataset, n_layers=1), shape)
    x, noise = torch.rand(8, *shape).round(), torch.rand(8, *model.noise_shape)
    model.compile(backend="aot_eager_decomp_partition", disable=not compiled)
    if n > 1:  # as in train.py
        dist.init_process_group("gloo")
        torch._dynamo.config.optimize_ddp = False
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    for epoch in range(model.n_epochs):
        options = {"noise": noise.chunk(n)[rank]} | ({"epoch": epoch} if epoch else {})
        wrapped(x.chunk(n)[rank], torch.full((), 0.3), **options)[0].backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffers.{name}": b for name, b in model.named_buffers()}


COMPILED = [method for method in METHODS if method not in ("gumbel", "grmck")]
EVERY = itertools.product(COMPILED, ("mnist", "cifar10"), (1, 2))
QUICK = {("daps", "cifar10", 1): [], ("fsq", "cifar10", 2): []}
CASES = [pytest.param(*case, marks=QUICK.get(case, pytest.mark.stress)) for case in EVERY]


@pytest.mark.parametrize("method, dataset, n", CASES)
def test_torch_compile_changes_no_gradient(method, dataset, n, forker, tmp_path):
    """By n processes that share a batch, against one that does not compile. mnist has MLPDecoder,
    cifar10 ResNetDecoder, whose BatchNorm undoes the biases before it: their gradients are nothing
    but rounding, so errors are relative to the largest entry plus 1 % of that of its network."""
    job = f"found = test_gpu.gradients({method!r}, {dataset!r}, compiled=True)"
    job += f"; torch.save(found, {str(tmp_path)!r} + os.environ['RANK']); sys.exit()"
    for done in forker.ranks(*[((), f"import test_gpu; {job}")] * n):
        assert done.code == 0, done.errors
    ours, theirs = torch.load(f"{tmp_path}0"), gradients(method, dataset)
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        network = [theirs[k].abs().max() for k in theirs if k.split(".")[0] == name.split(".")[0]]
        size = t.abs().max() + 0.01 * max(network)
        assert (ours[name] - t).abs().max() <= 1e-3 * size, name


@pytest.mark.parametrize("device, rank, chosen", (("cuda", 1, "cuda:1"), ("cuda:1", 0, "cuda:1")))
def test_a_gpu_is_chosen_by_its_index_and_no_other_is_touched(device, rank, chosen, monkeypatch):
    touched = []
    monkeypatch.setattr("torch.cuda.set_device", touched.append)
    monkeypatch.setattr("torch.zeros", lambda n, device: touched.append(device) or torch.ones(n))
    monkeypatch.setattr("torch.set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert setup_device(device) == chosen and touched == [chosen, chosen]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_computes_in_bfloat16_what_it_does_in_float32_but_for_rounding(method):
    rewards = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = build_model(settings(method, "mnist"), (1, 28, 28))
        x, noise = torch.rand(6, 1, 28, 28).round(), torch.rand(6, *model.noise_shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, metrics = model(x, torch.full((), 0.1), noise=noise)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for t in (loss, *metrics.values(), *gradients, *model.buffers()):
            assert t.isfinite().all() and t.dtype != torch.bfloat16
        rewards.append(metrics["reward"].item())
    assert rewards[1] != rewards[0] == pytest.approx(rewards[1], rel=0.05)
