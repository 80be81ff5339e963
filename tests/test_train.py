"""train.py as a user runs it: schedules, an exact resume after any end, signals, processes."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from conftest import SMALL, TINY, assert_one_line, assert_same_run, log_rows, photograph, run

from build import METHODS
from run import load_checkpoint


def last(out_dir):
    return load_checkpoint(str(out_dir / "last.pt"))


def files_of(out_dir):
    return {path.name: path.read_bytes() for path in out_dir.iterdir()}


# a run


def test_a_run_leaves_checkpoints_a_log_and_pictures(finished_run):
    pictures = {"reconstructions.png", "samples.png", "codes.png", "curves.png"}
    texts = {"log.jsonl", "config.json", "eval.json"}
    assert set(os.listdir(finished_run)) == {"last.pt", "best.pt"} | texts | pictures
    assert [row["step"] for row in log_rows(finished_run, "train")] == list(range(1, 13))
    assert [row["step"] for row in log_rows(finished_run, "val")] == [4, 8, 12]
    config = json.loads((finished_run / "config.json").read_text())
    assert config["vocab_size"] == 32 and config["dataset"] == "glyphs"
    assert last(finished_run)["config"] == config


def test_schedules_start_and_end_where_the_settings_say(finished_run):
    rows = log_rows(finished_run, "train")
    betas = [0.5, 0.5 * 0.02 ** (5 / 11), 0.01]
    assert [rows[i]["beta"] for i in (0, 5, 11)] == pytest.approx(betas)
    cosine = [(1 + math.cos(math.pi * i / 12)) / 2 for i in range(12)]
    expected = [6e-3 * (i + 1) / 50 * c for i, c in enumerate(cosine)]  # 50 steps warm up
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    decoder, encoder, scale, eta = last(finished_run)["optimizer"]["param_groups"]
    rates = [group["lr"] for group in (decoder, encoder, scale, eta)]
    assert rates == pytest.approx([expected[-1], expected[-1], 0, 1e-3])
    assert scale["weight_decay"] == eta["weight_decay"] == 0 and decoder["weight_decay"] == 1e-4


METRICS = """
import itertools
scores, score = itertools.count(), evaluation.evaluate
def evaluate(*arguments, **options):
    metrics, counts = score(*arguments, **options)
    i = next(scores)
    has_kl = metrics["beta_elbo"] is not None
    metrics |= dict(log_px=-1.0 - i, beta_elbo=-9.0 + i * (i < 2) if has_kl else None)
    return metrics, counts
