"""models.py against enumeration of all codes, torch.distributions and the paper's sizes."""

import copy
import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, log_prob_of_all
from torch._dynamo.utils import counters

from baselines import token_kl
from configurator import defaults, read_config
from daps import DAPS
from models import (
    AUTOREGRESSIVE,
    METHODS,
    VECTORS,
    AutoregressiveEncoder,
    MLPDecoder,
    MotionDecoder,
    OnePassEncoder,
    Patches,
    ResNetDecoder,
    ResNetEncoder,
    TiedHead,
    attend,
    build_model,
    draw,
    fsq_levels,
    n_parameters,
    token_log_prob,
    windows,
)

X_SHAPE = (1, 28, 28)
EPS = 2.0**-23  # relative step of float32


def encoder(kind, n_tokens=8, vocab_size=16, width=32, n_layers=2, x_shape=X_SHAPE, spread=3.0):
    """A small encoder with spread-out logits: it prefers some tokens and depends on the past."""
    torch.manual_seed(0)
    size = (x_shape, n_tokens, vocab_size, width, 4, n_layers, 2)
    if kind == "one pass":
        model = OnePassEncoder(*size)
    else:
        model = AutoregressiveEncoder(*size, aligned=kind == "aligned")
    model.head.weight.data *= spread
    return model


KINDS = ("plain", "aligned", "one pass")


def stepwise_log_prob(model, x, z, noise):
    """log q(z|x) as the cached sampler sees it: its own logits, recorded while it draws."""
    recorded = []
    handle = model.head.register_forward_hook(lambda *call: recorded.append(call[-1]))
    with torch.no_grad():
        drawn = model.sample(x, z.size(1), noise)
    handle.remove()
    assert torch.equal(drawn, z)
    logits = torch.cat(recorded, dim=2)  # (N, K, B, V)
    return token_log_prob(logits, z).sum(dim=-1)


