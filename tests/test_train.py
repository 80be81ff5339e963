"""train.py as a user runs it: runs, resumes, shares its work, and leaves other runs alone."""

import json
import math
import os
import shutil
import signal

import pytest
from conftest import (
    TINY,
    TORCHRUN,
    assert_one_line,
    assert_same_run,
    launch,
    log_rows,
    same,
    struck,
)

from checkpoint import load_checkpoint
from models import METHODS

# files of a run


def test_a_run_leaves_checkpoints_a_log_and_pictures(finished_twin):
    files = set(os.listdir(finished_twin))
    pictures = {"reconstructions.png", "samples.png", "codes.png", "curves.png"}
    texts = {"log.jsonl", "config.json", "eval.json", ".lock"}
    assert files == {"last.pt", "best.pt"} | texts | pictures
    assert [row["step"] for row in log_rows(finished_twin, "train")] == list(range(1, 13))
    assert [row["step"] for row in log_rows(finished_twin, "val")] == [4, 8, 12]
    row = log_rows(finished_twin)[0]
    assert {"reward", "log_q", "kl", "ess", "eta", "beta", "lr", "loss"} < row.keys()
    config = json.loads((finished_twin / "config.json").read_text())
    assert config["vocab_size"] == 32 and config["method"] == "daps"
    assert load_checkpoint(finished_twin / "last.pt")["config"] == config