evaluation.evaluate = evaluate
"""


@pytest.mark.parametrize("method, step", [("daps", 8), ("vqvae", 4)])
def test_best_pt_has_the_best_beta_elbo_or_else_log_p(forker, tmp_path, method, step):
    """log p(x|z) is -1, -2, -3 at steps 4, 8 and 12, the beta-ELBO -9, -8, -9."""
    forker.finish(*TINY, f"--method={method}", f"--out_dir={tmp_path / 'run'}", fault=METRICS)
    assert load_checkpoint(str(tmp_path / "run" / "best.pt"))["step"] == step
    assert last(tmp_path / "run")["step"] == 12
    best = load_checkpoint(str(tmp_path / "run" / "best.pt"))["best"]
    assert best == (-8 if method == "daps" else -1)


def test_a_gradient_that_is_not_finite_ends_the_run_but_last_pt_stands(forker, tmp_path):
    settings = (*TINY, "--lr=1e30", "--eval_interval=1", f"--out_dir={tmp_path / 'run'}")
    done = forker.train(*settings)
    step = last(tmp_path / "run")["step"]
    assert_one_line(done, f"error: step {step + 1}: the gradient is not finite", "--lr")
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()


# resume, bit for bit


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_resumes_exactly_after_a_kill(method, forker, tmp_path):
    settings = (*TINY, "--max_steps=20", "--eval_interval=10", "--mc_samples=4", "--scale_lr=2")
    settings += ("--split_interval=4", "--kmeans_start=True", "--fsq_levels=8 4")
    settings += ("--encoder_lr=0.5", f"--method={method}")
    output = forker.finish(*settings, f"--out_dir={tmp_path / 'whole'}")
    assert method in output.splitlines()[-2]  # the table
    reward = [row["reward"] for row in log_rows(tmp_path / "whole", "train")]
    untrained = 28 * 28 * math.log(0.5)
    assert sum(reward[-5:]) / 5 > untrained + 50
    rates = [group["lr"] for group in last(tmp_path / "whole")["optimizer"]["param_groups"]]
    assert rates[1:3] == pytest.approx([rates[0] / 2, rates[0] * 2])
    assert rates[0] == log_rows(tmp_path / "whole", "train")[-1]["lr"]
    assert (tmp_path / "whole" / "codes.png").exists() == (method != "gaussian")
    settings += (f"--out_dir={tmp_path / 'parts'}",)
    assert forker.train(*settings, fault="strike('step', 13)").code == -signal.SIGKILL
    no_report = "evaluation.evaluate_runs = lambda *_, **__: None"
    assert "resuming at step 10" in forker.finish(*settings, "--resume", fault=no_report)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(forker, finished_run, tmp_path):
    """With its first checkpoint half written, in a step, and so on, one after the other."""
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}", "--resume"), tmp_path / "run"
    kills, steps = {"save": 3, "step": 6, "move": 4, "evaluation": 2, "report": 1}, []
    for where, nth in kills.items():  # files 1 and 2 are the log and config.json
        done = forker.train(*settings, fault=f"strike({where!r}, {nth})")
        assert done.code == -signal.SIGKILL, done.errors
        steps.append(last(out_dir)["step"] if (out_dir / "last.pt").exists() else 0)
    assert steps == [0, 4, 4, 8, 12]
    assert "no checkpoint yet" not in done.output and "resuming at step 8" in done.output
    forker.finish(*settings)
    assert_same_run(out_dir, finished_run)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_saves_and_says_how_to_go_on(number, forker, finished_run, tmp_path):
    settings = (*TINY, f"--out_dir={tmp_path / 'run'}")
    done = forker.train(*settings, fault=f"strike('step', 6, {number:d})")
    assert (done.code, done.errors) == (128 + number, "")
    advice = "stopped at step 6; the same command with --resume continues from here\n"
    assert done.output.endswith(advice) and last(tmp_path / "run")["step"] == 6
    forker.finish(*settings, "--resume")
    assert_same_run(tmp_path / "run", finished_run)


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(name, *rest):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
sys.path.insert(0, ".")
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.parametrize("script", ("train.py", "eval.py"))
def test_ctrl_c_in_the_first_second_ends_in_one_line(script):
    """While torch is imported."""
    assert run("-c", INTERRUPTED.format(script)).stderr == "error: stopped\n"


@pytest.mark.parametrize("where", ("start", "report"))
def test_ctrl_c_before_and_after_training_ends_in_one_line(where, forker, tmp_path):
    fault = f"strike({where!r}, 1, {signal.SIGINT:d})"
    done = forker.train(*TINY, "--max_steps=1", f"--out_dir={tmp_path / 'run'}", fault=fault)
    assert (done.code, done.errors) == (130, "error: stopped\n")


REPEATED = """
import run
save = run.write
def write(path, content):
    for _ in range(3 if path.endswith("last.pt") else 0):
        os.kill(0, signal.SIGTERM)
    save(path, content)
