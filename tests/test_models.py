"""models.py, sampler.py, build.py against enumeration, other libraries and the paper's sizes."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import config, log_prob_of_all

import models
from build import METHODS, build_model
from experiments.passes import ParallelSampler
from models import AutoregressiveEncoder, OnePassEncoder, Scale, Sizes, attend, token_log_prob
from report import n_parameters
from sampler import CompiledSampler
from vocabulary import split_values

X_SHAPE = (1, 28, 28)
SAME = Scale(torch.zeros(1), torch.ones(1))  # changes nothing
KINDS = ("plain", "aligned", "one pass")


def encoder(kind, n_tokens=8, vocab_size=16, n_layers=2, x_shape=X_SHAPE, spread=3.0):
    """A small encoder with spread-out logits: it prefers some tokens and depends on the past."""
    sizes = Sizes(x_shape, n_tokens, vocab_size, 32, n_layers, mlp_ratio=2)
    if kind == "one pass":
        model = OnePassEncoder(sizes, SAME)
    else:
        model = AutoregressiveEncoder(sizes, SAME, aligned=kind == "aligned")
    model.head.weight.data *= spread
    model.head.centre += 0.1 * torch.arange(n_tokens).view(-1, 1)  # as start_from_clusters may
    return model


def logits_of(model, x, z):
    """Logits of every token of codes z (N, K, B) by teacher forcing: (N, K, B, V)."""
    if not model.autoregressive:
        return model.logits(x).unsqueeze(1)
    return model.tokens.logits(model.tokens.context(model.patch_encoder(x)), z)


# codes and their probabilities

CASES = [("plain", 1, 32), ("plain", 8, 32), ("plain", 64, 32)]
CASES += [("aligned", 64, 32), ("aligned", 1024, 32), ("aligned", 64, 16)]


@pytest.mark.parametrize("kind, n_tokens, bits", CASES)
def test_codes_are_scored_by_teacher_forcing_as_they_are_sampled_with_a_cache(kind, n_tokens, bits):
    """log q of a code, the sum over its tokens, is about -3 a token. In float32, the sum is off by
    eight steps at most: 1e-4 for 64 tokens. In bfloat16, logits between 4 and 8 have steps of 1/32;
    an error of one step per token, independent of the others, comes to sqrt(B) / 32."""
    model = encoder(kind, n_tokens, x_shape=(1, 64, 64), spread=1.0)
    x, noise, recorded = torch.rand(2, 1, 64, 64), torch.rand(2, 3, n_tokens), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
        z, log_q = model(x, 3, noise)
        model.head.register_forward_hook(lambda *call: recorded.append(call[-1]))
        assert torch.equal(model.sample(model.patch_encoder(x), noise), z)
    sampled = token_log_prob(torch.cat(recorded, dim=2), z).sum(dim=-1)  # (N, K)
    bound = 8 * 2.0 ** (math.floor(math.log2(3 * n_tokens)) - 23)
    bound = max(bound, 2e-5) if bits == 32 else n_tokens**0.5 / 32
    torch.testing.assert_close(sampled, log_q, atol=bound, rtol=0)
    assert log_q.dtype == torch.float32 and log_q.std() > 0.1


def test_a_code_begins_with_an_embedding_that_is_no_token():
    model, x, z = encoder("plain"), torch.rand(1, *X_SHAPE), torch.zeros(1, 1, 8, dtype=torch.long)
    first, table = [logits_of(model, x, z)[..., 0, :]], model.tokens.embed.weight.data
    for rows in (slice(16), slice(16, 17)):  # all tokens, then the last
        table[rows] += torch.randn_like(table[rows])
        first.append(logits_of(model, x, z)[..., 0, :])
    assert torch.equal(first[0], first[1]) and not torch.allclose(first[1], first[2])


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_have_the_probability_they_are_drawn_with_and_their_kl_is_exact(kind):
    """B = 3, V = 3: probabilities sum to one and match the frequencies, also of codes that contain
    token 0; the KL along codes is that of q, when averaged over all of them."""
    model, x, n = encoder(kind, 3, 3, spread=1.0), torch.rand(1, *X_SHAPE), 20_000
    codes = torch.tensor(list(itertools.product(range(3), repeat=3)))  # (27, 3)
    noise = torch.rand(1, n, 3)
    with torch.no_grad():
        p = log_prob_of_all(model, x, codes).exp()  # (27,)
        z, log_q, kl = model(x, n, noise, with_kl=True)
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    index = (z[0] * torch.tensor([9, 3, 1])).sum(dim=-1)
    torch.testing.assert_close(log_q[0], p.log()[index], atol=1e-4, rtol=0)
    chi_square = ((torch.bincount(index, minlength=27) - n * p) ** 2 / (n * p)).sum().item()
    assert chi_square < 54.1  # 0.999 quantile, 26 degrees of freedom
    assert p.max() / p.min() > 3  # far from uniform: a wrong sampler would show
    along = torch.zeros(27).index_put((index,), kl.expand(1, n)[0])  # of each code
    exact = (p * (p.log() + 3 * math.log(3))).sum().item()
    assert (p * along).sum().item() == pytest.approx(exact, abs=1e-5) and len(index.unique()) == 27


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_a_token_depends_on_the_past_and_not_on_the_future_or_on_other_codes(kind):
    model, x, z = encoder(kind), torch.rand(4, *X_SHAPE), torch.randint(16, (1, 1, 8))
    other = z.clone()
    other[..., 4] = (z[..., 4] + 1) % 16
    a, b = logits_of(model, x[:1], z), logits_of(model, x[:1], other)
    assert torch.equal(a[:, :, :5], b[:, :, :5])
    assert not torch.allclose(a[:, :, 5:], b[:, :, 5:])
    noise = torch.rand(4, 3, 8)
    z, log_q = model(x, 3, noise)
    alone, log_q_alone = model(x[2:3], 1, noise[2:3, 1:2])
    assert torch.equal(alone[0, 0], z[2, 1])
    torch.testing.assert_close(log_q_alone[0, 0], log_q[2, 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_x_is_encoded_once_and_every_parameter_gets_a_gradient(kind):
    model, calls = encoder(kind), []
    patch_encoder = model.net[0] if kind == "one pass" else model.patch_encoder
    patch_encoder.register_forward_hook(lambda *call: calls.append(call))
    z, log_q, _ = model(torch.rand(2, *X_SHAPE), 4, with_kl=True)
    log_q.sum().backward()
    assert len(calls) == 1 and z.shape == (2, 4, 8)
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_tokens_and_their_gradient_are_those_of_cross_entropy(dtype):
    logits = (5 * torch.randn(4, 3, 7)).to(dtype).requires_grad_()
    z, weight = torch.randint(7, (4, 3)), torch.randn(4, 3)
    ours = token_log_prob(logits, z)
    theirs = -F.cross_entropy(logits.float().transpose(1, 2), z, reduction="none")
    torch.testing.assert_close(ours, theirs)
    pair = (torch.autograd.grad((t * weight).sum(), logits) for t in (ours, theirs))
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_a_few_keys_is_what_pytorch_computes(causal):
    q, k, v = (torch.randn(3, 2, 8, 4, requires_grad=True) for _ in range(3))
    written_out = attend(q, k, v, causal=causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(written_out, expected)
    ours, theirs = (torch.autograd.grad(t.sin().sum(), (q, k, v)) for t in (written_out, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert attend(1e4 * q, k, v).isfinite().all()


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_relaxed_codes_have_the_logits_and_gradients_of_teacher_forcing(kind):
    """Although they are made token by token, with keys and values in a cache."""
    model, x, z = encoder(kind), torch.rand(3, *X_SHAPE), torch.randint(16, (3, 8))
    _, logits = model.relaxed(x, lambda logits, t: F.one_hot(z[:, t], 16).float())
    pair = logits, logits_of(model, x, z.unsqueeze(1)).squeeze(1)  # (3, B, V) each
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-5)
    ours, expected = (torch.autograd.grad(t.sin().sum(), list(model.parameters())) for t in pair)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * b.abs().max().item())
    y = F.one_hot(z, 16).float().requires_grad_()
    _, logits = model.relaxed(x, lambda logits, t: y[:, t])
    (through,) = torch.autograd.grad(logits[:, -1].sin().sum(), y)  # all tokens but the last
    assert ((through.abs().amax(dim=(0, 2)) > 0) == (torch.arange(8) < 7)).all()


@pytest.mark.parametrize("bits", (16, 32))
@pytest.mark.parametrize("kind, chunk", [("plain", 3), ("aligned", 4), ("aligned", 64)])
def test_the_compiled_sampler_draws_what_the_noise_selects(kind, chunk, bits, fresh_dynamo):
    """By teacher forcing: noise is in the token's interval of the distribution function, which an
    error d of logits moves by d / 2 at most. In bfloat16, logits below 8 have steps of 1/32. Also
    after the parameters changed, of which it has copies, and after a batch that is not finite."""
    model = encoder(kind, n_tokens=7, vocab_size=4, spread=0.5)
    model.head.log_scale.data.fill_(0.3)
    model.head.bias.data.normal_(std=2.0)
    model.sampler = CompiledSampler(chunk, backend="eager")
    for x in torch.rand(2, 2, *X_SHAPE):
        noise = torch.rand(2, 6, 7)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
            model(torch.full_like(x, math.nan), 6)
            z, _ = model(x, 6, noise)
            q = logits_of(model, x, z).float().softmax(dim=-1)  # (2, 6, 7, 4)
            (static,) = model.sampler.samplers.values()
            h = torch.randn(10, 7, 32)
            assert torch.equal(static.tokens.head(h), model.head(h))  # rounded alike
        p, high = (t.gather(-1, z.unsqueeze(-1)).squeeze(-1) for t in (q, q.cumsum(dim=-1)))
        slack = 1e-5 if bits == 32 else 1 / 32
        assert (noise > high - p - slack).all() and (noise < high + slack).all()
        assert len(z.flatten(0, 1).unique(dim=0)) > 6
        for parameter in model.parameters():
            parameter.data.add_(0.5 * parameter.data.square().mean().sqrt())
    assert "sampler" not in str(model.state_dict().keys())  # it is not part of a checkpoint


@pytest.mark.parametrize("kind", ("plain", "aligned"))
def test_parallel_codes_are_those_drawn_token_by_token(kind):
    """In two passes where tokens do not depend on each other, and never more than tokens + 1."""
    model, x = encoder(kind, 9, 11, spread=2.0), torch.randn(6, *X_SHAPE)
    noise, found = torch.rand(6, 4, 9), []
    for times in (1.0, 100.0, 0.0):  # a token depends so many times as much on others
        model.tokens.embed.weight.data.mul_(times)
        patches = model.patch_encoder(x)
        context = model.tokens.context(patches)
        z, n_passes = ParallelSampler()(model.tokens, context, noise)
        assert torch.equal(z, model.sample(patches, noise)) and len(z.unique()) > 5
        found.append(n_passes)
    assert found[2] == 2 < found[0] <= found[1] <= 10


@pytest.mark.parametrize("compiled", (False, True))
def test_sampling_in_the_same_autocast_region_loses_no_gradient(compiled, fresh_dynamo):
    """Autocast keeps the weights it has cast. Those cast without gradient, while sampling, must not
    be used in the pass that needs one (pytorch #165068). The reference samples elsewhere."""
    model = encoder("aligned", vocab_size=4, n_layers=1, spread=1.0)
    model.sampler = CompiledSampler(chunk=8, backend="eager") if compiled else None
    x, noise = torch.rand(3, *X_SHAPE), torch.rand(3, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        z, log_q = model(x, 4, noise)
    ours = torch.autograd.grad(log_q.sin().sum(), list(model.parameters()))
    model.sample = lambda *call: z
    with torch.autocast("cpu", torch.bfloat16):
        _, log_q = model(x, 4, noise)
    expected = torch.autograd.grad(log_q.sin().sum(), list(model.parameters()))
    for a, b in zip(ours, expected, strict=True):  # the same products, so the last bit of bfloat16
        size = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * size)
        assert size > 0


# the networks of a run


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
def test_the_models_of_a_config_have_the_sizes_of_the_authors_models(name, shape, sizes):
    """Ours have a begin-of-code embedding of their own (+ H, autoregressive) and no second linear
    layer before the linear head (- 64 * 65, one pass). With the decoder we count the code vectors
    of VQ-VAE and FSQ's linear layer from three numbers; theirs has other levels."""
    for aligned in (False, True):
        model = build_model(config(name, aligned=aligned), shape)
        assert n_parameters(model) == sizes


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_what_the_loop_asks_for_and_a_mode(method):
    """The mode is deterministic; each token is the likeliest, given those before it."""
    settings = config("mnist_daps", method=method, width=16, vocab_size=16, fsq_levels="4 4")
    model = build_model(settings, X_SHAPE)
    x, noise = torch.rand(3, *X_SHAPE).round(), torch.rand(3, *model.noise_shape)
    loss, metrics = model(x, 0.1, noise=noise)
    assert loss.requires_grad and loss.dim() == 0 and "reward" in metrics
    assert ("kl" in metrics) == model.has_kl == (method not in ("vqvae", "fsq"))
    z = model.eval().encode(x, mode=True)
    assert torch.equal(model.encode(x, mode=True), z) and model.discrete == (z.dtype == torch.long)
    assert model.decode(z).mean.shape == x.shape == model.sample(3).mean.shape
    if hasattr(model.encoder, "mode"):
        logits = logits_of(model.encoder, x, z.unsqueeze(1)).squeeze(1)  # (3, B, V)
        chosen = logits.gather(2, z.unsqueeze(2)).squeeze(2)  # (3, B)
        assert (logits.amax(dim=2) - chosen).max() < 1e-4  # rounding
        assert not torch.equal(model.encode(x), z)
        torch.testing.assert_close(model.encoder.proposals(x, z), logits)
    elif model.discrete:
        assert torch.equal(model.proposals(x, z).argmax(dim=2), z)
    model.decode = lambda z: z
    drawn = model.sample(1000)
    if model.discrete:
        assert all(len(drawn[:, t].unique()) == 16 for t in range(8))
    else:
        assert drawn.std().item() == pytest.approx(1, abs=0.1)


@torch.no_grad()
@pytest.mark.parametrize("method", ("daps", "daps_na"))
def test_a_split_with_noise_changes_neither_merged_q_nor_the_decoding_of_live_values(method):
    options = dict(method=method, width=16, vocab_size=6, split_interval=50)
    model = build_model(config("mnist_daps", **options), X_SHAPE)
    model.encoder.head.log_scale.fill_(0.7)
    model.decoder.usage.copy_(torch.tensor([90, 40, 0, 50, 1, 60]))  # 2 and 4 are rare
    x, z = torch.rand(4, *X_SHAPE).round(), torch.tensor([0, 1, 3, 5, 5, 3, 1, 0]).expand(4, 1, 8)
    seen = []
    for _ in range(2):
        q = logits_of(model.encoder, x, z).softmax(dim=-1)
        seen.append((q, model.decoder.log_prob(x, z)))
        split_values(model, torch.optim.AdamW(model.parameters()), torch.Generator(), noise=0.2)
    (before, log_px), (after, log_px_after) = seen
    live, source = [0, 1, 3, 5], [0, 5]  # the most common, with 90; then 60 against 90 / 2
    torch.testing.assert_close(after[..., source], after[..., [2, 4]])  # half for each
    after[..., source] += after[..., [2, 4]]
    expected = before[..., live] / before[..., live].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(after[..., live], expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(log_px, log_px_after)
    assert not torch.equal(*model.decoder.embed(torch.tensor([[2, 4], source])))  # can diverge


# patches and decoders


def test_patches_tile_the_padded_image():
    x = torch.rand(2, *X_SHAPE)  # padded by 2 columns on both sides, cut into 2 x 4
    patches = models.Patches(X_SHAPE, 8)(x)
    assert patches.shape == (2, 8, 14 * 8)
    assert torch.equal(patches[0, 1].view(14, 8), x[0, 0, :14, 6:14])
    torch.testing.assert_close(patches.sum(), x.sum())


def test_the_bernoulli_likelihood_is_that_of_torch_distributions_even_under_autocast():
    decoder = models.MLPDecoder(Sizes(X_SHAPE, 8, 16, 32))
    x, z = torch.rand(3, *X_SHAPE).round(), torch.randint(16, (3, 5, 8))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            p, ours = decoder(z), decoder.log_prob(x, z)
            theirs = torch.distributions.Bernoulli(logits=p.logits.double())
        expected = theirs.log_prob(x.unsqueeze(1).double()).sum(dim=(2, 3, 4))
        for found in (ours, p.log_prob(x.unsqueeze(1))):  # sums near -500: steps of 3e-5
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)
        torch.testing.assert_close(p.mean.double(), theirs.mean, rtol=0, atol=1e-6)


def test_regions_and_windows_are_where_the_tokens_are():
    """4 x 4 tokens, each of which has 2 x 2 pixels and changes those most."""
    decoder = small_resnet().eval()
    x, z = torch.rand(2, 3, 8, 8), torch.randint(9, (2, 5, 16))
    terms, regions = decoder(z).terms(x.unsqueeze(1)), decoder.regions(x, z)
    torch.testing.assert_close(regions[..., 6], terms[..., 2:4, 4:6].sum(dim=(2, 3, 4)))
    other = z.clone()
    other[..., 6] += 1
    moved = (decoder(other).mean - decoder(z).mean).abs().sum(dim=(0, 1, 2))
    assert F.avg_pool2d(moved[None], 2).argmax() == 6
    decoder.window = 3
    around = {models.ResNetDecoder: [0, 1, 2, 4, 5, 6], models.MotionDecoder: [0, 1, 2]}
    for kind, tokens in around.items():
        found = kind.credit(decoder, regions)[..., 1]
        torch.testing.assert_close(found, regions[..., tokens].sum(dim=-1))


def test_an_aligned_query_sees_the_patch_of_its_own_token():
    model = encoder("aligned", n_layers=1)
    model.tokens.blocks[0].cross.out.weight.data.zero_()  # patches enter at the query alone
    patches, z = torch.randn(1, 8, 32), torch.randint(16, (1, 1, 8))
    other = patches.clone()
    other[:, 4] = torch.randn(1, 32)
    a, b = (model.tokens.logits(model.tokens.context(p), z)[0, 0] for p in (patches, other))
    assert ((a - b).abs().amax(dim=1) > 1e-4).tolist() == [t >= 4 for t in range(8)]


def small_resnet(scale=SAME):
    return models.ResNetDecoder(Sizes((3, 8, 8), 16, 10, 8), scale, hidden=8)


def test_the_gaussian_likelihood_is_that_of_torch_distributions_in_standardised_units():
    mean, std = torch.rand(3, 1, 1), 0.1 + torch.rand(3, 1, 1)
    decoder = small_resnet(Scale(mean, std)).eval()
    x, z = torch.rand(4, 3, 8, 8), torch.randint(10, (4, 5, 16))
    p, standard = decoder(z), ((x - mean) / std).double()
    normal = torch.distributions.Normal(p.standard_mean.double(), (p.log_var.double() / 2).exp())
    expected = normal.log_prob(standard.unsqueeze(1)).sum(dim=(2, 3, 4))
    for ours in (decoder.log_prob(x, z), p.log_prob(x.unsqueeze(1))):
        torch.testing.assert_close(ours.double(), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(p.mean.double(), normal.mean * std + mean)  # in the units of x
    torch.testing.assert_close(p.error(x.unsqueeze(1)), p.mean.clamp(0, 1) - x.unsqueeze(1))


def test_the_variance_is_clipped_and_has_gradient_inside_the_clip_alone():
    decoder = small_resnet()
    *_, weight, bias = decoder.parameters()
    weight.data.zero_()
    bias.data[3:] = torch.tensor([-4.7, -1.0, 0.1])  # log variances of three channels
    x, z = torch.randn(1, 3, 8, 8), torch.randint(10, (1, 1, 16))
    variance = decoder(z).log_var[0, 0, :, 0, 0].exp()
    torch.testing.assert_close(variance, torch.tensor([0.01, math.exp(-1), 1.0]))
    decoder.log_prob(x, z).sum().backward()
    assert (bias.grad != 0).tolist() == [True, True, True, False, True, False]