def test_schedules_start_and_end_where_the_settings_say(finished_twin):
    rows = log_rows(finished_twin, "train")
    assert rows[0]["beta"] == pytest.approx(0.5) and rows[-1]["beta"] == pytest.approx(0.01)
    assert rows[5]["beta"] == pytest.approx(0.5 * (0.01 / 0.5) ** (5 / 11))
    assert rows[0]["lr"] == pytest.approx(6e-3 / 2)  # the first of two steps of warm-up
    assert rows[6]["lr"] == pytest.approx(6e-3 / 2)  # half-way down the cosine
    optimizer = load_checkpoint(finished_twin / "last.pt")["optimizer"]
    *_, scale, eta = groups = optimizer["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([rows[-1]["lr"]] * 2 + [0, 1e-3])
    assert scale["weight_decay"] == eta["weight_decay"] == 0 and groups[0]["weight_decay"] == 1e-4


def test_the_same_seed_gives_the_same_run_and_another_seed_another(forker, finished_twin, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    forker.finish(*TINY, f"--out_dir={again}")
    assert_same_run(again, finished_twin)
    forker.finish(*TINY, f"--out_dir={other}", "--seed=1")
    ours, theirs = (load_checkpoint(d / "last.pt") for d in (other, finished_twin))
    assert not same(ours["model"], theirs["model"])
    assert not {*map(str, log_rows(other))} & {*map(str, log_rows(finished_twin))}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_resumes_exactly_and_is_evaluated(method, forker, tmp_path):
    settings = (
        *TINY,
        "--max_steps=40",
        "--eval_interval=10",
        "--mc_samples=4",
        "--split_interval=4",
        "--kmeans_start=True",
        "--scale_lr=2",
    )
    settings += (f"--method={method}", "--fsq_levels=8 4")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = forker.finish(*settings, f"--out_dir={whole}")
    assert method in output.splitlines()[-2]  # the table
    reward = [row["reward"] for row in log_rows(whole, "train")]
    untrained = 28 * 28 * math.log(0.5)
    assert sum(reward[-5:]) / 5 > untrained + 250
    assert {"reconstructions.png", "samples.png", "curves.png"} < set(os.listdir(whole))
    assert (whole / "codes.png").exists() == (method != "gaussian")
    score = "log_px" if method in ("vqvae", "fsq") else "beta_elbo"
    best = max(log_rows(whole, "val"), key=lambda row: row[score])
    assert load_checkpoint(whole / "best.pt")["step"] == best["step"]
    assert json.loads((whole / "eval.json").read_text())["steps"] == best["step"]
    settings += (f"--out_dir={parts}",)
    assert forker.train(*settings, fault=struck("step", 13)).code == -signal.SIGKILL
    assert "resumed at " in forker.finish(*settings, "--resume=True")
    assert_same_run(parts, whole)


# interruptions by the user, and by non-finite numbers


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_saves_and_says_how_to_go_on(number, forker, finished_twin, tmp_path):
    out_dir = tmp_path / "run"
    settings = (*TINY, f"--out_dir={out_dir}", "--eval_interval=12")
    done = forker.train(*settings, fault=struck("step", 6, number))
    assert done.code == 128 + number and not done.errors, done.errors
    assert done.output.endswith(
        "stopped; at step 6; the same command with --resume=True continues from here\n"
    )
    assert load_checkpoint(out_dir / "last.pt")["step"] == 6
    forker.finish(*settings, "--resume=True")
    ours, theirs = (load_checkpoint(d / "last.pt") for d in (out_dir, finished_twin))
    assert same(ours["model"], theirs["model"]) and same(ours["optimizer"], theirs["optimizer"])


def test_non_finite_gradients_are_skipped_counted_and_finally_stop_the_run(forker, tmp_path):
    out_dir = tmp_path / "run"
    extra = ("--lr=1e30", "--max_skipped=5", "--max_steps=100")
    done = forker.train(*TINY, *extra, f"--out_dir={out_dir}")
    assert_one_line(done, "error: non-finite gradients in 5 steps", "--lr")
    assert log_rows(out_dir)[-1]["skipped"] >= 4
    assert "NaN" not in (out_dir / "log.jsonl").read_text()
    (done,) = forker.run((("eval.py", out_dir, "--checkpoint=last"), "", {}))
    assert done.code == 0, done.errors  # it can be looked at


POISON = """
clip = torch.nn.utils.clip_grad_norm_
def poisoned(weights, most):
    weights[0].grad.fill_(float("nan"))
    return clip(weights, most)
torch.nn.utils.clip_grad_norm_ = poisoned
"""


@pytest.mark.parametrize("method", ("daps", "vqvae"))
def test_a_step_with_a_non_finite_gradient_changes_nothing(method, forker, tmp_path):
    run = (*TINY, "--eval_interval=1", f"--method={method}", f"--out_dir={tmp_path / 'run'}")
    forker.finish(*run, "--max_steps=3")
    before = load_checkpoint(tmp_path / "run" / "last.pt")
    forker.finish(*run, "--max_steps=4", "--resume=True", fault=POISON)
    after = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (after["step"], after["skipped"]) == (4, 1)
    for part in (before["model"], after["model"]):
        part.pop("log_eta", None)  # solved anew for every batch
    assert same(after["model"], before["model"])
    assert same(after["optimizer"]["state"], before["optimizer"]["state"])


# Several processes. Another size of a matrix takes another kernel, which sums in another order.
# log p(x|z) of an untrained model is 784 log 0.5 = -543 nats, where float32 has one number every
# 2**-14 = 6e-5, so sums of it differ by a few such steps.

STEP = 2.0**-14
LR = 1e-3


def assert_close_runs(one, two):
    """The same run up to rounding."""
    ours, theirs = (load_checkpoint(d / "last.pt")["model"] for d in (one, two))
    for name, p in ours.items():
        # Weights of codes are a softmax of rewards over eta + beta, which is about 1 or more: their
        # relative error is that of some STEPs, 1e-4 or less, and so is the gradient's. Adam moves a
        # parameter by up to LR in a step, a hundredth of which leaves room where terms cancel; one
        # entry in a thousand may have so small a gradient that rounding decides more of its step.
        # log eta is moved by STEPs over the spread of the K rewards, which is 1 or more as well.
        atol = 8 * STEP if name == "log_eta" else LR / 100
        error = (theirs[name].double() - p.double()).abs()
        assert (error > atol).sum() <= p.numel() // 1000 and error.max() <= 10 * atol, name
    assert_close_logs(one, two)


def assert_close_logs(one, two):
    for a, b in zip(log_rows(one), log_rows(two), strict=True):
        a, b = ({k: v for k, v in row.items() if isinstance(v, float)} for row in (a, b))
        # The norm of the gradient, eta and the ESS inherit the relative error of the weights.
        assert len(a) >= 4 and a == pytest.approx(b, rel=8 * STEP, abs=8 * STEP)


CHOICES = ("eta_update=solve", "eta_update=gradient", "method=vqvae", "method=rloo", "method=ppo")


@pytest.mark.parametrize("choice", (*CHOICES, "method=gumbel"))
def test_two_processes_train_the_same_parameters_as_one(choice, forker, tmp_path):
    settings = (*TINY, "--max_steps=5", "--eval_interval=5", f"--lr={LR}", f"--{choice}")
    settings += ("--split_interval=2", "--vocab_size=256")  # by what all processes drew
    forker.finish(*settings, f"--out_dir={tmp_path / 'one'}")
    output = forker.finish_ranks(*settings, f"--out_dir={tmp_path / 'two'}")
    assert "8 for each of 2 processes" in output
    assert_close_runs(tmp_path / "one", tmp_path / "two")
    assert (log_rows(tmp_path / "one", "train")[-1]["n_split"] > 0) == ("vqvae" not in choice)


def test_two_processes_that_split_their_shares_learn_what_one_does_at_once(forker, tmp_path):
    """With Gumbel-Softmax, which computes nothing over a batch. Only the log is compared, with the
    norm of the gradient: where a gradient vanishes, rounding decides Adam's step."""
    settings = (*TINY, "--max_steps=3", "--eval_interval=3", f"--lr={LR}", "--method=gumbel")
    forker.finish(*settings, f"--out_dir={tmp_path / 'one'}")
    forker.finish_ranks(*settings, "--accumulate=2", f"--out_dir={tmp_path / 'two'}")
    assert_close_logs(tmp_path / "one", tmp_path / "two")


def test_a_run_can_be_resumed_with_another_number_of_processes(forker, tmp_path):
    """Here by torchrun itself."""
    settings = (*TINY, "--max_steps=6", "--eval_interval=3", f"--lr={LR}")
    forker.finish(*settings, f"--out_dir={tmp_path / 'one'}")
    two = (*settings, f"--out_dir={tmp_path / 'two'}")
    assert forker.train(*two, fault=struck("step", 5)).code == -signal.SIGKILL
    job = launch(tmp_path / "script.py", *TORCHRUN, arguments=(*two, "--resume=True"))
    output, errors = job.communicate()
    assert job.returncode == 0 and "resumed at step 3" in output, errors
    assert load_checkpoint(tmp_path / "two" / "last.pt")["step"] == 6
    assert_close_runs(tmp_path / "one", tmp_path / "two")


# other ways to compute


def test_bfloat16_on_the_cpu_starts_out_close_to_float32(forker, finished_twin, tmp_path):
    """The same noise decides the codes, so the first batch has nearly the same numbers: bfloat16
    has 8 bits, an error of 0.4 %, which averages out in a sum over pixels."""
    settings = (*TINY, "--max_steps=1", "--dtype=bfloat16")
    forker.finish(*settings, f"--out_dir={tmp_path / 'run'}")
    a, b = (log_rows(d)[0] for d in (tmp_path / "run", finished_twin))
    assert a["reward"] == pytest.approx(b["reward"], rel=0.01) and a["reward"] != b["reward"]
    assert a["log_q"] == pytest.approx(b["log_q"], rel=0.01)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)
    assert a["ess"] == pytest.approx(b["ess"], abs=1e-3)


BACKEND = """
compile_by = torch.compile
torch.compile = lambda f, **options: compile_by(f, **options | dict(backend={!r}, mode=None))
"""


@pytest.mark.parametrize(
    "backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.stress))
)
def test_compiled_processes_train_as_one_eager_process_does(backend, forker, tmp_path):
    """On the CPU. By default the traced graphs run uncompiled, which saves a minute of C++."""
    settings = (*TINY, "--n_tokens=2", "--max_steps=3", "--eval_interval=3", f"--lr={LR}")
    forker.finish(*settings, f"--out_dir={tmp_path / 'eager'}")
    compiled = (*settings, "--use_compile=True", f"--out_dir={tmp_path / 'compiled'}")
    for done in forker.ranks(*[(compiled, BACKEND.format(backend))] * 2):
        assert done.code == 0, done.output + done.errors
    assert_close_runs(tmp_path / "eager", tmp_path / "compiled")


# existing runs


def files_of(out_dir):
    return {path.name: path.read_bytes() for path in out_dir.iterdir()}


def test_an_out_dir_that_holds_a_run_is_refused_and_left_alone(forker, finished_twin):
    before = files_of(finished_twin)
    done = forker.train(*TINY, f"--out_dir={finished_twin}")
    assert_one_line(done, "holds a run", "--resume=True", "--overwrite=True")
    assert files_of(finished_twin) == before


def test_overwrite_replaces_a_run(forker, finished_twin, tmp_path):
    out_dir = tmp_path / "run"
    shutil.copytree(finished_twin, out_dir)
    settings = (*TINY, "--max_steps=2", f"--out_dir={out_dir}", "--overwrite=True")
    assert forker.train(*settings, fault=struck("step", 2)).code == -signal.SIGKILL
    assert not (out_dir / "eval.json").exists()  # a sign that a run has finished
    forker.finish(*settings)
    assert load_checkpoint(out_dir / "last.pt")["step"] == 2
    assert [row["step"] for row in log_rows(out_dir)] == [1, 2, 2]


@pytest.mark.parametrize("change", ("width=64", "n_tokens=4", "method=daps_na", "lr=1e-4"))
def test_a_resume_with_other_settings_is_refused_and_loses_nothing(change, forker, finished_twin):
    before = files_of(finished_twin)
    done = forker.train(*TINY, f"--out_dir={finished_twin}", "--resume=True", f"--{change}")
    assert_one_line(done, f"error: resume: {change.split('=')[0]} is", "must stay the same")
    assert files_of(finished_twin) == before


def test_a_resume_past_the_last_step_is_refused(forker, finished_twin):
    done = forker.train(*TINY, f"--out_dir={finished_twin}", "--resume=True", "--max_steps=11")
    assert_one_line(done, "is at step 12, past max_steps = 11")


def test_a_resume_before_the_first_checkpoint_starts_over_but_not_as_another_run(
    forker, finished_twin, tmp_path
):
    out_dir = tmp_path / "run"
    settings = (*TINY, f"--out_dir={out_dir}", "--resume=True")
    assert forker.train(*settings, fault=struck("step", 3)).code == -signal.SIGKILL
    before = files_of(out_dir)
    assert "last.pt" not in before
    assert_one_line(forker.train(*settings, "--method=daps_na"), "method", "daps")
    assert files_of(out_dir) == before
    assert "resumed at the start" in forker.finish(*settings)
    assert_same_run(out_dir, finished_twin)


def test_a_finished_run_is_resumed_for_its_table_or_for_more_steps(forker, finished_twin, tmp_path):
    out_dir = tmp_path / "run"
    shutil.copytree(finished_twin, out_dir)
    os.remove(out_dir / "eval.json")
    forker.finish(*TINY, f"--out_dir={out_dir}", "--resume=True")
    assert (out_dir / "eval.json").exists()
    assert_same_run(out_dir, finished_twin)
    forker.finish(*TINY, f"--out_dir={out_dir}", "--resume=True", "--max_steps=14")
    assert [row["step"] for row in log_rows(out_dir, "train")] == list(range(1, 15))


def test_a_resume_from_a_damaged_checkpoint_is_refused_and_loses_nothing(
    forker, finished_twin, tmp_path
):
    shutil.copytree(finished_twin, tmp_path / "run")
    cut = (finished_twin / "last.pt").read_bytes()[:5000]
    (tmp_path / "run" / "last.pt").write_bytes(cut)
    before = files_of(tmp_path / "run")
    done = forker.train(*TINY, f"--out_dir={tmp_path / 'run'}", "--resume=True")
    assert_one_line(done, "last.pt is not a readable checkpoint")
    assert files_of(tmp_path / "run") == before
