"""prior.py against exact results, where chains can be enumerated and distributions are known; and
as a user runs it."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from conftest import ROOT, TINY, run, succeed
from PIL import Image

import prior as script
from checkpoint import StopSignal, load_checkpoint
from configurator import defaults
from prior import (
    Prior,
    bound_rate,
    cross_entropy,
    draw,
    flow_bits,
    guided,
    load_prior,
    marginal_bits,
    marginal_samples,
    noisy,
    posterior,
    spread,
    step_probabilities,
)

V = 3
CODES = torch.cartesian_prod(*[torch.arange(V)] * 2)  # (9, B)
ONE_HOT = torch.nn.functional.one_hot(CODES, V).double()  # (9, B, V)
NEIGHBOURS = (CODES.unsqueeze(1) != CODES).sum(dim=2) == 1  # (9, 9): one token differs


def random_target(seed):
    p = torch.rand(len(CODES), generator=torch.Generator().manual_seed(seed)).double() ** 2 + 0.01
    return p / p.sum()


def path_probabilities(t, codes=CODES, vocab_size=V):
    """p(z_t | z_1) as it is defined, for M codes: (M, M), a row for each z_t, a column for z_1."""
    equal = (codes.unsqueeze(1) == codes).double()  # (M, M, B)
    return (t * equal + (1 - t) / vocab_size).prod(dim=2)


def exact_posterior(target, t):
    """log p(z_1^i | z_t) for every z_t, by a sum over all codes: (9, B, V)."""
    joint = path_probabilities(t) * target
    return torch.einsum("nm,mbv->nbv", joint / joint.sum(dim=1, keepdim=True), ONE_HOT).log()


def end_of_chain(log_p_at, n_steps, codes=CODES):
    """The exact distribution of codes after n_steps from noise, as a product of matrices: (M,).
    log_p_at(t) gives posteriors for every z_t: the truth, or a network."""
    marginal = torch.full((len(codes),), 1 / len(codes)).double()
    for k in range(n_steps):
        p = step_probabilities(log_p_at(k / n_steps).double(), codes, n_steps - k)  # (M, B, V)
        one_hot = torch.nn.functional.one_hot(codes, p.size(2)).double()
        marginal = marginal @ torch.einsum("nbv,mbv->nmb", p, one_hot).prod(dim=2)
    return marginal


def bound(log_p_at, codes=CODES, vocab_size=V, n=500):
    """The integral of bound_rate for every code: midpoint rule over t, sum over all z_t: (M,)."""
    m, total = len(codes), 0.0
    z_1, z_t = codes.repeat_interleave(m, dim=0), codes.repeat(m, 1)
    for k in range(n):
        u = (k + 0.5) / n
        t = torch.full((m * m,), 1 - u**2).double()
        rate = bound_rate(log_p_at(1 - u**2).repeat(m, 1, 1), z_1, z_t, t).view(m, m)
        weight = path_probabilities(1 - u**2, codes, vocab_size).T  # (z_1, z_t)
        total = total + (rate * weight).sum(dim=1) * 2 * u / n
    return total


def total_variation(p, q):
    return ((p - q).abs().sum() / 2).item()


# the flow


def test_the_chain_reaches_its_target_with_an_error_of_first_order():
    target = random_target(0)
    error = {
        n: total_variation(end_of_chain(lambda t: exact_posterior(target, t), n), target)
        for n in (10, 100, 1000)
    }
    assert error[10] < 0.1
    assert error[10] / error[100] == pytest.approx(10, rel=0.15)
    assert error[100] / error[1000] == pytest.approx(10, rel=0.15)


def test_guidance_0_ignores_the_label_and_1_obeys_it():
    given, other = random_target(1), random_target(2)
    free = (given + other) / 2

    def end(guidance):
        return end_of_chain(
            lambda t: guided(exact_posterior(given, t), exact_posterior(free, t), guidance), 1000
        )

    assert total_variation(given, free) > 0.1
    assert total_variation(end(0), free) < 1e-3
    assert total_variation(end(1), given) < 1e-3
    typical = (given / free).log()
    assert (end(2) * typical).sum() > (given * typical).sum()


def test_noise_keeps_a_token_with_probability_t_and_else_draws_it_uniformly():
    n, t = 200_000, 0.3
    u = torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    z_t = noisy(CODES[6].expand(n, -1), torch.full((n,), t), u, V)
    found = (z_t @ torch.tensor([V, 1])).bincount(minlength=9) / n
    assert total_variation(found, path_probabilities(t)[:, 6]) < 0.005


def test_logits_given_the_other_tokens_become_posteriors_given_all():
    target, t = random_target(3), 0.6
    table, keep = target.view(V, V), t * torch.eye(V).double() + (1 - t) / V
    others = ((table @ keep).T[CODES[:, 1]], (keep @ table)[CODES[:, 0]])  # up to a constant
    log_p = posterior(torch.stack(others, dim=1).log(), CODES, torch.full((9,), t).double())
    assert torch.allclose(log_p, exact_posterior(target, t))


def test_draws_follow_their_probabilities_and_no_impossible_value_is_drawn():
    p, n = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]]), 100_000
    z = draw(p.expand(n, -1), torch.rand(n, 1, generator=torch.Generator().manual_seed(0)))
    found = z.flatten().bincount(minlength=6) / n
    assert torch.allclose(found, p[0], atol=0.01) and set(z.unique().tolist()) == {1, 3, 4}
    ends = torch.tensor([[0.0], [1 - 2**-24]])
    assert draw(p.expand(2, -1), ends).flatten().tolist() == [1, 4]


# the bound on bits per code


def test_with_exact_posteriors_the_bound_is_the_code_length():
    target = random_target(4)
    assert torch.allclose(bound(lambda t: exact_posterior(target, t)), -target.log(), rtol=1e-3)


def test_with_other_posteriors_the_bound_is_above_the_code_length_of_their_chain():
    def log_p_at(t):  # those of another target, at another time
        return exact_posterior(random_target(5), 0.7 * t)

    marginal, n = torch.full((9,), 1 / 9).double(), 2000
    for k in range(n):  # the Kolmogorov equation of the reversed chain, in small steps
        t = (k + 0.5) / n
        keep = t * torch.eye(V).double() + (1 - t) / V  # p(x | v)
        ratio = keep.unsqueeze(0) / keep.unsqueeze(1)  # (x, y, v)
        rate = torch.einsum("nbv,nbx,mby,xyv->nm", log_p_at(t).exp(), ONE_HOT, ONE_HOT, ratio)
        same = torch.einsum("nbv,nbx,mbx,xxv->nm", log_p_at(t).exp(), ONE_HOT, ONE_HOT, ratio)
        rate = (rate - same) * NEIGHBOURS / (t * V)  # of the one token that differs
        marginal = marginal @ torch.matrix_exp((rate - rate.sum(dim=1).diag()) / n)
    slack = bound(log_p_at) + marginal.log()
    assert slack.min() > -0.01 and slack.max() > 0.1


# the network


@pytest.fixture(scope="module")
def known():
    """64 codes, their probabilities for two labels and for none, and a prior trained on draws."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.cartesian_prod(*[torch.arange(4)] * 3)  # (64, 3)
    pairs = torch.randn(12, 12, generator=generator)  # some pairs of tokens are likely, others not
    liked = torch.randn(2, 12, generator=generator)  # and a label favours some tokens
    one_hot = torch.nn.functional.one_hot(codes, 4).flatten(1).float()
    score = torch.einsum("md,de,me->m", one_hot, pairs, one_hot) / 2 + liked @ one_hot.T
    table = score.softmax(dim=1)  # (2, 64)
    torch.manual_seed(0)
    prior, n_steps, size = Prior(3, 4, 2, width=64, n_heads=4, n_layers=2), 800, 512
    optimizer = torch.optim.AdamW(prior.parameters(), fused=True)
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, step / 50) * (1 - step / n_steps)
        y = torch.randint(2, (size,), generator=generator)
        z_1 = codes[torch.multinomial(table[y], 1, generator=generator).squeeze(1)]
        u = torch.rand(size, 8, generator=generator)
        y = torch.where(u[:, 7] < 0.3, 2, y)
        cross_entropy(prior, z_1, spread(u[:, 0]), y, u[:, 1:7]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return codes, torch.cat([table, table.mean(dim=0, keepdim=True)]).double(), prior.eval()


def network(known, label):
    codes, _, prior = known

    @torch.no_grad()
    def log_p_at(t):
        times = torch.full((len(codes),), t, dtype=torch.float64)
        return prior(codes, times, torch.full((len(codes),), label))

    return log_p_at


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_network_learns_a_known_distribution(known, label):
    codes, table, prior = known
    marginal = end_of_chain(network(known, label), 200, codes)
    assert total_variation(marginal, table[label]) < 0.05
    n = 2000
    z = prior.sample(
        torch.full((n,), label), n_steps=50, generator=torch.Generator().manual_seed(1)
    )
    found = (z @ torch.tensor([16, 4, 1])).bincount(minlength=64) / n
    assert total_variation(found, table[label]) < 0.12  # with the noise of n samples, about 0.06


@pytest.mark.parametrize("label", [0, 1, 2])
def test_its_bound_is_above_the_entropy_and_within_two_percent_of_it(known, label):
    codes, table, prior = known
    entropy = -(table[label] * table[label].log2()).sum().item()
    bits = (table[label] * bound(network(known, label), codes, 4, 200)).sum().item() / math.log(2)
    assert entropy < bits < 1.02 * entropy
    generator, n = torch.Generator().manual_seed(2), 20_000
    index = torch.multinomial(table[label], n, replacement=True, generator=generator)
    estimate, error = flow_bits(prior, codes[index], torch.full((n,), label), generator, n)
    assert abs(estimate - bits) < 4 * error and error < 0.03 * bits


def test_guidance_makes_codes_more_typical_of_their_label(known):
    codes, table, prior = known
    labels = torch.arange(2).repeat(500)

    def log_odds(guidance):
        z = prior.sample(labels, guidance, 20, torch.Generator().manual_seed(3))
        index = z @ torch.tensor([16, 4, 1])
        return (table[labels, index] / table[2, index]).log().mean()

    assert log_odds(0.0) < log_odds(1.0) < log_odds(2.0)


def test_samples_come_without_labels_with_their_path_and_for_known_labels_alone(known):
    *_, prior = known
    path = prior.sample(5, n_steps=7, with_path=True)
    assert path.shape == (8, 5, 3) and path.min() >= 0 and path.max() < 4
    with pytest.raises(ValueError, match="labels must be 0 ... 1, or 2: none"):
        prior.sample(torch.tensor([3]))


def test_baselines_of_independent_positions_are_right_where_positions_are_independent():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2, 3, 4, generator=generator) ** 2  # label, position, value
    p = p / p.sum(dim=2, keepdim=True)
    codes = {}
    for split in ("train", "val"):
        y = torch.randint(2, (50_000,), generator=generator)
        z = torch.multinomial(p[y].flatten(0, 1), 1, generator=generator).view(-1, 3)
        codes |= {f"z_{split}": z, f"y_{split}": y}
    bits, bits_given = marginal_bits(codes, 2, 4)
    mixed = p.mean(dim=0)
    assert bits == pytest.approx(-(mixed * mixed.log2()).sum().item(), rel=0.01)
    assert bits_given == pytest.approx(-(p * p.log2()).sum().item() / 2, rel=0.01)
    z = marginal_samples(codes, codes["y_val"], generator)
    found = torch.nn.functional.one_hot(z[codes["y_val"] == 1], 4).float().mean(dim=0)
    assert torch.allclose(found, p[1], atol=0.01)