run.write = write
strike("step", 6, signal.SIGTERM)
"""


def test_a_repeated_signal_changes_nothing_also_when_readers_of_images_get_it(forker, tmp_path):
    """As from a scheduler that signals every process, and torchrun that passes it on: in a step,
    and while the checkpoint is written."""
    os.makedirs(tmp_path / "pictures")
    for i in range(20):
        photograph(40, 32, seed=i).save(tmp_path / "pictures" / f"{i}.png")
    settings = (*SMALL, "--dataset=imagenet", "--image_size=16", "--n_workers=2", "--max_steps=9")
    settings += (f"--data_dir={tmp_path / 'pictures'}", "--method=daps_na", "--eval_interval=9")
    cache = f"data.CACHE_DIR = {str(tmp_path / 'cache')!r}\n"
    forker.finish(*settings, f"--out_dir={tmp_path / 'whole'}", fault=cache)
    settings += (f"--out_dir={tmp_path / 'parts'}",)
    done = forker.train(*settings, fault=cache + REPEATED)
    assert (done.code, done.errors) == (143, "") and "stopped at step 6" in done.output
    forker.finish(*settings, "--resume", fault=cache)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


FULL = """
import resource
step, steps = torch.optim.AdamW.step, []
def limited_step(*arguments, **options):
    steps.append(1)
    if len(steps) == 6:  # files may not grow beyond this size
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return step(*arguments, **options)
torch.optim.AdamW.step = limited_step
"""


def test_a_full_disk_leaves_what_was_there_and_says_so(forker, finished_run, tmp_path):
    settings = (*TINY, f"--out_dir={tmp_path / 'run'}")
    assert_one_line(forker.train(*settings, fault=FULL), "File too large")
    assert last(tmp_path / "run")["step"] == 4 and not list(tmp_path.glob("run/*.part"))
    forker.finish(*settings, "--resume")
    assert_same_run(tmp_path / "run", finished_run)


# existing runs


def test_an_out_dir_that_holds_a_run_is_refused_and_left_alone(forker, finished_run):
    before = files_of(finished_run)
    done = forker.train(*TINY, f"--out_dir={finished_run}")
    assert_one_line(done, "holds a run", "--resume", "--out_dir")
    for change in ("method=daps_na", "lr=1e-4"):
        done = forker.train(*TINY, f"--out_dir={finished_run}", "--resume", f"--{change}")
        assert_one_line(done, f"error: {change.split('=')[0]} is", "must not change")
    done = forker.train(*TINY, f"--out_dir={finished_run}", "--resume", "--max_steps=11")
    assert_one_line(done, "is at step 12, past max_steps = 11")
    settings, fault = (*TINY, f"--out_dir={finished_run}"), "LETTERS.scale.mean.add_(0.1)"
    done = forker.train(*settings, "--resume", "--max_steps=13", fault=fault)
    assert_one_line(done, "resume: the data in", "are not those the run began with")
    assert files_of(finished_run) == before


def test_a_run_continues_from_best_pt_alone_but_a_shared_model_does_not(
    forker, finished_run, tmp_path
):
    run, shared = tmp_path / "run", tmp_path / "shared"
    forker.train(*TINY, f"--out_dir={run}", fault="strike('move', 4)")  # as last.pt gets its name
    assert (run / "best.pt").exists() and not (run / "last.pt").exists()
    assert "resuming at step 4" in forker.finish(*TINY, f"--out_dir={run}", "--resume")
    assert_same_run(run, finished_run)
    forker.finish(run, f"--export_to={shared}", script="eval.py")
    before, done = files_of(shared), forker.train(*TINY, f"--out_dir={shared}", "--resume")
    assert_one_line(done, "best.pt has no optimizer, so it cannot be continued")
    assert files_of(shared) == before


def test_damaged_files_of_a_run_are_refused_or_mended(forker, finished_run, tmp_path):
    """The checkpoint is refused; the log loses what is damaged; config.json is for people."""
    out_dir = tmp_path / "run"
    shutil.copytree(finished_run, out_dir)
    settings = (*TINY, f"--out_dir={out_dir}", "--resume", "--max_steps=13")
    (out_dir / "last.pt").write_bytes((finished_run / "last.pt").read_bytes()[:5000])
    before = files_of(out_dir)
    assert_one_line(forker.train(*settings), "last.pt is not a readable checkpoint")
    assert files_of(out_dir) == before
    saved = last(finished_run) | {"best": 0.0}  # better than what is to come
    torch.save(saved, out_dir / "last.pt")
    best = (out_dir / "best.pt").read_bytes()
    (out_dir / "config.json").write_text('{"lr": ')
    (out_dir / "log.jsonl").write_bytes((out_dir / "log.jsonl").read_bytes()[:900] + b"\xff\n{]")
    forker.finish(*settings)
    steps = [row["step"] for row in log_rows(out_dir, "train")]
    assert steps[0] == 1 and steps[-1] == 13 and steps == sorted(steps)
    assert last(out_dir)["best"] == 0 and (out_dir / "best.pt").read_bytes() == best
    assert json.loads((out_dir / "config.json").read_text())["max_steps"] == 13


# Several processes. Another size of a matrix takes another kernel, which sums in another order.
# log p(x|z) of an untrained model is 784 log 0.5 = -543 nats, where float32 has one number every
# 2**-14 = 6e-5, so sums of it differ by a few such steps.

STEP, LR = 2.0**-14, 1e-3


def assert_close_runs(one, two):
    """The same run up to rounding."""
    ours, theirs = last(one)["model"], last(two)["model"]
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
        a, b = ({k: v for k, v in row.items() if isinstance(v, (int, float))} for row in (a, b))
        # The norm of the gradient, eta and the ESS inherit the relative error of the weights.
        assert len(a) >= 4 and a == pytest.approx(b, rel=8 * STEP, abs=8 * STEP)


@pytest.mark.parametrize("choice", ("solve", "gradient", "vqvae", "ppo", "gumbel"))
def test_two_processes_train_the_same_parameters_as_one(choice, forker, tmp_path):
    """Gumbel-Softmax computes nothing over a batch: two processes also divide their shares. Of it,
    only the log is compared; where the gradient vanishes, rounding decides Adam's step."""
    key = "eta_update" if choice in ("solve", "gradient") else "method"
    settings = (*TINY, "--max_steps=5", "--eval_interval=5", f"--lr={LR}", f"--{key}={choice}")
    if choice == "vqvae":  # more values than the batch has tokens would be ties
        settings += ("--eval_examples=1",)  # none for the second process
    else:
        settings += ("--split_interval=2", "--vocab_size=256")  # by what all processes drew
    one, two, divided = tmp_path / "one", tmp_path / "two", choice == "gumbel"
    forker.finish(*settings, f"--out_dir={one}")
    output = forker.finish_ranks(*settings, f"--accumulate={1 + divided}", f"--out_dir={two}")
    assert "5 steps of 16, 8 for each of 2 processes on cpu" in output
    (assert_close_logs if divided else assert_close_runs)(one, two)
    assert (log_rows(one, "train")[-1]["n_split"] > 0) == (choice != "vqvae")


