"""Speed that can be counted: what a step must not do, and what bench.py measures."""

import json
from collections import Counter

import pytest
import torch
from conftest import ROOT, run, succeed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import bench
from configurator import defaults


class Largest(TorchDispatchMode):
    """The largest number of elements in the output of any operation under it."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in tensors)])
        return out


def flops(products):
    """FLOPs of the matrix products recorded by bench.Products: two per multiply-add."""
    total = 0
    for (_, ((*batch, rows, inner), *_), (right, *_)), n in (
        ((name, *shapes), n) for (name, shapes), n in products.calls.items()
    ):
        total += 2 * n * torch.Size(batch).numel() * rows * inner * right[-1]
    return total


@pytest.mark.parametrize("dataset", bench.BATCHES)
def test_settings_are_those_of_train_py_and_the_config_files(dataset):
    daps, rloo = bench.settings_of(dataset, "daps"), bench.settings_of(dataset, "rloo")
    assert daps["dataset"] == dataset and daps["aligned"] is False  # the paper's networks
    assert daps["vq_ema"] == defaults(f"{ROOT}/train.py")["vq_ema"]  # in no config file of DAPS
    size = ("n_tokens", "vocab_size", "width", "n_layers", "n_samples")
    assert [daps[key] for key in size] == [rloo[key] for key in size]
    assert rloo["method"] == "rloo"  # also where there is no config file


@pytest.mark.parametrize("method", ["daps", "daps_na", "gumbel", "vqvae"])
def test_the_roofline_holds_all_products_of_a_step(method):
    """Counted by PyTorch's own counter, which is independent of ours."""
    _, step = bench.make("mnist", method, n=8)
    products, counter = bench.Products(), FlopCounterMode(display=False)
    step()  # the first step of VQ-VAE looks for code vectors
    with products:
        step()
    with counter:
        step()
    assert flops(products) == counter.get_total_flops()


@pytest.mark.parametrize("dataset", ["cifar10", "lafan"])
def test_the_roofline_of_convolutions_and_attention_can_be_replayed(dataset):
    _, step = bench.make(dataset, "vqvae", n=2)
    products = bench.Products()
    with products:
        step()
    assert {name for name, _ in products.calls} >= {"mm", "bmm", "convolution_backward"}
    products.replay()()


def test_a_sampler_never_holds_logits_of_more_than_one_token():
    N, K, B, V = 4, 8, 64, 1024
    encoder, largest = bench.encoder_of(B, V), Largest()
    patches = torch.randn(N, B, 128)
    with largest:
        encoder.sample_codes(patches, K, torch.rand(N, K, B))
    one_token, cache = N * K * V, N * K * B * 128
    assert one_token <= largest.numel <= max(one_token, cache) < N * K * B * V


def test_a_step_of_daps_runs_every_network_once(monkeypatch):
    net, step = bench.make("mnist", "daps", n=4)
    calls = Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(*args, **options):
            calls[type(module).__name__, name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count(net.encoder.patch_encoder, "forward")
    count(net.decoder, "logits")
    count(net.encoder.blocks[0], "forward")
    for name in ("sample_codes", "logits"):
        count(net.encoder, name)
    monkeypatch.setattr(bench.models, "token_kl", None)  # computing an unused KL would crash
    step()
    assert calls == {
        ("PatchEncoder", "forward"): 1,
        ("AutoregressiveEncoder", "sample_codes"): 1,
        ("AutoregressiveEncoder", "logits"): 1,
        ("CodeBlock", "forward"): 8 + 1,  # a token at a time, and all of them to score the code
        ("MLPDecoder", "logits"): 1,
    }


def test_sampling_with_the_prefix_recomputed_gives_the_same_codes():
    encoder = bench.encoder_of(16, 32)
    patches, noise = torch.randn(3, 16, 128), torch.rand(3, 4, 16)
    ours = encoder.sample_codes(patches, 4, noise)
    assert torch.equal(ours, bench.sample_without_cache(encoder, patches, 4, noise))


def test_bench_prints_a_table_and_writes_its_numbers(tmp_path):
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ("--only=steps bar", "--model=mnist", "--method=fsq", "--seconds=0.01")
    output = succeed("bench.py", *words, f"--json_path={path}", f"--picture={picture}")
    numbers = json.loads(path.read_text())
    assert numbers["steps"]["mnist fsq"]["ratio"] > 0
    assert set(numbers["bar"]["mnist"]) == set(bench.PARTS)
    assert "mnist fsq" in output and "drawn in" in output and picture.exists()


def test_memory_of_a_step_is_what_it_adds_to_the_peak():
    n_bytes = int(bench.peak_memory() + 64) * 2**20  # more than this process has ever held
    assert bench.memory_of(lambda: torch.ones(n_bytes, dtype=torch.uint8)) > 60


@pytest.mark.parametrize("words", [("--only=stairs",), ("--model=mars",), ("--n_threads=0",)])
def test_a_bad_word_is_refused_in_one_line(words):
    done = run("bench.py", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
