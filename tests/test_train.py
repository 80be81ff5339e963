"""train.py as a user meets it: runs, crashes, resumes, shares its work, and refuses bad input."""

import glob
import json
import math
import os
import random
import re
import signal
import time

import pytest
import torch
from conftest import ROOT, TINY, TORCHRUN, run, start, succeed

from configurator import checked, read_config
from eval import METHODS, load_checkpoint


def same(a, b):
    """Whether two checkpoints' contents are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_run(out_dir, twin):
    for name in ("last.pt", "best.pt"):
        ours, theirs = load_checkpoint(out_dir / name), load_checkpoint(twin / name)
        for key in ("model", "optimizer", "step", "best", "skipped"):
            assert same(ours[key], theirs[key]), (name, key)
    assert (out_dir / "log.jsonl").read_text() == (twin / "log.jsonl").read_text()


def log_lines(out_dir):
    path = out_dir / "log.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def log_rows(out_dir):
    return [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]


# what a run leaves behind


def test_a_run_leaves_checkpoints_a_log_and_pictures(finished_run):
    files = set(os.listdir(finished_run))
    pictures = {"reconstructions.png", "samples.png", "codes.png", "curves.png"}
    texts = {"log.jsonl", "config.json", "eval.json", ".lock"}
    assert files == {"last.pt", "best.pt"} | texts | pictures
    rows = log_rows(finished_run)
    assert [r["step"] for r in rows if r["split"] == "train"] == list(range(1, 13))
    assert [r["step"] for r in rows if r["split"] == "val"] == [4, 8, 12]
    assert {"reward", "log_q", "kl", "ess", "eta", "beta", "lr", "loss"} < rows[0].keys()
    config = json.loads((finished_run / "config.json").read_text())
    assert config["vocab_size"] == 32 and config["method"] == "daps"


def test_schedules_start_and_end_where_the_settings_say(finished_run):
    rows = log_rows(finished_run)
    rows = [row for row in rows if row["split"] == "train"]
    assert rows[0]["beta"] == pytest.approx(0.5) and rows[-1]["beta"] == pytest.approx(0.01)
    assert rows[5]["beta"] == pytest.approx(0.5 * (0.01 / 0.5) ** (5 / 11))
    assert rows[0]["lr"] == pytest.approx(6e-3 / 2)  # the first of two steps of warm-up
    assert rows[6]["lr"] == pytest.approx(6e-3 / 2)  # half-way down the cosine


def test_the_same_seed_gives_the_same_run_and_another_seed_another(finished_run, tmp_path):
    succeed("train.py", *TINY, f"--out_dir={tmp_path / 'again'}")
    assert_same_run(tmp_path / "again", finished_run)
    succeed("train.py", *TINY, f"--out_dir={tmp_path / 'other'}", "--seed=1")
    other, ours = (load_checkpoint(d / "last.pt") for d in (tmp_path / "other", finished_run))
    assert not same(other["model"], ours["model"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_resumes_exactly_and_is_evaluated(method, tmp_path):
    settings = (*TINY, "--max_steps=40", "--eval_interval=10", "--mc_samples=4")
    settings += (f"--method={method}", "--fsq_levels=8 4")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = succeed("train.py", *settings, f"--out_dir={whole}")
    assert method in output.splitlines()[-2]  # the table
    score = [row["reward"] for row in log_rows(whole) if row["split"] == "train"]
    untrained = 28 * 28 * math.log(0.5)
    assert sum(score[-5:]) / 5 > untrained + 250
    assert {"reconstructions.png", "samples.png", "curves.png"} < set(os.listdir(whole))
    assert (whole / "codes.png").exists() == (method != "gaussian")
    process = start("train.py", *settings, f"--out_dir={parts}")
    while log_lines(parts) < 12 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    succeed("train.py", *settings, f"--out_dir={parts}", "--resume=True")
    assert_same_run(parts, whole)


# interruptions


def test_a_run_killed_at_random_moments_and_resumed_equals_an_uninterrupted_one(
    finished_run, tmp_path
):
    out_dir, rng = tmp_path / "run", random.Random(0)
    command = ("train.py", *TINY, f"--out_dir={out_dir}")
    kills = 0
    for patience in (1, 3, 6, 9):  # lines of log to wait for; then a random moment
        process = start(*command, *(["--resume=True"] if kills else []))
        enough = log_lines(out_dir) + patience if kills else patience
        while process.poll() is None and log_lines(out_dir) < enough:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.communicate()
    assert kills >= 2
    assert "resumed" in succeed(*command, "--resume=True")
    assert_same_run(out_dir, finished_run)


def test_sigterm_saves_and_says_how_to_go_on(finished_run, tmp_path):
    out_dir = tmp_path / "run"
    command = ("train.py", *TINY, f"--out_dir={out_dir}", "--eval_interval=12")
    process = start(*command)
    while log_lines(out_dir) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    output, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, output + errors
    assert "--resume=True" in output and "Traceback" not in errors
    assert 2 <= load_checkpoint(out_dir / "last.pt")["step"] < 12
    succeed(*command, "--resume=True")
    ours, theirs = (load_checkpoint(d / "last.pt") for d in (out_dir, finished_run))
    assert same(ours["model"], theirs["model"]) and same(ours["optimizer"], theirs["optimizer"])


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAULTY_SAVE = """
import io, os, runpy, signal, sys, torch
torch_save, calls = torch.save, []
def save(state, file):
    calls.append(1)
    if len(calls) < 4:
        return torch_save(state, file)
    buffer = io.BytesIO()
    torch_save(state, buffer)
    file.write(buffer.getvalue()[:len(buffer.getvalue()) // 2])
    file.flush()
    FAULT
torch.save = save
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "fault, ends_with, message",
    [
        (KILL, -signal.SIGKILL, ""),
        ("raise OSError(28, 'No space left on device')", 2, "last.pt could not be written"),
    ],
    ids=("crash", "disk full"),
)
def test_a_checkpoint_cut_short_never_replaces_a_good_one(
    finished_run, tmp_path, fault, ends_with, message
):
    out_dir = tmp_path / "run"
    arguments = (*TINY, f"--out_dir={out_dir}")
    done = run("-c", FAULTY_SAVE.replace("FAULT", fault), "train.py", *arguments)
    assert done.returncode == ends_with
    assert message in done.stderr and done.stderr.count("\n") <= 1
    assert load_checkpoint(out_dir / "last.pt")["step"] == 4
    assert (out_dir / "last.pt.tmp").exists() == (fault == KILL)  # a full disk gets its room back
    succeed("train.py", *arguments, "--resume=True")
    assert_same_run(out_dir, finished_run)


def test_non_finite_gradients_are_skipped_counted_and_finally_stop_the_run(tmp_path):
    out_dir = tmp_path / "run"
    extra = ("--lr=1e30", "--max_skipped=5", "--max_steps=100")
    done = run("train.py", *TINY, *extra, f"--out_dir={out_dir}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: non-finite gradients in 5 steps")
    rows = log_rows(out_dir)
    assert rows[-1]["skipped"] >= 4 and "NaN" not in (out_dir / "log.jsonl").read_text()
    succeed("eval.py", out_dir, "--checkpoint=last")  # can be looked at


# several processes


@pytest.mark.parametrize(
    "choice",
    (
        "--eta_update=solve",
        "--eta_update=gradient",
        "--method=vqvae",
        "--method=rloo",
        "--method=gumbel",
    ),
)
def test_two_processes_train_the_same_parameters_as_one(tmp_path, choice):
    settings = (*TINY, "--max_steps=5", "--eval_interval=5", "--lr=1e-3", choice)
    succeed("train.py", *settings, f"--out_dir={tmp_path / 'one'}")
    output = succeed(*TORCHRUN, "train.py", *settings, f"--out_dir={tmp_path / 'two'}")
    assert "8 for each of 2 processes" in output
    one, two = (load_checkpoint(tmp_path / d / "last.pt") for d in ("one", "two"))
    for name, p in one["model"].items():
        torch.testing.assert_close(two["model"][name], p, atol=1e-5, rtol=0, msg=name)
    for a, b in zip(*(log_rows(tmp_path / d) for d in ("one", "two")), strict=True):
        a, b = ({k: v for k, v in row.items() if isinstance(v, float)} for row in (a, b))
        assert len(a) >= 4 and a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_a_run_can_be_resumed_with_another_number_of_processes(tmp_path):
    settings = (*TINY, "--max_steps=6", "--eval_interval=3", "--lr=1e-3")
    command = ("train.py", *settings, f"--out_dir={tmp_path / 'two'}")
    succeed("train.py", *settings, f"--out_dir={tmp_path / 'one'}")
    done = run("-c", FAULTY_SAVE.replace("FAULT", KILL), *command)  # dies in its fourth save
    assert done.returncode == -signal.SIGKILL
    assert "resumed at step 3" in succeed(*TORCHRUN, *command, "--resume=True")
    one, two = (load_checkpoint(tmp_path / d / "last.pt") for d in ("one", "two"))
    assert two["step"] == 6
    for name, p in one["model"].items():
        torch.testing.assert_close(two["model"][name], p, atol=1e-5, rtol=0, msg=name)


# other ways to compute


def test_bfloat16_on_the_cpu_starts_out_close_to_float32(finished_run, tmp_path):
    """The same noise decides the codes, so the first batch has nearly the same numbers."""
    settings = (*TINY, "--max_steps=2", "--eval_interval=2", "--dtype=bfloat16")
    succeed("train.py", *settings, f"--out_dir={tmp_path / 'run'}")
    for a, b in zip(*(log_rows(d)[:1] for d in (tmp_path / "run", finished_run)), strict=True):
        assert a["reward"] == pytest.approx(b["reward"], rel=0.01) and a["reward"] != b["reward"]
        assert a["log_q"] == pytest.approx(b["log_q"], rel=0.01)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)
        assert a["ess"] == pytest.approx(b["ess"], abs=1e-3)


