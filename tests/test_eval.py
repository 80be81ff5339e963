"""eval.py: metrics with known answers, tables over runs and seeds, and models from checkpoints."""

import glob
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_one_line, log_rows, run_here
from PIL import Image

from checkpoint import load_checkpoint
from configurator import read_config
from data import ArrayDataset
from eval import (
    evaluate,
    group_by_seed,
    label,
    load,
    load_data,
    one_line,
    print_table,
    read_record,
    report,
    summary,
    validation_noise,
)
from models import METHODS, build_model, n_parameters
from plots import with_gap

X_SHAPE = (1, 28, 28)


class Known(torch.nn.Module):
    """B = 2, V = 4: token 1 is always 3, token 2 tells if x is bright; pixels are 0.9 or 0.1."""

    class encoder:  # noqa: N801
        n_tokens, vocab_size = 2, 4

    def encode(self, x, with_kl=False, noise=None):
        bright = x.mean(dim=(1, 2, 3)) > 0.5
        z = torch.stack([torch.full_like(bright, 3, dtype=torch.long), bright.long()], dim=1)
        return (z, torch.full((len(x),), 1.5)) if with_kl else z

    def decode(self, z):
        p = torch.where(z[:, 1] == 1, 0.9, 0.1).view(-1, 1, 1, 1).expand(-1, *X_SHAPE)
        return torch.distributions.Independent(torch.distributions.Bernoulli(p), 3)


def test_metrics_have_their_known_values():
    x = torch.cat([torch.ones(6, *X_SHAPE), torch.zeros(2, *X_SHAPE)]).byte()
    data = ArrayDataset("known", x, x[:, 0, 0, 0], x, x[:, 0, 0, 0])
    for batch_size in (3, 8):
        metrics, counts = evaluate(Known(), data, 0.1, batch_size, "cpu")
        assert metrics["log_px"] == pytest.approx(784 * math.log(0.9), rel=1e-5)
        assert metrics["kl"] == pytest.approx(1.5)
        assert metrics["beta_elbo"] == pytest.approx(784 * math.log(0.9) - 0.15, rel=1e-5)
        assert metrics["psnr"] == pytest.approx(20, abs=1e-4)  # mse 0.01
        assert metrics["code_usage"] == pytest.approx((1 / 4 + 2 / 4) / 2)
        entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        assert metrics["perplexity"] == pytest.approx((1 + math.exp(entropy)) / 2)
        assert counts.tolist() == [[0, 0, 0, 8], [2, 6, 0, 0]]


def test_the_reported_elbo_matches_a_slow_computation_by_hand(finished_run):
    """log p(x|z) pixel by pixel, and the KL as the mean of log q - log p over many codes."""
    model = load(finished_run)
    x = load_data(model).x_val[:2].float()
    torch.manual_seed(0)
    z = model.encode(x)
    p = model.decode(z).mean
    by_hand = (x * p.log() + (1 - x) * (1 - p).log()).sum(dim=(1, 2, 3))
    # p is off by 2^-24 at most, so log p by 2^-24 / p: less than 2^-10 where p > 2^-14. The terms
    # are of one sign, and few are as far off.
    torch.testing.assert_close(model.decode(z).log_prob(x), by_hand, rtol=2**-10, atol=0)
    assert p.min() > 2**-14 and p.max() < 1 - 2**-14
    with torch.no_grad():
        _, log_q, kl = model.encoder(x, 4000, with_kl=True)  # (2, 4000) each
        sampled = log_q + 8 * math.log(32)
    error = (sampled - kl).std(dim=1) / 4000**0.5
    assert ((sampled - kl).mean(dim=1).abs() < 5 * error).all()  # five standard errors
    assert (error < 0.1).all()


def test_eval_json_agrees_with_the_log_of_the_best_step(finished_run):
    """Batches of 250, not 16 as in training: the sums are float64, their terms float32."""
    row = json.loads((finished_run / "eval.json").read_text())
    best = max(log_rows(finished_run, "val"), key=lambda row: row["beta_elbo"])
    assert row["steps"] == best["step"]
    for key in ("beta_elbo", "log_px", "kl", "psnr", "code_usage", "perplexity"):
        assert row[key] == pytest.approx(best[key], rel=1e-5)
    assert row["bits"] == 40
    assert (row["encoder"], row["decoder"]) == n_parameters(load(finished_run))


