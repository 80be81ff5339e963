"""flow.py where chains can be enumerated; prior.py on made-up codes, and as a user runs it."""

import math
import os
import signal
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, assert_one_line, run_here, train_here
from PIL import Image

import data
import flow
import prior as script
from configurator import UserError, settings_block
from experiments import generation
from run import load_checkpoint

V = 3
CODES = torch.cartesian_prod(torch.arange(V), torch.arange(V))  # (9, B)
ONE_HOT = F.one_hot(CODES, V).double()  # (9, B, V)


def random_target(seed):
    p = torch.rand(9, generator=torch.Generator().manual_seed(seed)).double() ** 2 + 0.01
    return p / p.sum()


def path_probabilities(t):
    """p(z_t | z_1) as it is defined: (9, 9), a row for each z_t, a column for each z_1."""
    return (t * (CODES.unsqueeze(1) == CODES).double() + (1 - t) / V).prod(dim=2)


def exact_posterior(target, t):
    """log p(z_1^i | z_t) for every z_t, by a sum over all codes: (9, B, V)."""
    joint = path_probabilities(t) * target
    return torch.einsum("nm,mbv->nbv", joint / joint.sum(dim=1, keepdim=True), ONE_HOT).log()


def end_of_chain(log_p_at, n_steps):
    """The exact distribution of codes after n_steps from noise, as a product of matrices: (9,).
    log_p_at(t) gives posteriors for every z_t: the truth, or a network."""
    marginal = torch.full((9,), 1 / 9).double()
    for k in range(n_steps):
        p = flow.step_probabilities(log_p_at(k / n_steps).double(), CODES, n_steps - k)  # (9, B, V)
        marginal = marginal @ torch.einsum("nbv,mbv->nmb", p, ONE_HOT).prod(dim=2)
    return marginal


def bound(log_p_at, n=500):
    """The integral of bound_rate for every code: midpoint rule over t, sum over all z_t: (9,)."""
    total, z_1, z_t = 0.0, CODES.repeat_interleave(9, dim=0), CODES.repeat(9, 1)
    for u in (torch.arange(n) + 0.5) / n:
        t = 1 - u.double() ** 2
        rate = generation.bound_rate(log_p_at(t.item()).repeat(9, 1, 1), z_1, z_t, t.expand(81))
        total = total + (rate.view(9, 9) * path_probabilities(t).T).sum(dim=1) * 2 * u / n
    return total


def total_variation(p, q):
    return ((p - q).abs().sum() / 2).item()


def histogram(z):
    return (z @ torch.tensor([V, 1])).bincount(minlength=9) / len(z)


def test_the_chain_reaches_its_target_with_an_error_of_first_order():
    target = random_target(0)
    ends = (end_of_chain(lambda t: exact_posterior(target, t), n) for n in (10, 100, 1000))
    error = [total_variation(end, target) for end in ends]
    assert error[0] < 0.1
    assert error[0] / error[1] == pytest.approx(10, rel=0.15)
    assert error[1] / error[2] == pytest.approx(10, rel=0.15)


def test_guidance_0_ignores_the_label_1_obeys_it_and_2_exaggerates():
    given = random_target(1)
    free = (given + random_target(2)) / 2

    def end(guidance):
        def log_p_at(t):
            return flow.guided(exact_posterior(given, t), exact_posterior(free, t), guidance)

        return end_of_chain(log_p_at, 1000)

    assert total_variation(given, free) > 0.1
    assert total_variation(end(0), free) < 1e-3 and total_variation(end(1), given) < 1e-3
    typical = (given / free).log()
    assert (end(2) * typical).sum() > (given * typical).sum()


def test_logits_given_the_other_tokens_become_posteriors_given_all():
    target, t = random_target(3), 0.6
    table, keep = target.view(V, V), t * torch.eye(V).double() + (1 - t) / V
    others = ((table @ keep).T[CODES[:, 1]], (keep @ table)[CODES[:, 0]])  # up to a constant
    log_p = flow.posterior(torch.stack(others, dim=1).log(), CODES, torch.full((9,), t).double())
    assert torch.allclose(log_p, exact_posterior(target, t))


