"""Parallel sampling (sampler.py) draws the codes that sampling token by token draws."""

import pytest
import torch
from conftest import ROOT

from build import build_model
from configurator import settings_block
from daps import draw
from models import AutoregressiveEncoder, Scale, Sizes
from sampler import ParallelSampler


def encoder(aligned=False, sway=1.0, seed=0):
    """A small encoder of tokens that are far from uniform; sway: how much they depend on others."""
    torch.manual_seed(seed)
    scale = Scale(torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 0.5))
    encoder = AutoregressiveEncoder(Sizes((1, 12, 12), 9, 11, 16, 2), scale, aligned=aligned)
    encoder.head.log_scale.data.fill_(1.0)
    encoder.tokens.embed.weight.data.mul_(sway)
    return encoder


def example(encoder, N=6, K=4):
    torch.manual_seed(1)
    return torch.rand(N, 1, 12, 12), torch.rand(N, K, encoder.n_tokens)


@pytest.mark.parametrize("sway", (0.3, 1.0, 10.0))
@pytest.mark.parametrize("aligned", (False, True))
def test_parallel_codes_are_those_drawn_token_by_token(aligned, sway):
    model = encoder(aligned, sway)
    x, noise = example(model)
    one_by_one = model(x, 4, noise, with_kl=True)
    model.parallel = ParallelSampler()
    at_once = model(x, 4, noise, with_kl=True)
    assert torch.equal(at_once[0], one_by_one[0]) and len(at_once[0].unique()) > 5
    for ours, theirs in zip(at_once[1:], one_by_one[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", ("daps", "rloo", "ppo"))
def test_a_training_step_has_the_same_loss_and_gradients_with_either_sampler(method):
    settings, _ = settings_block(f"{ROOT}/train.py")
    sizes = dict(method=method, n_tokens=4, vocab_size=8, width=16, n_samples=3, aligned=True)
    results = []
    for parallel in (None, ParallelSampler()):
        torch.manual_seed(0)
        model = build_model(settings | sizes, (1, 12, 12))
        model.encoder.parallel = parallel
        x, noise = torch.rand(5, 1, 12, 12).round(), torch.rand(5, 3, 4)
        loss, metrics = model(x, 0.1, noise=noise)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([loss, *metrics.values(), *gradients])
    assert len(results[0]) > 20
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_log_q_is_that_of_the_logits_from_which_the_codes_are_drawn(dtype):
    """In bfloat16 too, where other kernels would round otherwise."""
    model = encoder()
    x, noise = example(model)
    sampler = ParallelSampler()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        context = model.tokens.context(model.patch_encoder(x))
        z, logits, _ = sampler(model.tokens, context, noise)
        again = model.tokens.logits(context, z)
    assert logits.dtype == dtype and logits.requires_grad and torch.equal(logits, again)
    assert torch.equal(draw(again, noise.unsqueeze(3)).squeeze(3), z)


def test_passes_are_two_without_dependence_and_never_more_than_tokens_plus_one():
    found = []
    for sway in (0.0, 1.0, 100.0):
        model = encoder(sway=sway)
        x, noise = example(model, N=20)
        model.parallel = ParallelSampler()
        model(x, 4, noise)
        found.append(model.n_passes)
    assert found[0] == 2 and 2 < found[1] <= found[2] <= model.n_tokens + 1


def test_compiled_passes_draw_the_same_codes(fresh_dynamo):
    model = encoder()
    x, noise = example(model)
    expected = model(x, 4, noise)
    model.parallel = ParallelSampler(compiled=True, backend="aot_eager")
    model.compile(backend="aot_eager")
    for _ in range(2):
        z, log_q = model(x, 4, noise)
        assert torch.equal(z, expected[0])
        torch.testing.assert_close(log_q, expected[1])
    log_q.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    # Patches, context, a pass for one code and one for K, log q, and its sum.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
