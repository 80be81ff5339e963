"""Every setting of train.py does what it says; what makes no sense is refused before any work."""

import contextlib
import io
import json
import os
import pathlib
import runpy
import shutil
import signal
import sys
import types

import pytest
import torch
from conftest import ROOT
from test_images import photograph
from test_motion import motion
from test_train import same

import data
import eval as evaluation
from configurator import TYPES
from eval import METHODS, load_checkpoint


def settings_block():
    """The settings of train.py with their defaults."""
    with open(os.path.join(ROOT, "train.py")) as file:
        block = file.read().split("# what\n")[1].split("# -----")[0]
    names = {}
    exec("import os\nimport torch\nfrom data import DATA_DIR\n" + block, names)
    return {k: v for k, v in names.items() if k[0].islower() and type(v) in TYPES}


def train(*arguments):
    """train.py in this process: its exit code and what it says on stderr."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before, argv = [signal.getsignal(number) for number in signals], sys.argv
    hook = sys.excepthook
    sys.argv = ["train.py", *map(str, arguments)]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(os.path.join(ROOT, "train.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        finally:
            sys.argv, sys.excepthook = argv, hook
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small data sets, no report at the end; the folder with images."""
    folder = tmp_path_factory.mktemp("small")
    os.makedirs(folder / "pictures")
    for i in range(24):
        photograph(40, 32, seed=i).save(folder / "pictures" / f"{i:02}.png")
    letters = data.glyphs(n_train=40, n_val=16)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (40, 3, 32, 32), generator=g).byte(), torch.zeros(40).byte()
    scale = torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.3)
    colours = data.Dataset("cifar10", x[:30], y[:30], x[30:], y[30:], 255, *scale)
    sets = {"glyphs": letters, "mnist": data.glyphs(n_train=40, n_val=16, seed=1)}
    sets |= {"cifar10": colours, "lafan": motion()}
    loaders = {name: lambda _, found=found: found for name, found in sets.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "DATASETS", loaders | {"imagenet": data.imagenet})
        patch.setattr(data, "CACHE_DIR", str(folder / "cache"))
        patch.setattr(evaluation, "report", lambda *_, **__: None)
        patch.setattr(evaluation, "keep_memory", lambda: None)
        wandb = types.SimpleNamespace(init=lambda **_: None, logged=[])
        wandb.log = lambda values, step: wandb.logged.append(values)
        patch.setitem(sys.modules, "wandb", wandb)
        data.load_dataset.cache_clear()
        yield folder
        data.load_dataset.cache_clear()


BASE = (
    "batch_size=4 n_samples=3 vocab_size=16 width=16 n_heads=2 mlp_ratio=2 n_tokens=4 max_steps=3 "
)
BASE += "eval_interval=3 log_interval=1 warmup_steps=2 mc_samples=2 eval_examples=8 n_workers=0"
COLOUR = "dataset=cifar10 n_tokens=16"
IMAGES = "dataset=imagenet n_tokens=16 image_size=16 method=daps_na data_dir={folder}/pictures"

# For each setting: what else is set, and the change, which must show in the log or in the model.
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
    "n_samples": ("", "2"),
    "ess_target": ("", "0.9"),
    "eta_update": ("", "gradient"),
    "beta_init": ("", "0.1"),
    "beta_final": ("", "0.1"),
    "tau_init": ("method=gumbel", "0.5"),
    "tau_final": ("method=gumbel", "0.5"),
    "mc_samples": ("method=grmck", "3"),
    "ppo_epochs": ("method=ppo", "2"),
    "ppo_clip": ("method=ppo lr=0.1", "0.01"),
    "commitment": ("method=vqvae", "1.0"),
    "vq_ema": ("method=vqvae", "False"),
    "fsq_levels": ("method=fsq fsq_levels=4,4", "2 8"),
    "max_steps": ("", "4"),
    "batch_size": ("", "8"),
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
# What must not change the model; of recompute, beyond rounding.
NO_CHANGE = {
    "out_dir": ("", "{folder}/elsewhere"),
    "data_dir": ("", "{folder}"),
    "log_interval": ("", "2"),
    "eval_interval": ("", "1"),
    "eval_examples": ("", "4"),
    "wandb_log": ("", "True"),
    "n_workers": (IMAGES, "2"),
    "recompute": ("", "2"),
    "resume": ("", "True"),
    "overwrite": ("", "True"),
}
REFUSED = {"device": "meta", "data_dir": "{folder}/nowhere"}
ELSEWHERE = {"use_compile": "test_compiled_processes_train_as_one_eager_process_does"}


def result(small, options, out_dir):
    """The rows of the log and the parameters that a run ends with."""
    words = [f"{BASE} {options}".format(folder=small).split(), [f"out_dir={out_dir}"]]
    code, said = train(*(f"--{word.replace(',', ' ')}" for word in sum(words, [])))
    assert code == (2 if "lr=1e30" in options else 0), said
    rows = (out_dir / "log.jsonl").read_text()
    return rows, load_checkpoint(out_dir / "last.pt")["model"] if code == 0 else None


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


def test_every_setting_is_changed_by_a_test():
    tried = CHANGES.keys() | NO_CHANGE.keys() | REFUSED.keys() | ELSEWHERE.keys()
    assert tried == settings_block().keys()
    tests = [path.read_text() for path in pathlib.Path(ROOT, "tests").glob("*.py")]
    assert all(f"def {name}(" in "".join(tests) for name in ELSEWHERE.values())


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_changes_the_run(key, small, base, tmp_path):
    options, value = CHANGES[key]
    rows, model, _ = base(options)
    changed = result(small, f"{options} {key}={value.replace(' ', ',')}", tmp_path / "run")
    assert changed[0] != rows or not same(changed[1], model)