def test_compiled_processes_train_as_one_eager_process_does(tmp_path):
    """On the CPU. Few tokens: the sampler's loop is unrolled, and compiling takes its time."""
    settings = (*TINY, "--n_tokens=2", "--max_steps=3", "--eval_interval=3")
    succeed("train.py", *settings, f"--out_dir={tmp_path / 'eager'}")
    compiled = ("train.py", *settings, "--use_compile=True", f"--out_dir={tmp_path / 'compiled'}")
    succeed(*TORCHRUN, *compiled)
    rows = zip(*(log_rows(tmp_path / d) for d in ("eager", "compiled")), strict=True)
    for i, (a, b) in enumerate(rows):
        assert a.pop("split") == b.pop("split")
        assert a == pytest.approx(b, rel=1e-4 if i == 0 else 1e-3)


# settings


def refuse(*arguments, match, **extra):
    """Run train.py with arguments that it must refuse: exit code 2, one line that matches."""
    done = run("train.py", *arguments, **extra)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    for word in match:
        assert word in done.stderr


BAD_SETTINGS = {
    "--datset=mnist": ("datset", "dataset"),
    "--dataset=minst": ("minst", "glyphs, mnist"),
    "--method=dabs": ("dabs", "daps, gumbel"),
    "--n_samples=1": ("n_samples", "at least 2"),
    "--tau_final=0.0": ("tau_final", "positive"),
    "--commitment=-1.0": ("commitment", "zero or more"),
    "--beta_final=-0.1": ("beta_final", "-0.1"),
    "--beta_init=0.0": ("beta_init", "positive"),
    "--ess_target=0.0": ("ess_target", "(0, 1]"),
    "--ess_target=1.5": ("ess_target", "(0, 1]"),
    "--max_steps=many": ("max_steps", "int", "many"),
    "--max_steps=2.5": ("max_steps", "int", "2.5"),
    "--resume=1": ("resume", "bool"),
    "--lr": ("--lr=value",),
    "--n_heads=3": ("width", "multiple"),
    "--device=cuba": ("device", "cuba"),
    "--eta_update=adam": ("eta_update", "solve or gradient"),
    "config/none.py": ("config/none.py", "No such file"),
    "stray": ("stray", "--key=value"),
}


