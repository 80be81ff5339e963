"""eval.py and report.py: metrics with known answers, tables over runs and seeds, loaded models."""

import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ONE_THREAD, ROOT, assert_one_line, config, log_rows, run_here
from PIL import Image

from build import METHODS, build_model
from data import ArrayDataset
from eval import draw_pictures, evaluate, load, load_data, validation_noise
from models import Bernoulli
from report import group_by_seed, n_parameters, read_record, summary
from run import load_checkpoint

X_SHAPE = (1, 28, 28)
MEASURES = ("beta_elbo", "log_px", "kl", "psnr", "code_usage", "perplexity")

# metrics


class Known(torch.nn.Module):
    """B = 2, V = 4: token 1 is always 3, token 2 tells if x is bright; pixels are 0.9 or 0.1."""

    discrete = has_kl = True
    logits = torch.tensor([0.1, 0.9]).logit()

    def __init__(self):
        super().__init__()
        kl = torch.full((8, 1), 1.5)
        self.encoder = lambda x, n, noise, with_kl: (self.codes(x), None, kl[: len(x)])
        self.encoder.n_tokens, self.encoder.vocab_size = 2, 4

    def codes(self, x):
        bright = (x.mean(dim=(1, 2, 3)) > 0.5).long()
        return torch.stack([torch.full_like(bright, 3), bright], dim=1).unsqueeze(1)

    def decode(self, z):
        return Bernoulli(self.logits[z[:, 1]].view(-1, 1, 1, 1).expand(-1, *X_SHAPE))


