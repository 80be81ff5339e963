"""Every setting of train.py does what it says; invalid settings are refused before any work.

All runs are in this process, since settings can be changed within it.
"""

import glob
import json
import os
import pathlib
import shutil
import sys
import types

import pytest
import torch
from conftest import ROOT, assert_one_line, motion_dataset, photograph, run_here, same

import data
import eval as evaluation
import models
from checkpoint import load_checkpoint
from configurator import UserError
from models import METHODS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small data sets, no report at the end; the folder with images."""
    folder = tmp_path_factory.mktemp("small")
    os.makedirs(folder / "pictures")
    for i in range(24):
        photograph(40, 32, seed=i).save(folder / "pictures" / f"{i:02}.png")
    os.symlink("pictures", folder / "linked")
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (40, 3, 32, 32), generator=g).byte(), torch.zeros(40).byte()
    scale = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.3)
    sets = {
        "glyphs": data.glyphs(n_train=40, n_val=16),
        "mnist": data.glyphs(n_train=40, n_val=16, seed=1),
        "cifar10": data.ArrayDataset("cifar10", x[:30], y[:30], x[30:], y[30:], 255, *scale),
        "lafan": motion_dataset(),
    }
    loaders = {name: lambda _, found=found: found for name, found in sets.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "DATASETS", loaders | {"imagenet": data.imagenet})
        patch.setattr(data, "CACHE_DIR", str(folder / "cache"))
        patch.setattr(evaluation, "report", lambda *_, **__: None)
        wandb = types.SimpleNamespace(init=lambda **_: None, logged=[])
        wandb.log = lambda values, step: wandb.logged.append(values)
        patch.setitem(sys.modules, "wandb", wandb)
        data.load_dataset.cache_clear()
        yield folder
        data.load_dataset.cache_clear()


BASE = (
    "batch_size=4 n_samples=3 vocab_size=16 width=16 n_heads=2 mlp_ratio=2 n_tokens=4 max_steps=3 "
    "eval_interval=3 log_interval=1 warmup_steps=2 mc_samples=2 eval_examples=8 n_workers=0"
)
COLOUR = "dataset=cifar10 n_tokens=16"
IMAGES = "dataset=imagenet n_tokens=16 image_size=16 method=daps_na data_dir={folder}/pictures"

# For each setting: the other settings, and a change that must show in the log or in the model.
CHANGES = {
    "method": ("", "daps_na"),
    "dataset": ("", "mnist"),
    "image_size": (IMAGES, "32"),
    "n_tokens": ("", "6"),
    "vocab_size": ("", "8"),
    "width": ("", "32"),
    "n_heads": ("", "4"),
    "n_layers": ("", "2"),
    "mlp_ratio": ("", "3"),
    "decoder_layers": ("dataset=lafan n_tokens=64 method=daps_na", "1"),
    "resnet_encoder": (f"{COLOUR} method=vqvae", "True"),
    "aligned": ("", "False"),
    "centred": ("", "False"),
    "tied": ("", "False"),
    "credit_window": (f"{COLOUR} method=daps_na", "0"),
    "kmeans_start": ("", "True"),
    "split_interval": ("split_interval=1 max_steps=4", "0"),
    "n_samples": ("", "2"),
    "ess_target": ("", "0.9"),
    "eta_update": ("", "gradient"),
    "beta_init": ("", "0.1"),
    "beta_final": ("", "0.1"),
    "tau_init": ("method=gumbel", "0.5"),
    "tau_final": ("method=gumbel", "0.5"),
    "mc_samples": ("method=grmck", "3"),
    "ppo_epochs": ("method=ppo", "2"),
    "ppo_clip": ("method=ppo lr=0.1 ppo_epochs=4", "0.01"),
    "commitment": ("method=vqvae", "1.0"),
    "vq_ema": ("method=vqvae", "False"),
    "fsq_levels": ("method=fsq fsq_levels=4,4", "2 8"),
    "max_steps": ("", "4"),
    "batch_size": ("", "8"),
    "encoder_lr": ("", "0.5"),
    "scale_lr": ("", "0.5"),
    "lr": ("", "1e-3"),
    "lr_schedule": ("", "constant"),
    "lr_final": ("", "1e-3"),
    "warmup_steps": ("", "0"),
    "weight_decay": ("", "0.5"),
    "grad_clip": ("", "0.001"),
    "max_skipped": ("lr=1e30 max_steps=30", "2"),
    "accumulate": ("", "2"),  # eta is that of a part
    "eval_examples": ("", "4"),
    "log_interval": ("", "2"),
    "eval_interval": ("", "1"),
    "seed": ("", "1"),
    "dtype": ("", "bfloat16"),
}
# Settings that must not change the model; recompute may change rounding.
NO_CHANGE = {
    "out_dir": ("", "{folder}/elsewhere"),
    "data_dir": (IMAGES, "{folder}/linked"),
    "log_interval": ("", "2"),
    "eval_interval": ("", "1"),
    "eval_examples": ("", "4"),
    "wandb_log": ("", "True"),
    "n_workers": (IMAGES, "2"),
    "recompute": ("", "2"),
    "overwrite": ("", "True"),
    "aligned": ("method=daps_na", "False"),  # in one pass, token t always sees patch t
}
ELSEWHERE = {
    "resume": "test_every_method_trains_resumes_exactly_and_is_evaluated",
    "cuda_graphs": "test_a_run_on_a_gpu_starts_out_as_on_the_cpu",
    "device": "test_a_device_that_cannot_be_used_is_refused_in_one_line",
    "use_compile": "test_compiled_processes_train_as_one_eager_process_does",
}


def words(options, folder=""):
    """Arguments from "key=value key=value", in which a comma stands for a space within a value."""
    options = f"{BASE} {options}".format(folder=folder).split()
    return [f"--{word.replace(',', ' ')}" for word in options]


def result(small, options, out_dir):
    """The rows of the log and the parameters that a run ends with."""
    arguments = [f"--out_dir={out_dir}", *words(options, small)]
    done = run_here("train.py", *arguments)
    assert done.code == (2 if "lr=1e30" in options else 0), done.errors
    *_, used = (word for word in arguments if word.startswith("--out_dir="))
    out_dir = pathlib.Path(used.removeprefix("--out_dir="))
    rows = (out_dir / "log.jsonl").read_text()
    return rows, load_checkpoint(out_dir / "last.pt")["model"] if done.code == 0 else None


@pytest.fixture(scope="module")
def base(small, tmp_path_factory):
    """Results by their options, and where they are."""
    known = {}

    def get(options):
        if options not in known:
            out_dir = tmp_path_factory.mktemp("base") / "run"
            known[options] = *result(small, options, out_dir), out_dir
        return known[options]

    return get


def test_every_setting_is_changed_by_a_test(base):
    tried = CHANGES.keys() | NO_CHANGE.keys() | ELSEWHERE.keys()
    *_, out_dir = base("")
    assert tried == json.loads((out_dir / "config.json").read_text()).keys()
    tests = [path.read_text() for path in pathlib.Path(ROOT, "tests").glob("*.py")]
    assert all(f"def {name}(" in "".join(tests) for name in ELSEWHERE.values())


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_changes_the_run(key, small, base, tmp_path):
    options, value = CHANGES[key]
    rows, model, _ = base(options)
    changed = result(small, f"{options} {key}={value.replace(' ', ',')}", tmp_path / "run")
    assert changed[0] != rows or not same(changed[1], model)


@pytest.mark.parametrize("scale_lr", (0, 1))
def test_the_rates_of_the_encoder_and_of_the_scale_of_its_logits_are_their_own(
    scale_lr, small, tmp_path
):
    """With a rate of almost nothing for the encoder, only the decoder and, if it has a rate, the
    scale learn between step 1 and step 3."""
    options = f"encoder_lr=1e-12 scale_lr={scale_lr} split_interval=0 max_steps="
    (_, one), (_, three) = (result(small, f"{options}{n}", tmp_path / n) for n in "13")
    learn = ("decoder.", "encoder.head.log_scale")[: 1 + scale_lr]
    for name, p in one.items():
        moved = (three[name] - p).abs().max() > 1e-5
        assert moved == name.startswith(learn) or name == "log_eta", name
    assert (three["encoder.head.log_scale"] == 0) == (scale_lr == 0)


@pytest.mark.parametrize("key", NO_CHANGE)
def test_a_setting_leaves_the_model_as_it_is(key, small, base, tmp_path):
    options, value = NO_CHANGE[key]
    rows, model, base_dir = base(options)
    out_dir = tmp_path / "run"
    if key == "overwrite":
        shutil.copytree(base_dir, out_dir)
    changed = result(small, f"{options} {key}={value}", out_dir)
    if key == "recompute":
        # Codes are scored in parts of another size, which sums in another order. Rewards of 543
        # nats are rounded by 6e-5, which moves the gradient by some 1e-4 of itself and, in three
        # steps of Adam, a parameter by some 1e-4 * 3 * lr = 2e-6; where terms cancel, by more.
        for name, p in model.items():
            torch.testing.assert_close(changed[1][name], p, atol=5e-5, rtol=1e-3, msg=name)
    else:
        assert same(changed[1], model)
    if "interval" not in key and key not in ("recompute", "eval_examples"):
        assert changed[0] == rows
    if key == "wandb_log":
        assert len(sys.modules["wandb"].logged) == len(rows.splitlines())


def test_values_are_split_on_schedule_and_once_where_a_run_is_resumed(small, tmp_path, monkeypatch):
    calls = []

    def split(*_):
        calls.append(1)
        if len(calls) == 3:  # at step 6; last.pt is of step 4, where a split is due
            raise UserError("stopped")
        return 1

    monkeypatch.setattr(models, "split_values", split)
    run = (*words("split_interval=2 max_steps=12 eval_interval=4"), f"--out_dir={tmp_path / 'run'}")
    assert_one_line(run_here("train.py", *run), "stopped")
    assert run_here("train.py", *run, "--resume=True").code == 0
    rows = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    found = [row["n_split"] for row in rows if row["split"] == "train"]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]  # none after 80 % of 12 steps


def test_a_batch_in_parts_has_the_gradient_of_the_whole(small, base, tmp_path):
    whole, *_ = base("method=gumbel")
    parts, _ = result(small, "method=gumbel accumulate=2", tmp_path / "run")
    a, b = (json.loads(text.splitlines()[0]) for text in (whole, parts))
    for key in ("loss", "reward", "grad_norm"):
        assert b[key] == pytest.approx(a[key], rel=1e-4), key


def test_a_resume_on_other_data_is_refused(small, base, tmp_path, monkeypatch):
    *_, done = base(COLOUR)
    shutil.copytree(done, tmp_path / "run")
    other = data.DATASETS["cifar10"]("").to("cpu")  # a copy
    other.mean = other.mean + 0.1
    monkeypatch.setitem(data.DATASETS, "cifar10", lambda _: other)
    data.load_dataset.cache_clear()
    options = (*words(COLOUR), "--resume=True", f"--out_dir={tmp_path / 'run'}")
    assert_one_line(run_here("train.py", *options), "are not those the run began with")
    data.load_dataset.cache_clear()


def test_a_run_without_out_dir_goes_to_a_folder_of_its_data_set_and_method(
    small, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = run_here("train.py", *words("dataset=mnist method=fsq fsq_levels=4,4 max_steps=1"))
    assert done.code == 0, done.errors
    assert (tmp_path / "out" / "mnist_fsq" / "last.pt").exists()


# refused settings

NONSENSE = {
    "datset=mnist": ("datset", "did you mean dataset"),
    "credit_window=2": ("credit_window", "odd"),
    "dataset=minst": ("minst", "glyphs, mnist"),
    "method=dabs": ("dabs", "daps, gumbel"),
    "dataset=lafan": ("n_tokens is 4", "64"),
    "dataset=lafan n_tokens=64 method=vqvae resnet_encoder=True": ("resnet_encoder", "lafan"),
    "resnet_encoder=True": ("resnet_encoder", "False for daps"),
    "dataset=cifar10 n_tokens=12": ("n_tokens is 12", "square"),
    "dataset=imagenet n_tokens=64 image_size=24": ("n_tokens is 64", "24 x 24"),
    "dataset=imagenet image_size=4": ("image_size", "at least 8"),
    "method=vqvae resnet_encoder=True": ("n_tokens is 4", "28 x 28"),
    "method=fsq fsq_levels=": ("fsq_levels", "vocab_size"),
    "method=fsq fsq_levels=4,x": ("fsq_levels", "vocab_size"),
    "method=fsq fsq_levels=4,5": ("fsq_levels", "vocab_size"),
    "device=cuba": ("device", "cuba"),
    "seed=-1": ("seed", "zero or more"),
    "seed=4294967296": ("seed", "below 2**32"),
    "method=ppo n_samples=0": ("n_samples", "at least 1"),
    "lr=1e999": ("lr", "finite"),
    "lr=fast": ("lr", "float", "fast"),
    "max_steps=2.5": ("max_steps", "int", "2.5"),
    "n_tokens=0": ("n_tokens", "at least 1"),
    "vocab_size=1": ("vocab_size", "at least 2"),
    "width=0": ("width", "positive"),
    "width=15": ("width", "multiple"),
    "n_heads=3": ("width", "multiple"),
    "n_heads=0": ("n_heads", "at least 1"),
    "n_layers=0": ("n_layers", "at least 1"),
    "mlp_ratio=0": ("mlp_ratio", "at least 1"),
    "decoder_layers=0": ("decoder_layers", "at least 1"),
    "n_samples=1": ("n_samples", "at least 2"),
    "method=rloo n_samples=1": ("n_samples", "at least 2"),
    "ess_target=0.0": ("ess_target", "(0, 1]"),
    "ess_target=1.5": ("ess_target", "(0, 1]"),
    "eta_update=adam": ("eta_update", "'solve' or 'gradient'"),
    "beta_init=0.0": ("beta_init", "positive"),
    "beta_final=0.0": ("beta_init", "zero"),
    "beta_final=-0.1": ("beta_final", "-0.1"),
    "commitment=-1.0": ("commitment", "zero or more"),
    "tau_init=0.0": ("tau_init", "positive"),
    "tau_final=0.0": ("tau_final", "positive"),
    "mc_samples=0": ("mc_samples", "at least 1"),
    "ppo_epochs=0": ("ppo_epochs", "at least 1"),
    "ppo_clip=0.0": ("ppo_clip", "positive"),
    "max_steps=0": ("max_steps", "at least 1"),
    "batch_size=0": ("batch_size", "at least 1"),
    "batch_size=5 accumulate=2": ("batch_size", "processes * accumulate = 2"),
    "accumulate=0": ("accumulate", "at least 1"),
    "method=ppo accumulate=2": ("accumulate", "1 for ppo"),
    "recompute=-1": ("recompute", "zero or more"),
    "method=vqvae recompute=2": ("recompute", "0 for vqvae"),
    "n_workers=-1": ("n_workers", "zero or more"),
    "lr=0.0": ("lr", "positive"),
    "lr_final=1.0": ("lr_final", "at most lr"),
    "lr_schedule=linear": ("lr_schedule", "cosine or constant"),
    "lr_schedule=constant lr_final=1e-3": ("lr_final", "constant"),
    "warmup_steps=-1": ("warmup_steps", "zero or more"),
    "weight_decay=-1.0": ("weight_decay", "zero or more"),
    "grad_clip=-1.0": ("grad_clip", "zero or more"),
    "max_skipped=0": ("max_skipped", "at least 1"),
    "eval_interval=0": ("eval_interval", "at least 1"),
    "log_interval=0": ("log_interval", "at least 1"),
    "dtype=float16": ("dtype", "float32 or bfloat16"),
}


@pytest.fixture
def nothing_done(tmp_path, monkeypatch):
    """Data must not be loaded; and there must be no out_dir, which this is, in the end."""
    monkeypatch.setattr(data, "load_dataset", lambda *_: pytest.fail("data were loaded"))
    yield tmp_path / "run"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", NONSENSE)
def test_settings_that_make_no_sense_are_refused_before_any_work(options, nothing_done):
    done = run_here("train.py", *words(options), f"--out_dir={nothing_done}")
    assert_one_line(done, *NONSENSE[options])
    assert "wandb" not in done.errors


@pytest.mark.parametrize(
    "argument, word",
    [("config/none.py", "config/none.py: No such file"), ("stray", "neither a config file")],
)
def test_what_is_no_setting_is_refused_before_any_work(argument, word, nothing_done):
    done = run_here("train.py", *words(""), argument, f"--out_dir={nothing_done}")
    assert_one_line(done, word)


def test_one_gpu_for_several_processes_is_refused(nothing_done, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run_here("train.py", "--device=cuda:1", f"--out_dir={nothing_done}")
    assert_one_line(done, "device is 'cuda:1', must be")


def test_restarts_without_resume_are_refused(nothing_done, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    done = run_here("train.py", *words(""), f"--out_dir={nothing_done}")
    assert_one_line(done, "add --resume=True")


@pytest.mark.parametrize("options", ("", "width=15"))
def test_wandb_is_named_where_it_is_missing_and_only_there(options, nothing_done, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = (*words(options), "--wandb_log=True", "--overwrite=True")
    done = run_here("train.py", *arguments, f"--out_dir={nothing_done}")
    assert_one_line(done, "width is 15" if options else "pip install wandb")
    assert ("wandb" in done.errors) == (options == "")


def test_data_that_are_not_there_are_refused(small, tmp_path):
    options = [word for word in words(IMAGES, small) if "data_dir" not in word]
    folders = f"--data_dir={small / 'nowhere'}", f"--out_dir={tmp_path / 'run'}"
    assert_one_line(run_here("train.py", *options, *folders), "nowhere: no such folder")


CONFIGS = sorted(glob.glob(os.path.join(ROOT, "config", "*_*.py")))
CONFIGS = [path for path in CONFIGS if not path.endswith("_beta1.py")]


@pytest.mark.parametrize("path", CONFIGS, ids=map(os.path.basename, CONFIGS))
def test_the_settings_of_a_config_file_make_sense(path, nothing_done):
    """A missing device is refused last."""
    done = run_here("train.py", path, "--device=cuba", f"--out_dir={nothing_done}")
    assert_one_line(done, "device is 'cuba', which cannot be used here")


SHAPES = {"glyphs": 4, "cifar10": 16, "imagenet": 16, "lafan": 64}  # tokens


@pytest.mark.parametrize("dataset", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_step_on_every_data_set(method, dataset, small, tmp_path):
    options = f"dataset={dataset} method={method} n_tokens={SHAPES[dataset]} fsq_levels=4,4 "
    options += "max_steps=1 image_size=16 decoder_layers=1 data_dir={folder}/pictures"
    rows, _ = result(small, options, tmp_path / "run")
    rows = [json.loads(row) for row in rows.splitlines()]
    assert [row["split"] for row in rows] == ["train", "val"]
    assert all(rows[0][key] is not None for key in ("loss", "grad_norm", "reward"))