@pytest.mark.parametrize("kind", ("plain", "aligned"))
@pytest.mark.parametrize("n_tokens", (1, 8, 64))
def test_cached_sampling_and_teacher_forcing_agree(kind, n_tokens):
    """To 1e-4: log q of 64 tokens is near -180, where float32 has steps of 1.5e-5; adding 64 terms
    in another order costs a few of them."""
    model = encoder(kind, n_tokens, spread=1.0)
    x, noise = torch.rand(3, *X_SHAPE), torch.rand(3, 5, n_tokens)
    z, log_q = model(x, 5, noise)
    assert (z == 0).any() or n_tokens == 1  # codes with token 0 are among them
    sampled = stepwise_log_prob(model, x, z, noise)
    torch.testing.assert_close(sampled, log_q.detach(), atol=1e-4, rtol=0)
    assert log_q.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_hold_token_0_have_the_probability_they_are_drawn_with(kind):
    """All codes of B = 2, V = 3: probabilities sum to one and match the sampled frequencies."""
    model = encoder(kind, n_tokens=2, vocab_size=3)
    x = torch.rand(1, *X_SHAPE)
    codes = torch.tensor(list(itertools.product(range(3), repeat=2)))  # (9, 2)
    with torch.no_grad():
        p = log_prob_of_all(model, x, codes).exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-5)
        n = 20_000
        noise = torch.rand(1, n, 2, generator=torch.Generator().manual_seed(1))
        z, log_q = model(x, n, noise)
    index = z[0, :, 0] * 3 + z[0, :, 1]
    torch.testing.assert_close(log_q[0], p.log()[index], atol=1e-4, rtol=0)
    counts = torch.bincount(index, minlength=9)
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum().item()
    assert chi_square < 26.1  # 0.999 quantile, 8 degrees of freedom
    assert p.max() / p.min() > 3  # far from uniform: a wrong sampler would show


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_exact_when_averaged_over_all_codes(kind):
    model = encoder(kind, n_tokens=3, vocab_size=3)
    x = torch.rand(1, *X_SHAPE)
    codes = torch.tensor(list(itertools.product(range(3), repeat=3)))  # (27, 3)
    with torch.no_grad():
        log_q = log_prob_of_all(model, x, codes)  # (27,)
        exact = (log_q.exp() * (log_q + 3 * math.log(3))).sum()
        if kind == "one pass":
            along = model(x, 1, with_kl=True)[2].expand(1, 27)  # the same for all codes
        else:
            along = model.score(model.patch_encoder(x), codes.unsqueeze(0), with_kl=True)[1].sum(-1)
    assert (log_q.exp() * along[0]).sum().item() == pytest.approx(exact.item(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_the_same_with_and_without_its_kl_and_x_is_encoded_once(kind):
    model = DAPS(encoder(kind), MLPDecoder(X_SHAPE, 8, 16, 32))
    x, noise, calls = torch.rand(3, *X_SHAPE), torch.rand(3, 1, 8), []
    alone = model.encode(x, noise=noise)
    model.encoder.patch_encoder.register_forward_hook(lambda *call: calls.append(call))
    z, kl = model.encode(x, with_kl=True, noise=noise)
    assert len(calls) == 1 and torch.equal(z, alone) and z.shape == (3, 8) and kl.shape == (3,)
    patches = model.encoder.patch_encoder(x)
    if kind == "one pass":
        expected = token_kl(model.encoder.read_out(patches)).sum(dim=-1)
    else:
        expected = token_kl(model.encoder.logits(patches, z.unsqueeze(1))).sum(dim=(1, 2))
    torch.testing.assert_close(kl, expected.detach())
    assert not kl.requires_grad


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_a_token_depends_on_the_past_and_not_on_the_future(kind):
    model = encoder(kind)
    patches = model.patch_encoder(torch.rand(1, *X_SHAPE))
    z = torch.randint(16, (1, 1, 8))
    other = z.clone()
    other[..., 4] = (z[..., 4] + 1) % 16
    a, b = model.logits(patches, z), model.logits(patches, other)
    assert torch.equal(a[:, :, :5], b[:, :, :5])
    assert not torch.allclose(a[:, :, 5:], b[:, :, 5:])


def test_the_k_codes_of_one_example_do_not_see_each_other_or_other_examples():
    model = encoder("aligned")
    x, noise = torch.rand(4, *X_SHAPE), torch.rand(4, 3, 8)
    z, log_q = model(x, 3, noise)
    alone, log_q_alone = model(x[2:3], 1, noise[2:3, 1:2])
    assert torch.equal(alone[0, 0], z[2, 1])
    torch.testing.assert_close(log_q_alone[0, 0], log_q[2, 1], atol=1e-4, rtol=0)


def test_draw_never_picks_a_token_of_probability_zero():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).repeat(1000, 1)
    edges = torch.tensor([0.0, 1 - 2**-24, 0.5, 1 / (1 + math.e)])
    u = torch.cat([torch.rand(1000, 8), edges.expand(1000, -1)], dim=1)
    z = draw(logits, u)
    assert set(z.unique().tolist()) == {1, 3}


def test_draw_inverts_the_distribution_function():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    u = torch.tensor([0.05, 0.15, 0.29, 0.31, 0.59, 0.61, 0.99])
    assert draw(p.log(), u).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_token_kl_and_its_gradient_match_torch_distributions():
    logits = (3 * torch.randn(5, 7)).requires_grad_()
    uniform = torch.distributions.Categorical(logits=torch.zeros(5, 7))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits), uniform
    )
    torch.testing.assert_close(token_kl(logits), expected)
    found, wanted = (torch.autograd.grad(kl.sum(), logits) for kl in (token_kl(logits), expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_bernoulli_likelihood_matches_torch_distributions():
    decoder = MLPDecoder(X_SHAPE, 8, 16, 32)
    x, z = torch.rand(3, *X_SHAPE).round(), torch.randint(16, (3, 5, 8))
    p = decoder(z)
    assert p.mean.shape == (3, 5, *X_SHAPE)
    expected = p.log_prob(x.unsqueeze(1))
    torch.testing.assert_close(decoder.log_prob(x, z), expected, rtol=1e-5, atol=1e-3)


def test_patches_tile_the_padded_image():
    patches = Patches(X_SHAPE, 8)
    assert (patches.rows, patches.columns, patches.ph, patches.pw) == (2, 4, 14, 8)
    x = torch.rand(2, *X_SHAPE)
    out = patches(x)
    assert out.shape == (2, 8, 112)
    assert torch.equal(
        out[0, 1].view(14, 8), x[0, 0, :14, 6:14]
    )  # 2 columns of padding on the left
    torch.testing.assert_close(out.sum(), x.sum())
    assert Patches((3, 32, 32), 64)(torch.rand(1, 3, 32, 32)).shape == (1, 64, 48)


def count(model):
    return sum(p.numel() for p in model.parameters())


def config(name, **settings):
    """The settings of train.py, overridden by config/<name>.py."""
    rows = read_config(os.path.join(ROOT, "config", f"{name}.py"))
    own = {key: value for key, value, _ in rows}
    return defaults(os.path.join(ROOT, "train.py")) | own | settings


@pytest.mark.parametrize("aligned", (False, True))
@pytest.mark.parametrize(
    "name, shape, sizes",
    [
        ("mnist_daps", X_SHAPE, (156_480 + 64, 267_344)),
        ("mnist_daps_na", X_SHAPE, (160_640 - 64 * 65, 267_344)),
        ("mnist_vqvae", X_SHAPE, (160_512, 250_960 + 256 * 64)),
        ("mnist_fsq", X_SHAPE, (160_707 - 64 * 65, 250_960 + 4 * 64)),
        ("cifar10_daps", (3, 32, 32), (1_060_992 + 128, 257_958)),
        ("imagenet_daps", (3, 256, 256), (1_211_008 + 128, 330_198)),
    ],
)
def test_the_models_of_a_config_have_the_sizes_of_the_authors_models(name, shape, sizes, aligned):
    """Ours have a begin-of-code embedding of their own (+ H, autoregressive) and no second linear
    layer before the linear head (- 64 * 65, one pass). With the decoder we count the code vectors
    of VQ-VAE and FSQ's linear layer from three numbers; theirs has other levels."""
    with torch.device("meta"):
        model = build_model(config(name, aligned=aligned), shape)
    assert n_parameters(model) == sizes
    n_scales = int(hasattr(model.encoder.head, "log_scale"))  # could be part of the head's weights
    assert n_parameters(model)[0] == count(model.encoder) - n_scales


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_encoder_and_what_the_loop_asks_for(method):
    settings = config("mnist_daps", method=method, width=16, vocab_size=16, fsq_levels="4 4")
    model = build_model(settings | {"ppo_epochs": 3, "n_samples": 5, "aligned": True}, X_SHAPE)
    kinds = {method in AUTOREGRESSIVE: "AutoregressiveEncoder", method in VECTORS: "VectorEncoder"}
    assert type(model.encoder).__name__ == kinds.get(True, "OnePassEncoder")
    assert getattr(model.encoder, "aligned", True) and getattr(model, "n_samples", 5) == 5
    assert model.n_epochs == (3 if method == "ppo" else 1)
    relaxed = method.startswith(("gumbel", "grmck", "reinmax"))
    assert (model.tau is not None) == ("tau" in dict(model.named_buffers())) == relaxed
    x, noise = torch.rand(3, *X_SHAPE).round(), torch.rand(3, *model.noise_shape)
    loss, metrics = model(x, 0.1, noise=noise)
    assert loss.requires_grad and loss.dim() == 0 and "reward" in metrics
    model.eval()
    z, kl = model.encode(x, with_kl=True, noise=torch.rand(3, 1, 8))
    assert (kl is None) == (method in ("vqvae", "fsq")) and len(z) == 3
    assert model.decode(z).mean.shape == x.shape == model.sample(3).mean.shape


def test_levels_of_fsq_are_numbers():
    assert fsq_levels({"fsq_levels": "8 8 4"}) == [8, 8, 4]
    for wrong in ("", "8, 8, 4", "8 x 4", "-8 8"):
        with pytest.raises(ValueError, match="fsq_levels is"):
            fsq_levels({"fsq_levels": wrong})


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_an_encoder_gets_a_gradient(kind):
    model = encoder(kind)
    _, log_q = model(torch.rand(2, *X_SHAPE), 4)
    log_q.sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_a_training_pass_encodes_x_once_and_keeps_no_graph_of_sampling(kind):
    model = encoder(kind)
    calls = []
    model.patch_encoder.register_forward_hook(lambda *call: calls.append(call))
    model(torch.rand(2, *X_SHAPE), 4)
    assert len(calls) == 1
    assert not model.sample(torch.rand(2, *X_SHAPE), 4).requires_grad


# long codes: chunks, recomputation, bfloat16, compilation


def test_the_view_of_the_cache_grows_by_chunks_and_holds_every_token_so_far():
    assert windows(5, 1) == [1, 2, 3, 4, 5]
    assert windows(10, 4) == [4, 4, 4, 4, 8, 8, 8, 8, 10, 10]
    assert windows(3, 128) == [3, 3, 3]


def sure_noise(model, patches, n_samples, least=0.1):
    """Noise (N, K, B) for codes that do not depend on rounding: every token has a probability of
    at least `least`, and its noise is in the middle of the interval that selects it.

    An error d of all logits moves the distribution function by d / 2 at most. In bfloat16, logits
    below 8 have steps of 1/32 at most: twice this, and still less than half of least / 2.
    """
    noise = torch.rand(len(patches), 500, model.n_tokens)
    with torch.no_grad():
        z = model.sample_codes(patches, 500, noise).unsqueeze(-1)
        q = model.logits(patches, z.squeeze(-1)).float().softmax(dim=-1)  # (N, 500, B, V)
    p = q.gather(-1, z).squeeze(-1)  # of the tokens of each code
    middle = q.cumsum(dim=-1).gather(-1, z).squeeze(-1) - p / 2
    unsure = p.amin(dim=-1) < least  # (N, 500)
    first = unsure.int().argsort(dim=1, stable=True)[:, :n_samples]
    assert not unsure.gather(1, first).any()
    return middle.gather(1, first.unsqueeze(-1).expand(-1, -1, model.n_tokens))


@pytest.mark.parametrize("chunk", (3, 4, 64))
def test_a_cache_that_grows_in_chunks_changes_nothing(chunk, fresh_dynamo):
    model = encoder("aligned", n_tokens=10, vocab_size=4, spread=0.5)
    patches = model.patch_encoder(torch.rand(3, *X_SHAPE))
    noise = sure_noise(model, patches, 5)
    one_by_one = model.sample_codes(patches, 5, noise)
    model.compile_sampler(chunk=chunk, backend="eager")
    assert torch.equal(model.sample_codes(patches, 5, noise), one_by_one)
    assert len(one_by_one.flatten(0, 1).unique(dim=0)) > 8  # codes that differ


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", ("plain", "aligned", "tied"))
def test_the_static_sampler_draws_the_codes_of_the_plain_loop(kind, dtype, fresh_dynamo):
    """Also after the parameters changed: it has copies of them, updated for every batch."""
    plain = encoder(kind, n_tokens=7, vocab_size=4, n_layers=1, spread=0.5)
    tables = [torch.nn.Embedding(4, 32)] if kind == "tied" else []
    if tables:
        plain.head = TiedHead(32, *tables)
    plain.head.log_scale.data.fill_(0.3)
    plain.head.bias.data.normal_(std=0.3)
    static, names, all_codes = copy.deepcopy(plain), list(plain.state_dict()), []
    if tables:
        static.head.table = tables
    static.compile_sampler(chunk=3, backend="eager")
    for x in torch.rand(2, 2, *X_SHAPE):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16"):
            patches = plain.patch_encoder(x)
            noise = sure_noise(plain, patches, 6)
            codes = plain.sample_codes(patches, 6, noise)
            assert torch.equal(static.sample_codes(patches, 6, noise), codes)
            assert torch.equal(static.sample(x, 6, noise), codes)
            static.sample(x.flip(0), 6)  # must not leak into the next batch
        all_codes.append(codes)
        for p in (*plain.parameters(), *(table.weight for table in tables)):
            p.data.add_(0.7 * p.data.square().mean().sqrt() * torch.randn_like(p))
        static.load_state_dict(plain.state_dict())
    assert len(torch.cat(all_codes).flatten(0, 1).unique(dim=0)) > 12
    assert list(static.state_dict()) == names  # it is not part of a checkpoint


@torch.no_grad()
def test_the_static_sampler_rounds_logits_to_bfloat16_just_as_scoring_does(fresh_dynamo):
    """Large biases, as after a k-means start: rounded once more, logits would be off by 0.2."""
    model = encoder("plain", n_tokens=7, vocab_size=64, n_layers=1)
    model.head.bias.normal_(std=20)
    model.head.log_scale.fill_(0.5)
    model.compile_sampler(backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        model.sample(torch.rand(2, *X_SHAPE), 3)
        (sampler,) = model.static_samplers.values()
        h = torch.randn(10, 32)
        assert torch.equal(sampler.head(h), model.head(h))


def test_a_batch_that_is_not_finite_leaves_nothing_behind_in_the_static_sampler(fresh_dynamo):
    model = encoder("plain", n_tokens=7, vocab_size=4, n_layers=2, spread=0.5)
    x, noise = torch.rand(2, *X_SHAPE), torch.rand(2, 3, 7)
    model.compile_sampler(chunk=7, backend="eager")
    codes = model.sample(x, 3, noise)
    model.sample(torch.full_like(x, math.nan), 3, noise)
    assert torch.equal(model.sample(x, 3, noise), codes)


def test_one_graph_per_shape_of_codes_serves_all_tokens(fresh_dynamo):
    """The windows grow, 3, 6, 7; the position is a tensor: nothing is compiled again."""
    model = encoder("plain", n_tokens=7, vocab_size=4, n_layers=1)
    model.compile_sampler(chunk=3, backend="aot_eager")
    patches, graphs = model.patch_encoder(torch.rand(2, *X_SHAPE)), []
    for n_samples in (2, 3, 2, 3):
        model.sample_codes(patches, n_samples)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 1 and graphs[1] == graphs[2] == graphs[3] <= 2


@pytest.mark.parametrize("compiled", (False, True))
def test_sampling_in_the_same_autocast_region_loses_no_gradient(compiled, fresh_dynamo):
    """Autocast keeps the weights it has cast. Those cast without gradient, while sampling, must not
    be used in the pass that needs one (pytorch #165068). The reference samples elsewhere."""
    recognition = encoder("aligned", vocab_size=4, n_layers=1, spread=1.0)
    model = DAPS(recognition, MLPDecoder(X_SHAPE, 8, 4, 32), n_samples=4)
    x, noise = torch.rand(3, *X_SHAPE).round(), torch.rand(3, 4, 8)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if compiled:
        model.encoder.compile_sampler(chunk=8, backend="eager")

    def gradients(before=lambda: None):
        with torch.autocast("cpu", torch.bfloat16):
            before()
            loss, _ = model(x, 0.1, noise=noise)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return dict(zip(parameters, found, strict=True))

    alone = gradients()
    after = gradients(lambda: model.encode(x, noise=noise[:, :1]))
    with torch.autocast("cpu", torch.bfloat16):
        z = model.encoder.sample(x, 4, noise)
    model.encoder.sample_codes = lambda *call: z
    expected = gradients()
    for name, gradient in expected.items():
        size = gradient.abs().max().item()
        assert size > 0, name
        for ours in (alone[name], after[name]):  # the same products, so the last bit of bfloat16
            torch.testing.assert_close(ours, gradient, rtol=2**-7, atol=2**-7 * size)


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_recomputing_in_pieces_changes_neither_scores_nor_gradients(kind):
    model = encoder(kind)
    x, noise = torch.rand(5, *X_SHAPE), torch.rand(5, 3, 8)
    results = []
    for pieces in (0, 1, 2, 5, 8):
        model.recompute = pieces
        z, log_q, kl = model(x, 3, noise, with_kl=True)
        loss = (log_q.sin() + kl).sum()
        results.append((z, log_q, kl, *torch.autograd.grad(loss, list(model.parameters()))))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_recomputing_in_pieces_keeps_no_logits():
    """Nothing kept for the backward pass is as large as the logits."""
    model, kept = encoder("plain", vocab_size=300), []

    def pack(t):
        kept.append(t.numel())
        return t

    x, noise = torch.rand(4, *X_SHAPE), torch.rand(4, 3, 8)
    for pieces in (0, 4):
        kept.clear()
        model.recompute = pieces
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x, 3, noise)
        assert (max(kept) >= 4 * 3 * 8 * 300) == (pieces == 0)


def test_sampling_and_teacher_forcing_in_bfloat16_agree_as_well_as_it_allows():
    """Logits between 4 and 8 have steps of 1/32. An error of one step per token, independent of the
    others, comes to sqrt(64) / 32 in a code of 64."""
    model = encoder("aligned", n_tokens=64, spread=1.0)
    x, noise = torch.rand(3, *X_SHAPE), torch.rand(3, 5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        z, log_q = model(x, 5, noise)
        sampled = stepwise_log_prob(model, x, z, noise)
    assert log_q.dtype == torch.float32
    torch.testing.assert_close(sampled, log_q.detach(), atol=64**0.5 / 32, rtol=0)


@pytest.mark.parametrize("aligned", (False, True))
@pytest.mark.parametrize("dtype, bound", [("float32", 8 * 2**-12), ("bfloat16", 1024**0.5 / 32)])
def test_codes_of_1024_tokens_are_scored_as_they_are_sampled(aligned, dtype, bound):
    """log q of a code, the sum of 1,024 terms, by the cached sampler and by teacher forcing. It is
    near -3,000, where float32 has steps of 2^-12: eight of them. bfloat16: see above."""
    torch.manual_seed(0)
    model = AutoregressiveEncoder((3, 64, 64), 1024, 64, 32, 2, 2, 2, aligned=aligned)
    model.head.weight.data *= 2  # probabilities that are far from uniform
    x, noise = torch.rand(2, 3, 64, 64), torch.rand(2, 2, 1024)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        z, log_q = model(x, 2, noise)
        sampled = stepwise_log_prob(model, x, z, noise)
    assert log_q.dtype == sampled.dtype == torch.float32
    torch.testing.assert_close(sampled, log_q, atol=bound, rtol=0)


# ResNets


@pytest.mark.parametrize("side, n_tokens", [(32, 64), (256, 1024)], ids=("cifar10", "imagenet"))
def test_images_are_decoded_to_their_shape(side, n_tokens):
    decoder = ResNetDecoder((3, side, side), n_tokens, 16, 128)
    z = torch.randint(16, (2, 1, n_tokens))
    assert decoder(z).mean.shape == (2, 1, 3, side, side)


def test_one_code_alone_is_decoded_as_among_others():
    motion = MotionDecoder((4, 5), 8, 16, 16, 2, 1, 2)
    decoders = (ResNetDecoder((3, 16, 16), 16, 16, 16), motion, MLPDecoder((1, 6, 6), 4, 16, 8))
    for decoder, n_tokens in zip(decoders, (16, 8, 4), strict=True):
        decoder.eval()
        z = torch.randint(16, (2, 3, n_tokens))
        torch.testing.assert_close(decoder(z[1, 2]).mean, decoder(z).mean[1, 2])


def test_shapes_through_every_layer_of_the_resnet():
    decoder, shapes = ResNetDecoder((3, 32, 32), 64, 512, 128), []
    for layer in decoder.net:
        layer.register_forward_hook(lambda layer, i, out: shapes.append(tuple(out.shape[1:])))
    decoder.log_prob(torch.randn(2, 3, 32, 32), torch.randint(512, (2, 3, 64)))
    up = [(64, 8, 8), (32, 16, 16), (32, 16, 16), (32, 16, 16), (6, 32, 32)]
    assert shapes == [(64, 8, 8)] * 3 + up
    encoder = ResNetEncoder((3, 32, 32), 64, 512, dim=16)
    assert encoder(torch.randn(2, 3, 32, 32)).shape == (2, 64, 16)


def test_the_gaussian_likelihood_is_that_of_torch_distributions():
    torch.manual_seed(0)
    decoder = ResNetDecoder((3, 8, 8), 16, 10, 8, hidden=8)
    x, z = torch.randn(4, 3, 8, 8), torch.randint(10, (4, 5, 16))
    decoder.log_prob(x, z)
    decoder.eval()
    ours = decoder.log_prob(x, z)  # (4, 5)
    mean, log_var = decoder.moments(z)
    normal = torch.distributions.Normal(mean.double(), log_var.double().exp().sqrt())
    theirs = normal.log_prob(x.unsqueeze(1).double()).sum(dim=(2, 3, 4))
    torch.testing.assert_close(ours.double(), theirs, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(decoder(z).log_prob(x.unsqueeze(1)), ours, atol=1e-3, rtol=1e-5)


def test_the_variance_is_clipped_and_has_gradient_inside_the_clip_alone():
    decoder = ResNetDecoder((3, 8, 8), 16, 10, 8, hidden=8)
    raw = torch.tensor([-9.0, -4.7, -4.5, -1.0, -0.1, 0.1, 5.0])
    bias = decoder.net[-1].bias
    decoder.net[-1].weight.data.zero_()
    x, z = torch.randn(1, 3, 8, 8), torch.randint(10, (1, 1, 16))
    for value in raw:
        bias.data[3:] = value
        decoder.zero_grad()
        variance = decoder.moments(z)[1].exp()
        assert variance.min() >= 0.01 - 1e-6 and variance.max() <= 1
        decoder.log_prob(x, z).sum().backward()
        assert (bias.grad[3:] != 0).all() == (math.log(0.01) < value < 0)
        assert (bias.grad[:3] != 0).all()


@pytest.mark.parametrize(
    "shape, n_tokens", [((3, 32, 32), 60), ((3, 32, 24), 64), ((3, 48, 48), 64)]
)
def test_images_that_do_not_halve_to_a_square_of_tokens_are_refused(shape, n_tokens):
    with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}"):
        ResNetDecoder(shape, n_tokens, 512, 128)


def test_the_resnet_starts_with_outputs_of_the_size_of_the_data():
    torch.manual_seed(0)
    mean, _ = ResNetDecoder((3, 32, 32), 64, 512, 128).moments(torch.randint(512, (64, 64)))
    assert 0.3 < mean.std() < 3


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_a_few_keys_is_what_pytorch_computes(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 8, 4, requires_grad=True) for _ in range(3))
    written_out = attend(q, k, v, causal=causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(written_out, expected)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((written_out * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert attend(1e4 * q, k, v).isfinite().all()


def test_short_attention_in_bfloat16_has_the_softmax_of_pytorch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3))
    q, k = 3 * q, 3 * k
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    error = attend(q, k, v, causal=True).double() - expected
    assert error.square().mean().sqrt() < 0.002  # a softmax in bfloat16 has 0.003


def test_the_reward_of_binary_images_is_summed_in_float32_under_autocast(monkeypatch):
    torch.manual_seed(0)
    decoder = MLPDecoder(X_SHAPE, 8, 16, 32)
    x = torch.randint(2, (4, *X_SHAPE)).float()
    logits = 4 * (2 * x.flatten(1).unsqueeze(1) - 1) + torch.randn(4, 3, 784)
    monkeypatch.setattr(decoder, "logits", lambda z: logits)
    with torch.autocast("cpu", torch.bfloat16):
        ours = decoder.log_prob(x, None)
    expected = torch.distributions.Bernoulli(logits=logits.double())
    expected = expected.log_prob(x.flatten(1).unsqueeze(1).double()).sum(dim=-1)
    torch.testing.assert_close(ours, expected.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_tokens_and_their_gradient_are_those_of_cross_entropy(dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(4, 3, 7)).to(dtype).requires_grad_()
    z, weight = torch.randint(7, (4, 3)), torch.randn(4, 3)
    ours = token_log_prob(logits, z)
    expected = -F.cross_entropy(logits.float().flatten(0, 1), z.flatten(), reduction="none")
    torch.testing.assert_close(ours, expected.view(4, 3))
    (gradient,) = torch.autograd.grad((ours * weight).sum(), logits)
    (true,) = torch.autograd.grad((expected.view(4, 3) * weight).sum(), logits)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, true)