@pytest.fixture(scope="module")
def pair(forker, tmp_path_factory):
    """A run by two processes that was never interrupted."""
    out_dir = tmp_path_factory.mktemp("pair") / "run"
    forker.finish_ranks(*TINY, f"--out_dir={out_dir}")
    return out_dir


def test_two_processes_of_which_one_is_struck_say_so_and_resume_exactly(forker, pair, tmp_path):
    """By a kill, then by a signal, which stops both after the same step."""
    settings = (*TINY, f"--out_dir={tmp_path / 'run'}", "--resume")
    other, struck = forker.ranks((settings, ""), (settings, "strike('step', 6)"))
    assert struck.code == -signal.SIGKILL
    assert_one_line(other, "error: another process of this run died", "--resume")
    both = forker.ranks((settings, ""), (settings, f"strike('step', 2, {signal.SIGTERM:d})"))
    assert [done.code for done in both] == [143, 143] and not both[1].errors
    assert "stopped at step 6" in both[0].output
    forker.finish_ranks(*settings)
    assert_same_run(tmp_path / "run", pair)


WORKER = """
import os, runpy, signal, sys
sys.path[:0] = ["tests", "."]
from conftest import strike
kill = os.kill
def kill_all(process, number):
    if os.environ["RANK"] == "0":
        kill(os.getppid(), number)
    kill(process, number)
os.kill = kill_all
strike("step", 6, signal.SIGTERM)
runpy.run_path("train.py", run_name="__main__")
"""


def test_sigterm_to_torchrun_and_to_its_workers_saves_and_leaves(forker, pair, tmp_path):
    """torchrun passes the signal on, so that workers get it twice."""
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    settings = (*TINY, f"--out_dir={tmp_path / 'run'}")
    done = run(*torchrun, tmp_path / "worker.py", *settings)
    assert "stopped at step 6; the same command with --resume" in done.stdout, done.stderr
    assert last(tmp_path / "run")["step"] == 6
    forker.finish_ranks(*settings, "--resume")
    assert_same_run(tmp_path / "run", pair)