# training


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """train(folder, **settings) as the script would call it, on random codes with n_labels."""
    generator = torch.Generator().manual_seed(0)

    def train(name, n_labels=3, stop_at=None, **settings):
        out_dir = tmp_path / name
        out_dir.mkdir(exist_ok=True)
        (out_dir / "best.pt").write_bytes(b"a model")
        small = dict(max_steps=12, batch_size=8, width=16, eval_interval=4, device="cpu")
        settings = defaults(os.path.join(ROOT, "prior.py")) | small | settings
        for key, value in settings.items():
            monkeypatch.setattr(script, key, value)
        monkeypatch.setattr(script, "settings", settings, raising=False)
        indices = script.train_indices
        if stop_at is not None:
            monkeypatch.setattr(script, "train_indices", interrupt(indices, stop_at))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            script.train(out_dir, 4, 5, n_labels, codes, StopSignal())
        finally:
            monkeypatch.setattr(script, "train_indices", indices)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return out_dir

    def interrupt(indices, stop_at):
        def wrapped(n, seed, step, batch_size):
            if step == stop_at:
                signal.raise_signal(signal.SIGTERM)
            return indices(n, seed, step, batch_size)

        return wrapped

    z, y = torch.randint(5, (60, 4), generator=generator), torch.arange(60) % 3
    codes = {"z_train": z[:40], "y_train": y[:40], "z_val": z[40:], "y_val": y[40:]}
    return train