@pytest.mark.parametrize("key", NO_CHANGE)
def test_a_setting_leaves_the_model_as_it_is(key, small, base, tmp_path):
    options, value = NO_CHANGE[key]
    rows, model, base_dir = base(options)
    out_dir = tmp_path / "run"
    if key in ("resume", "overwrite"):
        shutil.copytree(base_dir, out_dir)
    changed = result(small, f"{options} {key}={value}", out_dir)
    if key == "recompute":
        for name, p in model.items():
            torch.testing.assert_close(changed[1][name], p, atol=1e-5, rtol=1e-4, msg=name)
    else:
        assert same(changed[1], model)
    if "interval" not in key and key not in ("recompute", "eval_examples"):
        assert changed[0] == rows
    if key == "wandb_log":
        assert len(sys.modules["wandb"].logged) == len(rows.splitlines())


# what is refused

NONSENSE = {
    "dataset=lafan": ("n_tokens is 4", "64"),
    "dataset=lafan n_tokens=64 method=vqvae resnet_encoder=True": ("resnet_encoder", "lafan"),
    "dataset=cifar10 n_tokens=12": ("n_tokens is 12", "square"),
    "dataset=imagenet n_tokens=64 image_size=24": ("n_tokens is 64", "24 x 24"),
    "method=vqvae resnet_encoder=True": ("n_tokens is 4", "28 x 28"),
    "method=fsq fsq_levels=": ("fsq_levels", "vocab_size"),
    "method=fsq fsq_levels=²,8": ("fsq_levels", "vocab_size"),
    "method=fsq fsq_levels=4,5": ("fsq_levels", "vocab_size"),
    "device=meta": ("device", "meta"),
    "seed=-1": ("seed", "zero or more"),
    "seed=9223372036854775808": ("seed", "2**63"),
    "lr=1e999": ("lr", "finite"),
    "n_tokens=0": ("n_tokens", "at least 1"),
    "vocab_size=1": ("vocab_size", "at least 2"),
    "width=0": ("width", "multiple"),
    "width=15": ("width", "multiple"),
    "n_heads=0": ("n_heads", "at least 1"),
    "n_layers=0": ("n_layers", "at least 1"),
    "mlp_ratio=0": ("mlp_ratio", "at least 1"),
    "decoder_layers=0": ("decoder_layers", "at least 1"),
    "beta_init=0.0": ("beta_init", "positive"),
    "beta_final=0.0": ("beta_final", "positive"),
    "n_tokens=1024 vocab_size=131072": ("n_tokens", "2**26"),
    "tau_init=0.0": ("tau_init", "positive"),
    "mc_samples=0": ("mc_samples", "at least 1"),
    "ppo_epochs=0": ("ppo_epochs", "at least 1"),
    "ppo_clip=0.0": ("ppo_clip", "positive"),
    "max_steps=0": ("max_steps", "at least 1"),
    "batch_size=0": ("batch_size", "at least 1"),
    "accumulate=0": ("accumulate", "at least 1"),
    "recompute=-1": ("recompute", "zero (off) or more"),
    "n_workers=-1": ("n_workers", "zero or more"),
    "lr=0.0": ("lr", "positive"),
    "lr_schedule=linear": ("lr_schedule", "cosine or constant"),
    "lr_schedule=constant lr_final=1e-3": ("lr_final", "constant"),
    "warmup_steps=-1": ("warmup_steps", "zero or more"),
    "weight_decay=-1.0": ("weight_decay", "zero or more"),
    "grad_clip=-1.0": ("grad_clip", "zero (off) or more"),
    "max_skipped=0": ("max_skipped", "at least 1"),
    "eval_interval=0": ("eval_interval", "at least 1"),
    "log_interval=0": ("log_interval", "at least 1"),
    "dtype=float16": ("dtype", "float32 or bfloat16"),
}


@pytest.mark.parametrize("options", NONSENSE)
def test_settings_that_make_no_sense_are_refused_before_any_work(
    options, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "load_dataset", lambda *_: pytest.fail("data were loaded"))
    words = f"{BASE} {options} out_dir={tmp_path / 'run'}".split()
    code, said = train(*(f"--{word.replace(',', ' ')}" for word in words))
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    assert all(word in said for word in NONSENSE[options]), said
    assert not (tmp_path / "run").exists()


def test_one_gpu_for_several_processes_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = train("--device=cuda:1", f"--out_dir={tmp_path / 'run'}")
    assert code == 2 and "device is 'cuda:1', must be" in said and said.count("\n") == 1


def test_data_that_are_not_there_are_refused(small, tmp_path):
    out_dir = f"--out_dir={tmp_path / 'run'}"
    options = f"{BASE} {IMAGES}".format(folder=small).split()
    words = [f"--{word}" for word in options if not word.startswith("data_dir")]
    code, said = train(*words, f"--data_dir={small / 'nowhere'}", out_dir)
    assert code == 2 and "nowhere: no such folder" in said


SHAPES = {"glyphs": 4, "mnist": 4, "cifar10": 16, "imagenet": 16, "lafan": 64}  # tokens


@pytest.mark.parametrize("dataset", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_step_on_every_data_set(method, dataset, small, tmp_path):
    options = (
        f"dataset={dataset} method={method} n_tokens={SHAPES[dataset]} max_steps=1 image_size=16"
    )
    options += " fsq_levels=4,4 data_dir={folder}/pictures"
    rows, _ = result(small, options, tmp_path / "run")
    assert all("NaN" not in row and json.loads(row) for row in rows.splitlines())