@pytest.mark.parametrize("argument", BAD_SETTINGS)
def test_a_bad_setting_is_refused_in_one_line(argument, tmp_path):
    out_dir = tmp_path / "run"
    refuse(f"--out_dir={out_dir}", argument, match=BAD_SETTINGS[argument])
    assert not out_dir.exists() or not os.listdir(out_dir)


def test_an_autoregressive_option_is_refused_where_codes_are_written_in_one_pass(tmp_path):
    out_dir = f"--out_dir={tmp_path / 'run'}"
    for method in ("daps_na", "vqvae"):
        words = ("aligned is False", "must be True", method)
        refuse(out_dir, f"--method={method}", "--aligned=False", match=words)


@pytest.mark.parametrize(
    "text, match",
    [
        ("max_step = 5", ("line 1", "max_step", "did you mean max_steps")),
        ("lr = 'fast'", ("lr", "float", "'fast'")),
        ("import os", ("line 1", "only assignments")),
        ("lr = open('/etc/passwd').read()", ("line 1", "only assignments")),
        ("lr = = 1", ("bad.py", "invalid syntax")),
    ],
)
def test_a_bad_config_file_is_refused_by_name_and_line(text, match, tmp_path):
    (tmp_path / "bad.py").write_text(text + "\n")
    refuse(tmp_path / "bad.py", f"--out_dir={tmp_path / 'run'}", match=("bad.py", *match))