def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(trainer, capsys):
    whole = trainer("whole")
    with pytest.raises(SystemExit) as stopped:
        trainer("parts", stop_at=5)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert "stopped; at step 6; the same command with --resume=True" in capsys.readouterr().out
    parts = trainer("parts", resume=True)
    ours, theirs = (load_checkpoint(folder / "prior.pt") for folder in (parts, whole))
    assert ours["step"] == theirs["step"] == 12
    assert all(torch.equal(ours["model"][key], value) for key, value in theirs["model"].items())
    assert (parts / "prior.jsonl").read_text() == (whole / "prior.jsonl").read_text()


def test_another_seed_trains_another_prior_and_is_refused_for_a_resume(trainer):
    ours, other = (load_checkpoint(trainer(f"{s}", seed=s) / "prior.pt")["model"] for s in (0, 1))
    assert not torch.equal(ours["head.weight"], other["head.weight"])
    with pytest.raises(script.UserError, match="resume: seed is 2, but the run in .* has 1"):
        trainer("1", seed=2, resume=True)


def test_a_prior_of_another_model_is_refused(trainer):
    folder = trainer("run")
    assert load_prior(folder).sample(torch.tensor([0, 2])).shape == (2, 4)
    (folder / "best.pt").write_bytes(b"another model")
    with pytest.raises(script.UserError, match="best.pt has changed since; add --overwrite=True"):
        load_prior(folder)


