"""Settings: from files and arguments; each does what it says; what makes no sense is refused."""

import glob
import json
import os
import re
import sys
import types

import pytest
import torch
from conftest import DEFAULTS, ROOT, assert_one_line, motion_dataset, run, run_here, same
from PIL import Image

import data
import eval as evaluation
from configurator import UserError, checked, configure, read_config, settings_block
from run import load_checkpoint

# files and arguments


def settings(*argv):
    script = dict(lr=6e-3, max_steps=2000, method="daps", resume=False, _hidden=1, Upper=2, n=None)
    found, rest = configure(script, [*map(str, argv)])
    assert found.keys() == {"lr", "max_steps", "method", "resume"} and script["lr"] == found["lr"]
    return *found.values(), rest


def test_arguments_are_literals_of_the_settings_types(tmp_path):
    found = settings("--lr=1", "--max_steps=5_0", "--method=~/a=b 1", "--resume", "out/run")
    assert found == (1.0, 50, os.path.expanduser("~/a=b 1"), True, ["out/run"])
    assert type(found[0]) is float and not settings("--resume=true", "--resume=False")[3]


def test_files_and_arguments_apply_from_left_to_right_and_a_base_before_its_file(tmp_path):
    (tmp_path / "shared.py").write_text('"""Shared."""\nlr = 1\nmax_steps = 3\n')
    (tmp_path / "a.py").write_text('"""A run."""\nbase = "shared.py"\nmax_steps = 7\n')
    (tmp_path / "b.py").write_text("max_steps = 8  # steps\n")
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    assert settings(a)[:2] == (1.0, 7) and settings(b, a)[1] == 7 and settings(a, b)[1] == 8
    assert settings("--max_steps=2", "--method=vqvae", a, "--lr=3")[:3] == (3.0, 7, "vqvae")