def test_an_out_dir_that_holds_a_run_is_refused_and_left_alone(finished_run):
    before = (finished_run / "last.pt").read_bytes()
    refuse(*TINY, f"--out_dir={finished_run}", match=("holds a run", "--resume", "--overwrite"))
    assert (finished_run / "last.pt").read_bytes() == before


def test_overwrite_replaces_a_run(tmp_path):
    out_dir = tmp_path / "run"
    succeed("train.py", *TINY, "--max_steps=4", f"--out_dir={out_dir}")
    succeed("train.py", *TINY, "--max_steps=2", f"--out_dir={out_dir}", "--overwrite=True")
    assert load_checkpoint(out_dir / "last.pt")["step"] == 2
    assert log_lines(out_dir) == 3


@pytest.mark.parametrize("change", ("--width=64", "--n_tokens=4", "--method=daps_na", "--lr=1e-4"))
def test_a_resume_with_other_settings_is_refused_and_loses_nothing(finished_run, change):
    before = (finished_run / "last.pt").read_bytes(), (finished_run / "log.jsonl").read_bytes()
    key, value = change.strip("-").split("=")
    refuse(*TINY, f"--out_dir={finished_run}", "--resume=True", change, match=("resume", key))
    after = (finished_run / "last.pt").read_bytes(), (finished_run / "log.jsonl").read_bytes()
    assert after == before


def test_a_resume_before_the_first_checkpoint_starts_over_but_not_as_another_run(tmp_path):
    command = ("train.py", *TINY, f"--out_dir={tmp_path / 'run'}")
    succeed(*command, "--max_steps=1")
    os.remove(tmp_path / "run" / "last.pt")
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    refuse(*command[1:], "--resume=True", "--method=daps_na", match=("method", "daps"))
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    assert "at the start" in succeed(*command, "--resume=True", "--max_steps=1")


def test_a_missing_wandb_is_refused_before_anything_is_overwritten(finished_run):
    without = "import runpy, sys; sys.modules['wandb'] = None; sys.argv = sys.argv[1:]; "
    without += "runpy.run_path('train.py', run_name='__main__')"
    arguments = ("train.py", *TINY, f"--out_dir={finished_run}", "--overwrite=True")
    done = run("-c", without, *arguments, "--wandb_log=True")
    assert done.returncode == 2 and "pip install wandb" in done.stderr
    assert (finished_run / "last.pt").exists() and log_lines(finished_run) == 15