def test_samples_take_the_steps_of_the_chain(monkeypatch):
    net, seen, step = flow.Flow(2, V, 2, width=8), [], flow.step_probabilities
    whole, times = net.forward, []
    net.forward = lambda z, t, labels: times.append(t[0].item()) or whole(z, t, labels)
    monkeypatch.setattr(flow, "step_probabilities", lambda *a: seen.append(a[2]) or step(*a))
    net.sample(torch.zeros(3).long(), n_steps=4)
    assert seen == [4, 3, 2, 1] and times == [0, 0.25, 0.5, 0.75]


def test_no_impossible_value_is_drawn():
    p, u = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]]), torch.rand(1000, 1)
    u[:2] = torch.tensor([[0.0], [1 - 2**-24]])
    z = flow.draw(p.expand(1000, -1), u).flatten()
    assert z[:2].tolist() == [1, 4] and set(z.tolist()) == {1, 3, 4}


def test_with_exact_posteriors_the_bound_is_the_code_length():
    target = random_target(4)
    assert torch.allclose(bound(lambda t: exact_posterior(target, t)), -target.log(), rtol=1e-3)


def test_with_other_posteriors_the_bound_is_above_the_code_length_of_their_chain():
    def log_p_at(t):  # those of another target, at another time
        return exact_posterior(random_target(5), 0.7 * t)

    neighbours = (CODES.unsqueeze(1) != CODES).sum(dim=2) == 1  # (9, 9): one token differs
    marginal, n = torch.full((9,), 1 / 9).double(), 2000
    for k in range(n):  # the Kolmogorov equation of the reversed chain, in small steps
        t = (k + 0.5) / n
        keep = t * torch.eye(V).double() + (1 - t) / V  # p(x | v)
        ratio = keep.unsqueeze(0) / keep.unsqueeze(1)  # (x, y, v)
        rate = torch.einsum("nbv,nbx,mby,xyv->nm", log_p_at(t).exp(), ONE_HOT, ONE_HOT, ratio)
        same = torch.einsum("nbv,nbx,mbx,xxv->nm", log_p_at(t).exp(), ONE_HOT, ONE_HOT, ratio)
        rate = (rate - same) * neighbours / (t * V)  # of the one token that differs
        marginal = marginal @ torch.matrix_exp((rate - rate.sum(dim=1).diag()) / n)
    slack = bound(log_p_at) + marginal.log()
    assert slack.min() > -0.01 and slack.max() > 0.1