@pytest.mark.parametrize("batch_size", (3, 8))
def test_metrics_have_their_known_values(batch_size):
    x = torch.cat([torch.ones(6, *X_SHAPE), torch.zeros(2, *X_SHAPE)]).byte() * 255
    x[0, :, :7] = 0  # a quarter of one is wrong
    data = ArrayDataset("known", x, x[:, 0, 0, 0], x, x[:, 0, 0, 0])
    metrics, counts = evaluate(Known(), data, 0.1, torch.arange(8), "cpu", batch_size)
    log_px = 784 * math.log(0.9) + 784 / 4 / 8 * math.log(0.1 / 0.9)
    assert metrics["log_px"] == pytest.approx(log_px, rel=1e-5)
    assert metrics["kl"] == pytest.approx(1.5)
    assert metrics["beta_elbo"] == pytest.approx(log_px - 0.15, rel=1e-5)
    psnr = (7 * 20 - 10 * math.log10(0.75 * 0.01 + 0.25 * 0.81)) / 8  # mse 0.01, but for one
    assert metrics["psnr"] == pytest.approx(psnr, abs=1e-4)
    assert metrics["code_usage"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert metrics["perplexity"] == pytest.approx((1 + math.exp(entropy)) / 2)
    assert counts.tolist() == [[0, 0, 0, 8], [2, 6, 0, 0]] and metrics["examples"] == 8


def test_the_reported_elbo_matches_a_slow_computation_by_hand(finished_run):
    """log p(x|z) pixel by pixel, and the KL as the mean of log q - log p over many codes."""
    model = load(finished_run)
    x = load_data(model).x_val[:2].float() / 255
    z = model.encode(x)
    p = model.decode(z).mean
    by_hand = (x * p.log() + (1 - x) * (1 - p).log()).sum(dim=(1, 2, 3))
    # p is off by 2^-24 at most, so log p by 2^-24 / p: less than 2^-10 where p > 2^-14. The terms
    # are of one sign, and few are as far off.
    torch.testing.assert_close(model.decode(z).log_prob(x), by_hand, rtol=2**-10, atol=0)
    assert p.min() > 2**-14 and p.max() < 1 - 2**-14
    _, log_q, kl = model.encoder(x, 4000, with_kl=True)  # (2, 4000) each
    sampled = log_q + 8 * math.log(32)
    error = (sampled - kl).std(dim=1) / 4000**0.5
    assert ((sampled - kl).mean(dim=1).abs() < 5 * error).all()  # five standard errors
    assert (error < 0.1).all()


def test_eval_json_agrees_with_the_log_of_the_best_step_and_with_itself(finished_run):
    row = json.loads((finished_run / "eval.json").read_text())
    best = max(log_rows(finished_run, "val"), key=lambda row: row["beta_elbo"])
    assert row["steps"] == best["step"] and row["bits"] == 40
    assert {key: row[key] for key in MEASURES} == {key: best[key] for key in MEASURES}
    assert (row["encoder"], row["decoder"]) == n_parameters(load(finished_run))
    assert run_here("eval.py", finished_run).code == 0
    assert json.loads((finished_run / "eval.json").read_text()) == row


def test_the_noise_of_an_example_is_its_own_whatever_the_batch(finished_run):
    model = load(finished_run)
    data, index = load_data(model), torch.tensor([40, 3, 7, 21, 0])
    metrics, counts = evaluate(model, data, 0.1, index, "cpu", 2)
    x, noise = data.x_val[index].float() / 255, validation_noise(model, index, "cpu")
    z, _, kl = model.encoder(x, 1, noise, with_kl=True)
    assert metrics["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert torch.equal(torch.bincount(z[:, 0, 3], minlength=32), counts[3].long())
    assert not model.training
    assert torch.equal(noise[1:2], validation_noise(model, torch.tensor([3]), "cpu"))


# a loaded model, and its pictures


def test_pictures_show_what_they_should(finished_run):
    x = load_data(load(finished_run)).x_val
    picture = Image.open(finished_run / "reconstructions.png")
    corner = torch.from_numpy(np.array(picture.crop((4, 4, 60, 60))))  # (56, 56)
    assert torch.equal(corner[::2, ::2], x[0, 0])  # the first input, twice as large
    for name in ("samples.png", "codes.png", "curves.png"):
        low, high = Image.open(finished_run / name).convert("L").getextrema()
        assert high - low > 100  # not blank
    few = ArrayDataset("few", x, x[:, 0, 0, 0], x[:18], x[:18, 0, 0, 0])
    page = draw_pictures(load(finished_run), few, "cpu")["reconstructions.png"]
    assert page.size == (16 * 60 + 4, 2 * 60 + 4)  # a whole row above another


def test_an_exported_model_is_smaller_knows_no_local_path_and_gives_the_same_codes(
    finished_run, tmp_path
):
    target = tmp_path / "shared"
    done = run_here("eval.py", finished_run, f"--export_to={target}")
    assert done.code == 0, done.errors
    sizes = [os.path.getsize(folder / "best.pt") for folder in (target, finished_run)]
    assert sizes[0] < 0.5 * sizes[1]
    assert str(finished_run.parent).encode() not in (target / "best.pt").read_bytes()
    assert log_rows(target, "val") == log_rows(finished_run, "val")
    x, noise = torch.rand(4, *X_SHAPE).round(), torch.rand(4, 1, 8)
    ours, theirs = (load(folder).encode(x, noise=noise) for folder in (target, finished_run))
    assert torch.equal(ours, theirs)


REAL_MNIST = os.path.join(os.environ.get("DAPS_DATA", ""), "mnist", "t10k-images-idx3-ubyte.gz")


@pytest.mark.skipif(not os.path.exists(REAL_MNIST), reason="DAPS_DATA names no folder with MNIST")
def test_the_model_that_comes_with_the_code_is_as_good_as_the_readme_says():
    """On 10,000 digits its beta-ELBO is above -44.5 and its PSNR above 18.45 dB; on 1,000 of them
    they may be lower by three errors of a mean, 24 / sqrt(1,000) and 3 / sqrt(1,000)."""
    model = load(os.path.join(ROOT, "assets", "mnist_daps"))
    data = load_data(model, os.environ["DAPS_DATA"])
    metrics, _ = evaluate(model, data, 0.01, torch.arange(1000), "cpu")
    assert metrics["beta_elbo"] > -44.5 - 2.3 and metrics["psnr"] > 18.45 - 0.3
    assert metrics["perplexity"] > 100


# tables over runs and seeds


def another_run(finished_run, out_dir, **settings):
    """A run like the finished one except for these settings, with fresh parameters."""
    shutil.copytree(finished_run, out_dir)
    saved = load_checkpoint(str(out_dir / "best.pt"))
    saved["config"] |= {"out_dir": str(out_dir), **settings}
    saved["model"] = build_model(saved["config"], X_SHAPE).state_dict()
    torch.save(saved, out_dir / "best.pt")
    return out_dir


def test_several_runs_make_one_table_one_plot_and_a_record_of_both(finished_run, tmp_path):
    """Seeds in one row, with the mean of their numbers; VQ-VAE, which has no q, without a KL."""
    seed = another_run(finished_run, tmp_path / "seed", seed=1)
    quantised = another_run(finished_run, tmp_path / "vqvae", method="vqvae")
    (tmp_path / "curves.png").touch()
    record, pictures = tmp_path / "records" / "all.jsonl", (tmp_path / "a.png", tmp_path / "b.png")
    runs, options = (finished_run, seed, quantised), ("--n_workers=0", f"--record={record}")
    done = run_here("eval.py", *runs, tmp_path / "curves.png", f"--curves={pictures[0]}", *options)
    assert done.code == 0, done.errors
    left_out, *lines = done.output.splitlines()
    assert left_out == f"{tmp_path / 'curves.png'} is not a run: left out"
    rows = [json.loads((out_dir / "eval.json").read_text()) for out_dir in runs]
    mean = (rows[0]["beta_elbo"] + rows[1]["beta_elbo"]) / 2
    deviation = abs(rows[0]["beta_elbo"] - rows[1]["beta_elbo"]) / 2**0.5
    header, seeds, vqvae = (line.split() for line in lines[:3])
    assert header[:5] == ["run", "method", "n", "bits", "beta-ELBO"]
    assert seeds[1:7] == ["daps", "2", "40", f"{mean:.2f}", "+-", f"{deviation:.2f}"]
    assert vqvae[1:5] == ["vqvae", "-", "40", "-"]
    assert [run["row"] for run in read_record(record)] == rows
    assert {run["config"]["out_dir"] for run in read_record(record)} == {""}
    # The record alone gives the same; a run that is evaluated again replaces itself in it.
    again = run_here("eval.py", record, f"--curves={pictures[1]}")
    assert again.output.splitlines()[:3] == lines[:3] and "FID" not in again.output
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    run_here("eval.py", finished_run, f"--curves={pictures[1]}", *options)
    assert [run["row"] for run in read_record(record)] == rows
    shown = run_here("eval.py", record, f"--curves={pictures[1]}", "--per_run").output
    assert len(shown.splitlines()[:4]) == 4 and "+-" not in shown


def made_up(seed, step=100, elbo=-80.0, **config):
    """A run: its row of the table and its config."""
    row = {"run": f"out/mnist_{seed}", "method": "daps", "bits": 64.0, "beta_elbo": elbo}
    row |= {"kl": 40.0, "encoder": 1000, "steps": step, "examples": 9}
    base = {"method": "daps", "lr": 1e-3, "aligned": False, "seed": seed, "out_dir": row["run"]}
    config = base | {"step": step, "seconds": 9.0 + seed} | config
    return {"row": row, "config": config, "log": [{"step": 300, "split": "val"}]}


def test_runs_that_differ_in_their_seed_alone_are_averaged():
    """Mean and standard deviation (of a sample, so over n - 1), by hand: -80, -82, -87."""
    runs = [made_up(0, 100, -80.0), made_up(1, 300, -82.0), made_up(2, 200, -87.0)]
    (group,) = group_by_seed(runs)  # although their best checkpoints are of different steps
    row = summary([run["row"] for run in group])
    assert row["n"] == 3 and row["run"] == "out/mnist_*"
    assert row["beta_elbo"] == pytest.approx(-83)
    assert row["beta_elbo std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert (row["kl"], row["kl std"], row["encoder"]) == (40, 0, 1000) and "encoder std" not in row
    assert (row["steps"], row["steps std"]) == (200, 100)
    assert len(group_by_seed(runs, per_run=True)) == 3


def test_a_run_with_another_setting_unfinished_or_of_the_same_seed_is_not_averaged_in():
    for other in ({"lr": 2e-3}, {"method": "daps_na"}, {"max_steps": 7}, {"new_setting": 1}):
        assert [*map(len, group_by_seed([made_up(0), made_up(1, **other), made_up(2)]))] == [2, 1]
    unfinished, again = made_up(1) | {"log": [{"step": 200, "split": "val"}]}, made_up(0, elbo=-81)
    runs = [made_up(0), unfinished, again, made_up(2)]
    assert group_by_seed(runs) == [[runs[0], runs[3]], [unfinished], [again]]
    same = [{}, {"data_dir": "/x"}, {"resume": True}, {"overwrite": True}, {"eval_interval": 7}]
    folders = [{"dataset": "imagenet", "data_dir": path} for path in ("/x", "/y")]
    for several, n_groups in ((same, 1), (folders, 2)):
        assert len(group_by_seed([made_up(i, **s) for i, s in enumerate(several)])) == n_groups


def test_a_number_that_not_all_runs_of_a_group_have_is_not_averaged():
    row = summary([made_up(0)["row"], made_up(1, elbo=math.nan)["row"]])  # a seed diverged
    assert math.isnan(row["beta_elbo"]) and "beta_elbo std" not in row and row["kl"] == 40
    for fids in ({"fid": 150.0}, {"fid": None}), ({"fid": None}, {"fid": 9.0}), ({"fid": 9.0}, {}):
        row = summary([{"run": f"out/c{i}", "psnr": 22.0, **fid} for i, fid in enumerate(fids)])
        assert row["fid"] is None and row["psnr"] == 22.0


@pytest.mark.parametrize(
    "dataset, shape, bits",
    [("mnist", X_SHAPE, 64), ("cifar10", (3, 32, 32), 576), ("imagenet", (3, 256, 256), 10_240)],
)
def test_the_models_of_all_methods_are_of_one_size(dataset, shape, bits):
    """All have the same bits and, except for the paper's own one-pass models on ImageNet (9 %
    larger), total numbers of parameters within 5 % of DAPS."""
    totals = {}
    for method in METHODS:
        if os.path.exists(os.path.join(ROOT, "config", f"{dataset}_{method}.py")):
            settings = config(f"{dataset}_{method}")
            assert settings["n_tokens"] * math.log2(settings["vocab_size"]) == bits
            with torch.device("meta"):
                totals[settings["method"]] = sum(n_parameters(build_model(settings, shape)))
    assert len(totals) == {"mnist": len(METHODS), "cifar10": 9, "imagenet": 7}[dataset]
    for method, total in totals.items():
        papers_own = dataset == "imagenet" and method.endswith("_na")
        assert total == pytest.approx(totals["daps"], rel=0.09 if papers_own else 0.05), method


# errors

BAD_CALLS = {
    "": "name at least one run",
    "nowhere": "nowhere/last.pt does not exist",
    "RUN --export_to=RUN": "a folder that holds none",
    "nowhere --record=x.json": "must end in .jsonl",
    "RUN/a RUN/b --record=RUN/x.jsonl": "none of these is a run",
    "RUN --record=RUN/log.jsonl": "log.jsonl is not a record",
    "RUN/log.jsonl": "log.jsonl is not a record",
    "RUN/best.pt": "does not exist: train it, or name another folder",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_call_is_refused_in_one_line(call, finished_run):
    words = call.replace("RUN", str(finished_run)).split()
    assert_one_line(run_here("eval.py", *words), BAD_CALLS[call])


def test_a_damaged_log_does_not_stop_an_evaluation(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_bytes(b'{"step": \xff')
    assert run_here("eval.py", tmp_path / "run").code == 0


def test_a_reader_that_leaves_early_such_as_head_sees_no_traceback(tmp_path):
    command = [sys.executable, "eval.py", "docs/runs/short.jsonl", f"--curves={tmp_path / 'c.png'}"]
    reader, writer = os.pipe()
    os.close(reader)
    options = dict(cwd=ROOT, env=ONE_THREAD, stderr=subprocess.PIPE, text=True)
    assert subprocess.run(command, stdout=writer, **options).stderr == ""
    os.close(writer)