@pytest.mark.parametrize("content", (b"", b"not a checkpoint", "cut"))
def test_a_resume_from_a_damaged_checkpoint_is_refused(finished_run, tmp_path, content):
    if content == "cut":
        content = (finished_run / "last.pt").read_bytes()[:5000]
    (tmp_path / "last.pt").write_bytes(content)
    refuse(*TINY, f"--out_dir={tmp_path}", "--resume=True", match=("last.pt", "not a readable"))
    assert (tmp_path / "last.pt").read_bytes() == content


def test_fsq_levels_that_do_not_make_the_vocabulary_are_refused(tmp_path):
    for levels in ("8 8", "8 4 x"):
        arguments = ("--method=fsq", f"--fsq_levels={levels}", f"--out_dir={tmp_path / 'run'}")
        refuse(*TINY, *arguments, match=("fsq_levels", "vocab_size"))
        assert not (tmp_path / "run").exists()


def test_an_out_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refuse(*TINY, f"--out_dir={tmp_path / 'file' / 'run'}", match=("out_dir", "cannot be written"))


def test_a_damaged_data_file_is_refused(tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "mnist" / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b cut")
    arguments = ("--dataset=mnist", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}")
    refuse(*TINY, *arguments, match=("train-images-idx3-ubyte.gz", "cannot be read"))


def test_a_download_without_network_is_refused_with_advice(tmp_path):
    arguments = ("--dataset=mnist", f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}")
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    nowhere |= {"NO_PROXY": "", "no_proxy": ""}
    refuse(*TINY, *arguments, match=("train-images", "--data_dir", "glyphs"), **nowhere)
    assert not os.listdir(tmp_path / "mnist")


@pytest.mark.parametrize("script, at_least", [("train.py", 30), ("eval.py", 5), ("bench.py", 9)])
def test_help_lists_every_setting_with_default_and_comment(script, at_least):
    output = succeed(script, "--help")
    assert "device = 'c" in output
    settings = output[output.index("Settings:") :].splitlines()[1:]
    assert len(settings) >= at_least
    assert all("  " in line.strip() for line in settings)  # each has its comment


CONFIGS = sorted(glob.glob(os.path.join(ROOT, "config", "*.py")))


@pytest.mark.parametrize("path", CONFIGS)
def test_every_config_file_loads_and_opens_with_its_command(path, finished_run):
    settings = json.loads((finished_run / "config.json").read_text())
    assert list(read_config(path))
    for key, value, place in read_config(path):
        assert checked(key, value, settings, place) == value
    with open(path) as file:
        command = r"(python|torchrun --nproc_per_node=2) train.py (config/\w+.py )?"
        assert re.search(command + os.path.relpath(path, ROOT), file.read())


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if p.endswith(("_daps.py", "_ppo.py", "_fsq.py"))]
)
def test_config_files_are_accepted_by_train_py(path, tmp_path):
    """A setting that is refused late shows that everything before it was accepted."""
    name = os.path.relpath(path, ROOT)
    refuse(name, f"--out_dir={tmp_path}", "--dtype=none", match=("dtype", "float32 or bfloat16"))


def test_config_files_and_arguments_compose_from_left_to_right(tmp_path):
    (tmp_path / "a.py").write_text('"""A docstring."""\n\nlr = 1e-4\nbatch_size = 8\n')
    (tmp_path / "b.py").write_text("batch_size = 4\nlr = 1  # whole numbers are fine\n")
    files = (tmp_path / "a.py", tmp_path / "b.py")
    arguments = ("--max_steps=1", "--vocab_size=32", f"--out_dir={tmp_path / 'run'}")
    succeed("train.py", "--batch_size=2", *files, "--n_samples=2", *arguments)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["lr"], config["batch_size"], config["n_samples"]) == (1.0, 4, 2)