def test_one_evaluation_draws_the_codes_of_every_other(finished_run):
    """Noise is a function of the example alone: an encoding with it gives the same metrics."""
    model = load(finished_run)
    data, noise = load_data(model), validation_noise(model, 2000)
    metrics, counts = evaluate(model, data, 0.1, 64, "cpu", limit=96)
    again, _ = evaluate(model, data, 0.1, 7, "cpu", limit=96)
    assert metrics["kl"] == pytest.approx(again["kl"], rel=1e-5)
    index = data.val_index(96)
    assert metrics["examples"] == len(index) == 96 and counts.sum() == 96 * 8
    x, _ = data.val_examples(index)
    z, kl = model.encode(x, with_kl=True, noise=validation_noise(model, 96))
    assert metrics["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert torch.equal(torch.bincount(z[:, 3], minlength=32), counts[3].long())
    assert not model.training and torch.equal(noise[:5], validation_noise(model, 5))


def test_a_loaded_model_encodes_decodes_and_samples(finished_run):
    model = load(finished_run)
    x = torch.rand(3, *X_SHAPE).round()
    z = model.encode(x)
    assert z.shape == (3, 8) and z.dtype == torch.int64
    assert model.decode(z).mean.shape == (3, *X_SHAPE)
    assert model.decode(z).log_prob(x).shape == (3,)
    assert model.sample(5).mean.shape == (5, *X_SHAPE)
    assert model.config["step"] in (4, 8, 12)
    assert model.x_shape == X_SHAPE and model.tau is None and model.n_epochs == 1
    assert load_data(model).mean == model.data_mean
    patches = model.encoder.patch_encoder
    scale = patches.input_mean.item(), patches.input_std.item()
    assert scale == pytest.approx(load_data(model).input_scale())
    assert "data_mean" not in model.state_dict()  # of the data, not of the model
    assert model.sample(2).mean.numpy().shape == (2, *X_SHAPE)  # no gradient to detach


def test_pictures_show_what_they_should(finished_run):
    x = load_data(load(finished_run)).x_val
    picture = Image.open(finished_run / "reconstructions.png")
    corner = torch.from_numpy(np.array(picture.crop((4, 4, 60, 60))))  # (56, 56)
    assert torch.equal(corner[::2, ::2] // 255, x[0, 0])  # the first input, twice as large
    for name in ("samples.png", "codes.png", "curves.png"):
        colours = Image.open(finished_run / name).convert("L").getextrema()
        assert colours[1] - colours[0] > 100  # not blank


def another_run(finished_run, out_dir, **settings):
    """A run like the finished one except for these settings, with fresh parameters."""
    shutil.copytree(finished_run, out_dir)
    saved = load_checkpoint(out_dir / "best.pt")
    saved["config"] |= {"out_dir": str(out_dir), **settings}
    saved["model"] = build_model(saved["config"], X_SHAPE).state_dict()
    saved["step"] -= 1
    torch.save(saved, out_dir / "best.pt")
    return out_dir


def test_several_runs_make_one_table_and_one_plot(finished_run, tmp_path, capsys):
    """Seeds in one row, with the mean of their numbers; VQ-VAE, which has no q, without a KL."""
    seed = another_run(finished_run, tmp_path / "seed", seed=1)
    quantised = another_run(finished_run, tmp_path / "vqvae", method="vqvae")
    curves = tmp_path / "pictures" / "all.png"
    rows = report([finished_run, seed, quantised], curves=str(curves))
    header, seeds, vqvae = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    mean = (rows[0]["beta_elbo"] + rows[1]["beta_elbo"]) / 2
    deviation = abs(rows[0]["beta_elbo"] - rows[1]["beta_elbo"]) / 2**0.5
    assert header[:5] == ["run", "method", "n", "bits", "beta-ELBO"]
    assert seeds[1:7] == ["daps", "2", "40", f"{mean:.2f}", "+-", f"{deviation:.2f}"]
    assert vqvae[1:5] == ["vqvae", "-", "40", "-"]
    assert "MiB" not in " ".join(header) and Image.open(curves).size[0] > 1000
    report([finished_run, seed], curves=str(curves), per_run=True)
    assert "+-" not in capsys.readouterr().out
    for out_dir, row in zip((finished_run, seed, quantised), rows, strict=True):
        assert json.loads((out_dir / "eval.json").read_text()) == row


def test_recorded_runs_give_the_table_and_curves_of_their_folders(finished_run, tmp_path):
    """Without checkpoints and data, alone or beside other runs, and without local paths."""
    seed = another_run(finished_run, tmp_path / "seed", seed=1)
    record, pictures = tmp_path / "records" / "two.jsonl", (tmp_path / "a.png", tmp_path / "b.png")
    options = (f"--curves={pictures[0]}", f"--record={record}")
    first = run_here("eval.py", finished_run, seed, *options)
    assert first.code == 0, first.errors
    assert [run["config"]["out_dir"] for run in read_record(record)] == ["", ""]
    shutil.rmtree(seed)
    again = run_here("eval.py", record, f"--curves={pictures[1]}")
    assert again.output.splitlines()[:2] == first.output.splitlines()[:2]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    # a run that is evaluated again takes the place of its record
    shutil.copy(record, tmp_path / "old.jsonl")
    done = run_here("eval.py", tmp_path / "old.jsonl", finished_run, *options)
    assert done.output.splitlines()[:2] == first.output.splitlines()[:2]
    assert record.read_bytes() == (tmp_path / "old.jsonl").read_bytes()


def test_the_same_checkpoint_gives_the_same_numbers_twice(finished_run):
    """And in batches of another size the same up to the rounding of float32 matrix products."""
    before = json.loads((finished_run / "eval.json").read_text())
    assert run_here("eval.py", finished_run).code == 0
    assert json.loads((finished_run / "eval.json").read_text()) == before
    assert run_here("eval.py", finished_run, "--batch_size=500").code == 0
    after = json.loads((finished_run / "eval.json").read_text())
    assert after.keys() == before.keys()
    for key in ("beta_elbo", "log_px", "kl", "psnr", "code_usage", "perplexity"):
        assert after[key] == pytest.approx(before[key], rel=1e-5)


# tables over runs and seeds


def made_up(seed, step=100, elbo=-80.0, **config):
    """A run: its row of the table and its config."""
    row = {"run": f"out/mnist_{seed}", "method": "daps", "bits": 64.0, "beta_elbo": elbo}
    row |= {"kl": 40.0, "encoder": 1000, "steps": step}
    base = {"method": "daps", "lr": 1e-3, "aligned": False, "seed": seed, "out_dir": row["run"]}
    config = base | {"step": step, "seconds": 9.0 + seed} | config
    return {"row": row, "config": config, "log": [{"step": 300, "split": "val"}]}


def grouped(*runs, **options):
    return [[run["row"] for run in group] for group in group_by_seed(runs, **options)]


def test_runs_that_differ_in_their_seed_alone_are_averaged():
    """Mean and standard deviation (of a sample, so over n - 1), by hand: -80, -82, -87."""
    runs = [made_up(0, 100, -80.0), made_up(1, 300, -82.0), made_up(2, 200, -87.0)]
    (group,) = grouped(*runs)  # although their best checkpoints are of different steps
    row = summary(group)
    assert row["n"] == 3 and row["run"] == "out/mnist_*"
    assert row["beta_elbo"] == pytest.approx(-83)
    assert row["beta_elbo std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert row["kl"] == 40 and row["kl std"] == 0
    assert row["encoder"] == 1000 and "encoder std" not in row
    assert row["steps"] == 200 and row["steps std"] == 100
    assert group[0] == made_up(0, 100, -80.0)["row"]  # left as it was


@pytest.mark.parametrize(
    "other", [{"lr": 2e-3}, {"method": "daps_na"}, {"aligned": True}, {"new_setting": 1}]
)
def test_a_run_with_any_other_setting_is_not_averaged_in(other):
    groups = grouped(made_up(0), made_up(1, **other), made_up(2))
    assert [len(group) for group in groups] == [2, 1]
    row = made_up(1)["row"]
    assert groups[1] == [row] and summary(groups[1]) == row


def test_an_unfinished_run_and_a_second_run_of_a_seed_are_not_averaged_in():
    unfinished = made_up(1) | {"log": [{"step": 200, "split": "val"}]}
    again = made_up(0, elbo=-81.0)
    groups = grouped(made_up(0), unfinished, again, made_up(2))
    expected = [[made_up(0), made_up(2)], [unfinished], [again]]
    assert groups == [[run["row"] for run in group] for group in expected]


def test_a_seed_that_diverged_makes_the_mean_nan_and_leaves_no_deviation():
    row = summary([made_up(0)["row"], made_up(1, elbo=math.nan)["row"]])
    assert math.isnan(row["beta_elbo"]) and "beta_elbo std" not in row and row["kl"] == 40


def test_where_a_run_lies_and_how_it_was_started_changes_no_result():
    settings = [{}, {"data_dir": "/x"}, {"resume": True}, {"overwrite": True}, {"n_workers": 3}]
    settings += [{"eval_interval": 7}, {"log_interval": 7}]
    assert len(grouped(*(made_up(i, **s) for i, s in enumerate(settings)))) == 1
    assert len(grouped(*(made_up(i) for i in range(5)), per_run=True)) == 5
    backwards = made_up(5)
    backwards["config"] = dict(reversed(backwards["config"].items()))
    assert len(grouped(made_up(0), backwards)) == 1


def test_a_table_shows_means_with_deviations_and_a_dash_where_there_is_no_number(capsys):
    group = [made_up(i, elbo=elbo)["row"] for i, elbo in enumerate((-80.0, -83.0))]
    quantised = {"run": "out/fsq", "method": "fsq", "bits": 64.0, "beta_elbo": None, "kl": None}
    print_table([summary(group), quantised | {"encoder": 156_547}])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "method", "n", "bits", "beta-ELBO", "KL", "encoder", "steps"]
    cells = ["out/mnist_*", "daps", "2", "64", "-81.50", "+-", "2.12", "40.00", "1,000", "100"]
    assert first.split() == cells
    assert second.split() == ["out/fsq", "fsq", "-", "64", "-", "-", "156,547", "-"]
    assert header.index("KL") + 2 == first.index("40.00") + 5  # numbers end where their names do


def test_an_exported_model_is_smaller_knows_no_local_path_and_gives_the_same_codes(
    finished_run, tmp_path
):
    target = tmp_path / "shared"
    done = run_here("eval.py", finished_run, f"--export_to={target}")
    assert done.code == 0, done.errors
    sizes = [os.path.getsize(folder / "best.pt") for folder in (target, finished_run)]
    assert sizes[0] < 0.5 * sizes[1]
    assert str(tmp_path.parent).encode() not in (target / "best.pt").read_bytes()
    whole = with_gap(log_rows(finished_run))  # before rows of training are left out
    assert log_rows(target, "val") == [row for row in whole if row["split"] == "val"]
    x, noise = torch.rand(4, *X_SHAPE).round(), torch.rand(4, 1, 8)
    ours, theirs = (load(folder).encode(x, noise=noise) for folder in (target, finished_run))
    assert torch.equal(ours, theirs)
    assert run_here("eval.py", target).code == 0
    assert_one_line(run_here("eval.py", target, target, "--export_to=x"), "export_to takes one run")


REAL_MNIST = os.path.join(os.environ.get("DAPS_DATA", ""), "mnist", "t10k-images-idx3-ubyte.gz")


@pytest.mark.skipif(not os.path.exists(REAL_MNIST), reason="DAPS_DATA names no folder with MNIST")
def test_the_model_that_comes_with_the_code_is_as_good_as_the_readme_says():
    """On 10,000 digits its beta-ELBO is above -44.5 and its PSNR above 18.45 dB; on 1,000 of them
    they may be lower by three errors of a mean, 24 / sqrt(1,000) and 3 / sqrt(1,000)."""
    model = load(os.path.join(ROOT, "assets", "mnist_daps"))
    data = load_data(model, os.environ["DAPS_DATA"])
    metrics, _ = evaluate(model, data, 0.01, 250, "cpu", limit=1000)
    assert metrics["beta_elbo"] > -44.5 - 2.3 and metrics["psnr"] > 18.45 - 0.3
    assert metrics["perplexity"] > 100


def test_groups_have_different_labels_also_where_the_seed_comes_first_in_their_names():
    rows = {
        name: {"row": {"run": f"out/s{name}"}}
        for name in ("0_daps", "1_daps", "0_vq", "1_vq", "fsq")
    }
    groups = [rows["0_daps"], rows["1_daps"]], [rows["0_vq"], rows["1_vq"]], [rows["fsq"]]
    labels = [label(group) for group in groups]
    assert labels == ["out/s0_daps (n = 2)", "out/s0_vq (n = 2)", "out/sfsq"]


def test_a_group_of_runs_without_a_kl_has_none_in_its_mean():
    group = [{"run": f"out/vq{i}", "kl": None, "psnr": 18.0 + i} for i in range(2)]
    assert summary(group) == {
        "run": "out/vq*", "n": 2, "kl": None, "psnr": 18.5, "psnr std": pytest.approx(0.5**0.5)
    }  # fmt: skip


@pytest.mark.parametrize("fids", [(150.0, None), (None, 150.0), (150.0, "left out")])
def test_a_number_that_only_some_runs_of_a_group_have_is_not_averaged(fids):
    group = [{"run": f"out/c{i}", "psnr": 22.0, "fid": fid} for i, fid in enumerate(fids)]
    if fids[1] == "left out":
        del group[1]["fid"]
    row = summary(group)
    assert row["fid"] is None and row["psnr"] == 22.0


def test_one_line_leaves_out_what_a_method_does_not_have():
    metrics = {"beta_elbo": None, "kl": None, "log_px": -80.125, "psnr": 18.0, "perplexity": 3.0}
    assert one_line(metrics).split() == ["log", "p(x|z)", "-80.12", "PSNR", "18.00"]


# errors


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((), "name at least one run"),
        (("nowhere",), "nowhere/best.pt does not exist"),
        (("nowhere", "--checkpoints=last"), "did you mean checkpoint"),
        (("nowhere", "--device=cuba"), "cuba"),
        (("nowhere", "--batch_size=0"), "batch_size"),
        (("nowhere", "--n_workers=-1"), "n_workers is -1, must be zero or more"),
        (("RUN", "--export_to=RUN"), "must be another folder than the run's"),
        (("nowhere", "--record=x.json"), "must end in .jsonl"),
        (("nowhere.jsonl",), "nowhere.jsonl: No such file"),
        (("EMPTY.jsonl",), "EMPTY.jsonl is not a record of runs"),
        (("RUN/log.jsonl",), "log.jsonl is not a record of runs"),
        (("RUN", "COPY", "--curves=/dev/null/x.png"), "/dev/null"),
        (("RUN", "--data_dir=nowhere", "--checkpoint=worst"), "worst.pt does not exist"),
    ],
)
def test_a_bad_call_is_refused_in_one_line(arguments, match, finished_run, tmp_path):
    if "COPY" in arguments:
        shutil.copytree(finished_run, tmp_path / "COPY")
    (tmp_path / "EMPTY.jsonl").touch()
    names = {"RUN": finished_run, "COPY": tmp_path / "COPY", "EMPTY": tmp_path / "EMPTY"}
    words = (re.sub("RUN|COPY|EMPTY", lambda word: str(names[word[0]]), w) for w in arguments)
    assert_one_line(run_here("eval.py", *words), match)


@pytest.mark.parametrize(
    "dataset, shape, bits",
    [("mnist", X_SHAPE, 64), ("cifar10", (3, 32, 32), 576), ("imagenet", (3, 256, 256), 10_240)],
)
def test_the_models_of_all_methods_are_of_one_size(finished_run, dataset, shape, bits):
    """All have the same bits and, except for the paper's own one-pass models on ImageNet (9 %
    larger), total numbers of parameters within 5 % of DAPS."""
    defaults, totals = load(finished_run).config, {}
    for path in glob.glob(os.path.join(ROOT, "config", f"{dataset}_*.py")):
        config = defaults | {key: value for key, value, _ in read_config(path)}
        if os.path.basename(path) == f"{dataset}_{config['method']}.py":
            assert config["n_tokens"] * math.log2(config["vocab_size"]) == bits
            with torch.device("meta"):
                totals[config["method"]] = sum(n_parameters(build_model(config, shape)))
    assert len(totals) == {"mnist": len(METHODS), "cifar10": 9, "imagenet": 7}[dataset]
    for method, total in totals.items():
        paper_s_own = dataset == "imagenet" and method.endswith("_na")
        assert total == pytest.approx(totals["daps"], rel=0.09 if paper_s_own else 0.05), method