# the script

FEW = ("--max_steps=6", "--batch_size=16", "--width=16", "--eval_interval=3", "--n_steps=3")
FEW += ("--n_generated=30", "--classifier_steps=3", "--n_workers=0")


@pytest.fixture(scope="module")
def with_prior(finished_run, tmp_path_factory):
    """A run, its prior, and what was printed."""
    out_dir = tmp_path_factory.mktemp("prior") / "run"
    shutil.copytree(finished_run, out_dir)
    return out_dir, succeed("prior.py", out_dir, *FEW, DAPS_CACHE=str(out_dir.parent))


def test_it_leaves_codes_a_prior_a_log_numbers_and_pictures(with_prior):
    out_dir, printed = with_prior
    for name in ("codes.pt", "prior.pt", "prior.jsonl"):
        assert (out_dir / name).exists()
    row = json.loads((out_dir / "prior.json").read_text())
    assert row["bits"] == 8 * 5 and row["evaluations"] == 3 and row["step"] == 6
    assert row["bits_marginals"] < 40 and row["bits_marginals_label"] < 40
    assert {"accuracy_real", "accuracy_marginals", "accuracy_flow", "ce_0.5"} < row.keys()
    assert f"{row['bits_flow_label']:.2f}" in printed and "val cross-entropy" in printed
    page = Image.open(out_dir / "labels.png")  # 62 labels: three blocks of 21 rows
    assert page.size == (3 * 11 * 60 + 4, 21 * 60 + 4)
    assert Image.open(out_dir / "steps.png").size == (11 * 60 + 4, 10 * 60 + 4)


def test_codes_are_those_of_the_training_set_and_are_used_again(with_prior):
    out_dir, _ = with_prior
    codes = torch.load(out_dir / "codes.pt", weights_only=True)
    assert codes["z_train"].shape == (20_000, 8) and codes["z_val"].shape == (2_000, 8)
    model = script.load(out_dir)
    data = script.load_data(model)
    assert torch.equal(codes["y_val"], data.y_val.int())
    assert torch.equal(codes["y_train"].bincount(), data.y_train.int().bincount())
    index = script.train_indices(20_000, 0, 0, 250)
    assert torch.equal(codes["y_train"][:250], data.y_train[index].int())
    noise = script.uniform_noise(script.CODE_NOISE, 0, 0, 250, (1, 8))
    z = model.encode(data.standardise(data.x_train[index]), noise=noise)
    assert (codes["z_train"][:250] == z).float().mean() > 0.99
    before = (out_dir / "codes.pt").stat().st_mtime_ns
    options = ("--guidance=2", "--sample=True", "--n_draws=3")
    printed = succeed("prior.py", out_dir, *FEW, *options, DAPS_CACHE=str(out_dir.parent))
    assert (out_dir / "codes.pt").stat().st_mtime_ns == before
    assert "val cross-entropy" not in printed
    assert json.loads((out_dir / "prior.json").read_text())["evaluations"] == 6


def test_images_without_labels_have_a_prior_too(tmp_path):
    generator, folder = torch.Generator().manual_seed(0), tmp_path / "pictures"
    folder.mkdir()
    for i in range(40):
        pixels = torch.randint(256, (16, 16, 3), generator=generator).byte().numpy()
        Image.fromarray(pixels).save(folder / f"{i}.png")
    options = ("--dataset=imagenet", f"--data_dir={folder}", "--image_size=16", "--n_tokens=4")
    options += ("--method=daps_na", f"--out_dir={tmp_path / 'run'}", "--n_workers=0")
    cache = {"DAPS_CACHE": str(tmp_path)}
    succeed("train.py", *TINY, *options, **cache)
    printed = succeed("prior.py", tmp_path / "run", *FEW, **cache)
    row = json.loads((tmp_path / "run" / "prior.json").read_text())
    assert "bits_flow_label" not in row and "accuracy_flow" not in row
    assert (tmp_path / "run" / "labels.png").exists() and " -\n" in printed


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "name at least one run: python prior.py out/glyphs_daps"),
        (("nowhere",), f"nowhere{os.sep}best.pt does not exist"),
        (("{run}",), "holds a run: add --resume=True or --overwrite=True"),
        (("{run}", "--width=30"), "width is 30, must be a multiple of n_heads"),
        (("{run}", f"--seed={2**64}"), "must be below 2**32"),
    ],
)
def test_what_a_user_can_mend_is_said_in_one_line(with_prior, options, message):
    done = run("prior.py", *(option.format(run=with_prior[0]) for option in options))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1