def test_a_network_learns_a_known_distribution_and_bounds_its_entropy():
    generator, n = torch.Generator().manual_seed(0), 8_000
    table = torch.stack([random_target(1), random_target(2)])  # given labels 0 and 1
    net, n_steps, size = flow.Flow(2, V, 2, width=32), 600, 512
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, step / 30) * (1 - step / n_steps)
        y, u = torch.arange(size) % 2, torch.rand(size, 6, generator=generator)
        z_1 = CODES[torch.multinomial(table[y], 1, generator=generator).squeeze(1)]
        t = flow.spread(u[:, 0])[torch.randperm(size, generator=generator)]
        flow.cross_entropy(net, z_1, t, torch.where(u[:, 1] < 0.3, 2, y), u[:, 2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval().requires_grad_(False)
    for label, target in enumerate([*table, table.mean(dim=0)]):  # 2: none
        labels = torch.full((n,), label)

        def log_p_at(t, labels=labels):
            return net(CODES, torch.full((9,), t, dtype=torch.float64), labels[:9])

        assert total_variation(end_of_chain(log_p_at, 200), target) < 0.05
        z = net.sample(labels, n_steps=40, generator=generator)
        assert total_variation(histogram(z), target) < 0.06
        entropy = -(target * target.log2()).sum().item()
        bits = (target * bound(log_p_at, 200)).sum().item() / math.log(2)
        assert entropy < bits < 1.02 * entropy
        z = CODES[torch.multinomial(target, n, replacement=True, generator=generator)]
        estimate, error = generation.flow_bits(net, z, labels, generator, 20_000)
        assert abs(estimate - bits) < 4 * error and error < 0.03 * bits
    typical = (table[0] / table.mean(dim=0)).log()  # of label 0
    samples = (net.sample(0 * labels, g, 20, generator) for g in (0.0, 1.0, 2.0))
    odds = [(histogram(z) * typical).sum().item() for z in samples]
    assert odds[0] + 0.05 < odds[1] < odds[2] - 0.05


def test_baselines_of_independent_positions_are_right_where_positions_are_independent():
    generator, codes = torch.Generator().manual_seed(0), {}
    p = torch.rand(2, 3, 4, generator=generator).square()  # label, position, value
    p = p / p.sum(dim=2, keepdim=True)
    for split in ("train", "val"):
        y = torch.randint(2, (50_000,), generator=generator)
        z = torch.multinomial(p[y].flatten(0, 1), 1, generator=generator).view(-1, 3)
        codes |= {f"z_{split}": z.short(), f"y_{split}": y}
    bits, bits_given, z = generation.independent_positions(codes, codes["y_val"], 2, 4, generator)
    mixed = p.mean(dim=0)
    assert bits == pytest.approx(-(mixed * mixed.log2()).sum().item(), rel=0.01)
    assert bits_given == pytest.approx(-(p * p.log2()).sum().item() / 2, rel=0.01)
    found = F.one_hot(z[codes["y_val"] == 1], 4).float().mean(dim=0)
    assert torch.allclose(found, p[1], atol=0.01)


# prior.py on made-up codes


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """train(folder, **settings) as the script would call it; validation codes sorted by label."""
    z = torch.randint(5, (340, 4), generator=torch.Generator().manual_seed(0)).short()
    y, y_val = torch.arange(40) % 3, torch.arange(300) // 100
    codes = {"z_train": z[:40], "y_train": y, "z_val": z[40:], "y_val": y_val}

    def train(name, **settings):
        settings = dict(max_steps=12, batch_size=8, eval_interval=4, device="cpu") | settings
        settings = settings_block(os.path.join(ROOT, "prior.py"))[0] | settings
        for key, value in {"settings": settings, **settings}.items():
            monkeypatch.setattr(script, key, value, raising=False)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "best.pt").write_bytes(b"a model")
        script.train(tmp_path / name, codes, dict(n_tokens=4, vocab_size=5, n_labels=3, width=16))
        return tmp_path / name

    return train


def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(trainer, monkeypatch, capsys):
    indices, stop = script.train_indices, lambda: signal.raise_signal(signal.SIGTERM)
    whole = trainer("whole")
    monkeypatch.setattr(script, "train_indices", lambda *a: (a[2] == 5 and stop()) or indices(*a))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        trainer("parts")
    assert "stopped at step 6; the same command continues" in capsys.readouterr().out
    monkeypatch.setattr(script, "train_indices", indices)
    parts = trainer("parts")
    ours, theirs = (load_checkpoint(f"{folder}/prior.pt") for folder in (parts, whole))
    assert ours["step"] == theirs["step"] == 12
    assert all(torch.equal(ours["model"][key], value) for key, value in theirs["model"].items())
    assert (parts / "prior.jsonl").read_text() == (whole / "prior.jsonl").read_text()


def test_a_prior_of_another_model_is_refused(trainer):
    folder = trainer("run")
    (folder / "best.pt").write_bytes(b"another model")
    with pytest.raises(UserError, match="best.pt has changed since; delete .*prior.pt"):
        script.load_prior(folder)


def test_few_labels_are_hidden_and_every_label_is_validated_at_all_times(trainer, monkeypatch):
    training, validation = [], []

    def recorded(net, z_1, t, labels, u):
        (training if torch.is_grad_enabled() else validation).append((t, labels))
        return flow.cross_entropy(net, z_1, t, labels, u)

    monkeypatch.setattr(script, "cross_entropy", recorded)
    trainer("run", batch_size=256, label_dropout=0.1)
    hidden = torch.cat([labels for _, labels in training]) == 3
    assert 0.08 < hidden.float().mean() < 0.12
    t, labels = validation[0]
    assert torch.allclose(t.sort().values, torch.arange(300) / 300, atol=1 / 300)
    assert all(abs(t[labels == label].mean() - 0.5) < 0.1 for label in range(3))


def test_codes_and_classifier_are_made_again_if_only_training_data_change(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path))
    (tmp_path / "best.pt").write_bytes(b"a model")
    x = torch.randint(256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    y, index = torch.arange(40).byte() % 3, data.train_indices(30, 0, 0, 30)
    model = types.SimpleNamespace(encoder=types.SimpleNamespace(n_tokens=2, vocab_size=256))
    model.parameters = lambda: iter([torch.zeros(())])
    model.encode = lambda x, noise: (x[:, 0, 0, :2] * 255).round().long()  # two of the pixels
    for y_train in (y[:30], y[:30] + 1):  # a new class that sorts first
        found = data.ArrayDataset("made up", x[:30], y_train, x[30:], y[30:])
        codes = script.load_codes(tmp_path, model, found)
        assert codes["z_train"].dtype == torch.int16
        assert torch.equal(codes["z_train"], x[index, 0, 0, :2].short())
        assert torch.equal(codes["y_train"], y_train[index].long())
        assert torch.equal(codes["y_val"], y[30:].long())
        assert generation.load_classifier(found, 2)(x / 255).shape == (40, found.n_labels)


# prior.py as a user runs it

FEW = ("--max_steps=6", "--batch_size=16", "--width=16", "--eval_interval=3", "--n_steps=3")
FEW += ("--n_workers=0",)


@pytest.fixture(scope="module")
def with_prior(tmp_path_factory):
    """A run on few glyphs, what prior.py printed for it, and the glyphs."""
    out_dir, glyphs = tmp_path_factory.mktemp("prior") / "run", data.glyphs(n_train=600, n_val=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.DATASETS, "glyphs", lambda data_dir: glyphs)
        patch.setattr(data, "CACHE_DIR", str(out_dir.parent))
        data.load_dataset.cache_clear()
        train_here(*TINY, f"--out_dir={out_dir}")
        done = run_here("prior.py", out_dir, *FEW)
        assert done.code == 0, done.output + done.errors
        yield out_dir, done.output, glyphs
    data.load_dataset.cache_clear()


def judged(out_dir):
    """The last column of the table of experiments/generation.py."""
    options = ("--n_generated=30", "--classifier_steps=3", "--n_workers=0")
    printed = train_here(out_dir, *options, script="experiments/generation.py")
    return [line.split()[-1] for line in printed.splitlines()[1:]]


def test_it_leaves_codes_a_prior_a_log_and_samples(with_prior):
    (out_dir, printed, glyphs), (path,) = with_prior, with_prior[0].glob("codes_*.pt")
    assert "step      6  val cross-entropy" in printed and "labels.png" in printed
    height = -(-len(glyphs.y_val.unique()) // 3)  # three labels side by side
    assert Image.open(out_dir / "labels.png").size == (3 * 11 * 60 + 4, height * 60 + 4)
    codes, index = torch.load(path, weights_only=True), data.train_indices(600, 0, 0, 250)
    noise = data.uniform_noise(script.CODE_NOISE, 0, 0, torch.arange(250), (1, 8))
    z = script.load(out_dir).encode(glyphs.x_train[index] / 255, noise=noise)
    assert (codes["z_train"][:250] == z).float().mean() > 0.99
    before = path.stat().st_mtime_ns
    done = run_here("prior.py", out_dir, *FEW, "--guidance=2")
    assert done.code == 0 and "val cross-entropy" not in done.output
    assert list(out_dir.glob("codes_*.pt")) == [path] and path.stat().st_mtime_ns == before
    cells = judged(out_dir)
    assert [cell[-1] == "%" for cell in cells] == 5 * [False] + 4 * [True]
    assert cells[0] == "40" and float(cells[3]) < 40 and 30 < float(cells[4]) < 60


def test_images_without_labels_have_a_prior_too(with_prior, tmp_path):
    for i in range(40):
        Image.effect_noise((16, 16), 50).convert("RGB").save(tmp_path / f"{i}.png")
    options = ("--dataset=imagenet", f"--data_dir={tmp_path}", "--image_size=16", "--n_tokens=4")
    options += ("--method=daps_na", f"--out_dir={tmp_path / 'run'}", "--n_workers=0")
    train_here(*TINY, *options)
    assert run_here("prior.py", tmp_path / "run", *FEW).code == 0
    assert [cell == "-" for cell in judged(tmp_path / "run")] == 3 * [False] + 6 * [True]
    assert (tmp_path / "run" / "labels.png").exists()


def test_what_a_user_can_mend_is_said_in_one_line(with_prior):
    assert_one_line(run_here("prior.py"), "name at least one run: python prior.py out/glyphs_daps")
    for word, message in (
        ("--seed=1", "seed is 1, but"),
        ("--n_steps=0", "n_steps is 0, must be positive"),
        ("--label_dropout=0", "label_dropout is 0.0, must be positive"),  # guidance needs p(z)
    ):
        assert_one_line(run_here("prior.py", with_prior[0], *FEW, word), message)