BAD = {
    "--lrr=1": "--lrr=1: there is no setting lrr; did you mean lr?",
    "--lr": "--lr: write --lr=value",
    "--lr=nan": "lr must be of type float",
    "--lr=0": "lr is 0.0, must be positive",
    "--max_steps=2.5": "max_steps must be of type int, like 2000; found 2.5",
    "--resume=__import__('os')": "resume must be of type bool",
    "\nlr = 'fast'": "run.py, line 2: lr must be of type float, like 0.006; found 'fast'",
    "lr = open('/etc/passwd').read()": "line 1: a config file holds only assignments",
    "lr = = 1": "run.py: invalid syntax",
    "lr = {[]: 1}": "line 1: a config file holds only assignments",
    "--lr={[]: 1}": "lr must be of type float, like 0.006; found '{[]: 1}'",
    "base = 'none.py'": "none.py: No such file",
    "base = 3": "3: No such file",
    "base = 'run.py'": "run.py: it is its own base",
    "lr = 1\nbase = 'none.py'": "line 2: there is no setting base",
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_bad_argument_or_file_is_refused_by_name_and_line(wrong, tmp_path):
    (tmp_path / "run.py").write_text(wrong)
    with pytest.raises(UserError, match=f"^[^\n]*{re.escape(BAD[wrong])}[^\n]*$"):
        settings(wrong if wrong.startswith("--") else tmp_path / "run.py")


@pytest.mark.parametrize("script", ("train.py", "eval.py"))
def test_help_lists_every_setting_with_default_and_comment(script):
    done = run_here(script, "--help")
    rows = done.output[done.output.index("Settings:") :].splitlines()[1:]
    rows = [re.fullmatch(r"  (\w+) = (.*?)  +(\S.*)", row) for row in rows]
    assert done.code == 0 and len(rows) >= 9 and all(rows)
    if script == "train.py":
        shown = {row[1]: row[2] for row in rows}
        assert {key: repr(value) for key, value in DEFAULTS.items()}.items() <= shown.items()
        assert shown.keys() - DEFAULTS.keys() == {"data_dir", "device"}
        _, may_differ = settings_block(os.path.join(ROOT, script))
        assert {"out_dir", "max_steps", "device", "n_workers"} < may_differ < shown.keys()


CONFIGS = {os.path.basename(p): p for p in sorted(glob.glob(os.path.join(ROOT, "config", "*.py")))}
SHARED = ("mnist.py", "cifar10.py", "imagenet.py", "lafan.py")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_sets_what_train_py_has_and_opens_with_its_command(name):
    with open(CONFIGS[name]) as file:
        text = file.read()
    found = {k: checked(k, v, DEFAULTS, where) for k, v, where in read_config(CONFIGS[name])}
    first = text.removeprefix('"""').split("\n")[0]
    if name in SHARED:
        assert first == f"Shared by all runs config/{name[:-3]}_*.py, which name it as their base."
    else:
        files = [word for word in first.split() if word.startswith("config/")]
        assert first.startswith(("python train.py", "torchrun --nproc_per_node=2 train.py"))
        assert f"config/{name}" in files or name == "glyphs.py"
        assert all(os.path.exists(os.path.join(ROOT, word)) for word in files)
    if f"{name.split('_')[0]}.py" in SHARED:  # a run of the paper is without our changes
        ours = {key: DEFAULTS[key] for key, *_ in read_config(CONFIGS["ours_64.py"])}
        assert ours.items() <= (DEFAULTS | found).items()


# every setting of train.py, in runs in this process


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small data sets, no report at the end; the folder with images."""
    folder = tmp_path_factory.mktemp("small")
    os.makedirs(folder / "pictures")
    for i in range(40):
        Image.effect_noise((40, 32), 50).convert("RGB").save(folder / "pictures" / f"{i:02}.png")
    os.symlink("pictures", folder / "linked")
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (40, 3, 32, 32), generator=g).byte(), torch.zeros(40).byte()
    sets = {
        "glyphs": data.glyphs(n_train=40, n_val=16),
        "mnist": data.glyphs(n_train=40, n_val=16, seed=1),
        "cifar10": data.ArrayDataset("cifar10", x[:30], y[:30], x[30:], y[30:]),
        "lafan": motion_dataset(),
    }
    loaders = {name: lambda _, found=found: found for name, found in sets.items()}
    wandb = types.SimpleNamespace(init=lambda **_: None, log=lambda values, step: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "DATASETS", loaders | {"imagenet": data.imagenet})
        patch.setattr(data, "CACHE_DIR", str(folder / "cache"))
        patch.setattr(evaluation, "evaluate_runs", lambda *_, **__: None)
        patch.setitem(sys.modules, "wandb", wandb)
        data.load_dataset.cache_clear()
        yield folder
    data.load_dataset.cache_clear()


BASE = (
    "batch_size=4 n_samples=3 vocab_size=16 width=16 mlp_ratio=2 n_tokens=4 max_steps=3 lr=6e-3 "
    "eval_interval=3 log_interval=1 mc_samples=2 eval_examples=8 n_workers=0 split_interval=0"
)
COLOUR = "dataset=cifar10 n_tokens=16"
IMAGES = "dataset=imagenet n_tokens=16 image_size=16 method=daps_na data_dir={folder}/pictures"

# For each setting: the other settings, and a change that must show in the log or in the model.
CHANGES = {
    "method": ("", "daps_na"), "dataset": ("", "mnist"), "image_size": (IMAGES, "32"),
    "n_tokens": ("", "6"), "vocab_size": ("", "8"), "width": ("", "32"), "n_layers": ("", "2"),
    "mlp_ratio": ("", "3"), "aligned": ("", "False"), "centred": ("", "False"),
    "credit_window": (f"{COLOUR} method=daps_na", "0"), "kmeans_start": ("", "True"),
    "split_interval": ("split_interval=1 max_steps=4 vocab_size=64", "0"), "n_samples": ("", "2"),
    "ess_target": ("", "0.9"), "eta_update": ("", "gradient"), "beta_init": ("", "0.1"),
    "beta_final": ("", "0.1"), "tau_final": ("method=gumbel", "0.5"),
    "mc_samples": ("method=grmck", "3"), "ppo_epochs": ("method=ppo", "2"),
    "commitment": ("method=vqvae", "1.0"), "vq_ema": ("method=vqvae", "False"),
    "fsq_levels": ("method=fsq fsq_levels=4,4", "2,8"), "max_steps": ("", "4"),
    "batch_size": ("", "8"), "encoder_lr": ("", "0.5"), "scale_lr": ("", "0.5"),
    "lr": ("", "1e-3"), "lr_final": ("", "0.5"), "weight_decay": ("", "0.5"),
    "accumulate": ("", "2"), "eval_examples": ("", "4"), "seed": ("", "1"),
    "dtype": ("", "bfloat16"), "log_interval": ("", "2"), "eval_interval": ("", "1"),
}  # fmt: skip
# Settings that must change neither the model nor, except for intervals, the log.
NO_CHANGE = {
    "out_dir": ("", "{folder}/elsewhere"), "data_dir": (IMAGES, "{folder}/linked"),
    "log_interval": ("", "2"), "eval_interval": (f"{COLOUR} split_interval=1", "1"),
    "eval_examples": ("", "4"),
    "wandb_log": ("", "True"), "n_workers": (IMAGES, "2"), "aligned": ("method=daps_na", "False"),
    "use_compile": ("", "False"), "cuda_graphs": ("", "True"),  # both are for GPUs
}  # fmt: skip
ELSEWHERE = {"resume", "device"}  # test_train.py, test_run.py


def words(options, folder=""):
    """Arguments from "key=value key=value", in which a comma stands for a space within a value."""
    return [f"--{w.replace(',', ' ')}" for w in f"{BASE} {options}".format(folder=folder).split()]


@pytest.fixture(scope="module")
def result(small, tmp_path_factory):
    """The log of a run with these options, and the parameters that it ends with."""
    known = {}

    def get(options):
        if options not in known:
            out_dir = tmp_path_factory.mktemp("settings") / "run"
            done = run_here("train.py", f"--out_dir={out_dir}", *words(options, small))
            assert done.code == 0, done.errors
            out_dir = re.search("into (.*)", done.output)[1]
            with open(os.path.join(out_dir, "log.jsonl")) as file:
                known[options] = file.read(), load_checkpoint(f"{out_dir}/last.pt")["model"]
        return known[options]

    return get


def test_every_setting_is_changed_by_a_test():
    computed = {"data_dir", "device"}
    assert CHANGES.keys() | NO_CHANGE.keys() | ELSEWHERE == DEFAULTS.keys() | computed


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_changes_the_run(key, result):
    options, value = CHANGES[key]
    assert not same(result(f"{options} {key}={value}"), result(options))


@pytest.mark.parametrize("key", NO_CHANGE)
def test_a_setting_leaves_the_model_as_it_is(key, result):
    options, value = NO_CHANGE[key]
    (log, model), (changed_log, changed) = result(options), result(f"{options} {key}={value}")
    assert same(changed, model) and (changed_log == log or key.startswith(("log_", "eval_")))


@pytest.mark.parametrize("dataset, n_tokens", [("cifar10", 16), ("imagenet", 16), ("lafan", 64)])
@pytest.mark.parametrize("method", ("daps", "daps_na", "gumbel", "vqvae", "gaussian"))
def test_methods_of_every_kind_take_a_step_on_every_data_set(method, dataset, n_tokens, result):
    options = f"dataset={dataset} method={method} n_tokens={n_tokens} max_steps=1 image_size=16 "
    log, _ = result(f"{options} data_dir={{folder}}/pictures")
    train, val = map(json.loads, log.splitlines())
    assert train["split"] == "train" and val["split"] == "val"
    assert all(train[key] is not None for key in ("loss", "grad_norm", "reward"))


def test_batches_noise_and_parameters_follow_the_seed_and_the_step(small, tmp_path, monkeypatch):
    calls = []

    def record(owner, name):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **o: calls.append((name, *a)) or whole(*a, **o))

    for owner, name in ((data, "train_indices"), (data, "uniform_noise"), (torch, "manual_seed")):
        record(owner, name)
    record(data.ArrayDataset, "read")
    out_dir = f"--out_dir={tmp_path / 'run'}"
    assert run_here("train.py", *words("seed=5 max_steps=3"), out_dir).code == 0
    assert ("manual_seed", 5) in calls
    noise = [call[1:4] for call in calls if call[:2] == ("uniform_noise", data.TRAIN_NOISE)]
    assert noise == [(data.TRAIN_NOISE, 5, step) for step in range(3)]
    batches = [call[2:4] for call in calls if call[0] == "train_indices"]
    assert batches == [(5, step) for step in range(3)]
    assert [call[2] for call in calls if call[0] == "read"] == 3 * ["train"] + ["val"]


def test_the_temperature_falls_from_one_and_later_epochs_of_ppo_are_told(result):
    log, _ = result("method=gumbel tau_final=0.5")
    rows = [json.loads(line) for line in log.splitlines()]
    assert [row["tau"] for row in rows if "tau" in row] == pytest.approx([1, 0.5**0.5, 0.5])
    log, _ = result("method=ppo ppo_epochs=4 lr=1.0")
    assert any(json.loads(line).get("clipped", 0) > 0 for line in log.splitlines())


# what is refused, before anything is written

NONSENSE = {
    "dataset=minst": ("minst", "glyphs, mnist"), "method=dabs": ("dabs", "daps, daps_na"),
    "dataset=lafan": ("n_tokens is 4", "64"), "dataset=cifar10 n_tokens=12": ("n_tokens is 12",),
    "credit_window=2": ("credit_window", "odd"), "image_size=4": ("image_size", "at least 8"),
    "method=fsq fsq_levels=4,5": ("fsq_levels", "vocab_size"), "device=cuba": ("device", "cuba"),
    "method=fsq fsq_levels=4,4,x": ("fsq_levels is [4, 4, 0]", "from 2"),
    "image_size=33": ("image_size is 33", "even"),
    "device=mps": ("device is 'mps', which cannot be used here", "only cpu and cuda"),
    "seed=-1": ("seed is -1", "zero or more"), "vocab_size=1": ("vocab_size", "at least 2"),
    "width=15": ("width", "multiple"), "n_samples=1": ("n_samples", "at least 2"),
    "ess_target=1.5": ("ess_target", "(0, 1]"), "eta_update=adam": ("eta_update", "solve"),
    "beta_final=0.0": ("beta_init", "zero"), "lr=0.0": ("lr", "positive"),
    "batch_size=5 accumulate=2": ("batch_size", "processes * accumulate = 2"),
    "method=ppo batch_size=1 n_samples=1": ("batch_size", "at least 2"),
}  # fmt: skip


@pytest.mark.parametrize("options", NONSENSE)
def test_settings_that_make_no_sense_are_refused_in_one_line(options, small, tmp_path):
    done = run_here("train.py", *words(options), f"--out_dir={tmp_path / 'run'}")
    assert_one_line(done, *NONSENSE[options])
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named_in_one_line(small, tmp_path, monkeypatch):
    out_dir = f"--out_dir={tmp_path / 'run'}"
    assert_one_line(run_here("train.py", "config/none.py", out_dir), "none.py: No such file")
    assert_one_line(run_here("train.py", "stray", out_dir), "stray: neither a config file")
    options = [word for word in words(IMAGES, small) if "data_dir" not in word]
    done = run_here("train.py", *options, f"--data_dir={small / 'nowhere'}", out_dir)
    assert_one_line(done, "nowhere; set --data_dir to a folder with")
    monkeypatch.delitem(sys.modules, "wandb")
    done = run_here("train.py", *words("wandb_log=True"), out_dir)
    assert_one_line(done, "wandb is missing: pip install wandb")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_one_line(run_here("train.py", "--device=cuda:1", out_dir), "device is 'cuda:1', must be")
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_was_given_and_counts_own_images(small, tmp_path):
    words_given = (*words(IMAGES, small), f"--out_dir={tmp_path / 'run'}", "--max_steps=1")
    output = run_here("train.py", "config/cifar10.py", *words_given).output
    assert output.startswith("settings: config/cifar10.py --") and "--max_steps=1\n" in output
    assert "38 examples for training, 2 for validation\n" in output
    assert "\n1 step of " in output


# errors


@pytest.mark.parametrize(
    "code, status, text",
    [
        ("raise configurator.UserError('mend this')", 2, "error (rank 3): mend this\n"),
        ("open('/gloo')", 2, "error (rank 3): /gloo: No such file or directory\n"),
        ("import torch; torch.empty(2**60)", 2, "error (rank 3): out of memory; try"),
        ("raise KeyboardInterrupt", 130, "error (rank 3): stopped\n"),
        ("raise RuntimeError('[gloo/pair.cc] closed')", 2, "another process of this run died"),
        ("raise RuntimeError('DataLoader worker (pid 7) is killed')", 2, "another process"),
        ("raise ValueError('a bug')", 1, "Traceback"),
    ],
)  # fmt: skip
def test_an_error_that_is_no_bug_ends_a_program_with_one_line(code, status, text):
    done = run("-c", f"import configurator\n{code}", RANK="3")
    assert done.returncode == status and text in done.stderr
    assert (done.stderr.count("\n") == 1) == (text != "Traceback")
