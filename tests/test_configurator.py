"""configurator.py: settings from files and arguments, and errors of one line."""

import glob
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment, run_here

from configurator import UserError, checked, configure, defaults, read_config

# Of the scripts that have settings, this one is small.
BLOCK = dict(lr=6e-3, max_steps=2000, method="daps", resume=False, _hidden=1, Upper=2, other=None)


def settings(*argv):
    """The result of configure() on these arguments; None where nothing changed."""
    found, rest = configure(dict(BLOCK), [*map(str, argv)])
    assert found.keys() == {"lr", "max_steps", "method", "resume"}
    return found | {"rest": rest}


def test_arguments_are_literals_of_the_settings_types():
    found = settings("--lr=1", "--max_steps=5_0", "--method=a=b 1", "--resume=true", "out/run")
    assert found == dict(lr=1.0, max_steps=50, method="a=b 1", resume=True, rest=["out/run"])
    assert type(found["lr"]) is float and settings()["lr"] == 6e-3


BAD_ARGUMENTS = {
    "--lrr=1": "--lrr=1: there is no setting lrr; did you mean lr?",
    "--x=1": r"there is no setting x \(--help lists the settings\)",
    "--lr": "--lr: write --lr=value",
    "--": "write --key=value",
    "--lr=fast": "lr must be of type float, like 0.006; found 'fast'",
    "--lr=nan": "lr must be of type float",
    "--lr=1e999": "lr must be finite; found inf",
    f"--lr={10**400}": "lr must be of type float",
    "--max_steps=many": "max_steps must be of type int, like 2000; found 'many'",
    "--max_steps=2.5": "found 2.5",
    "--max_steps=True": "found True",
    "--max_steps=": "found ''",
    "--resume=1": "resume must be of type bool",
    "--resume=__import__('os')": "resume must be of type bool",
    "--_hidden=2": "there is no setting _hidden",
}


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_in_one_line(argument):
    with pytest.raises(UserError, match=f"^[^\n]*{BAD_ARGUMENTS[argument]}[^\n]*$"):
        settings(argument)


# config files


def config_file(folder, text, name="run.py"):
    (folder / name).write_text(text)
    return folder / name


def test_files_and_arguments_apply_from_left_to_right(tmp_path):
    a = config_file(tmp_path, '"""A docstring."""\n\nlr = 1e-4\nmax_steps = 8\n', "a.py")
    b = config_file(tmp_path, "max_steps = 4\nlr = 1  # whole numbers will do\n", "b.py")
    found = settings("--max_steps=2", "--method=vqvae", a, b, "--lr=3e-4")
    assert (found["lr"], found["max_steps"], found["method"]) == (3e-4, 4, "vqvae")
    assert settings(b, a)["max_steps"] == 8


def test_the_base_of_a_file_is_read_before_it_and_from_its_own_folder(tmp_path, monkeypatch):
    config_file(tmp_path, '"""Shared."""\nlr = 1.0\nmax_steps = 3\n', "shared.py")
    path = config_file(tmp_path, '"""A run."""\nbase = "shared.py"\nmax_steps = 7\n')
    monkeypatch.chdir("/")
    rows = [(key, value) for key, value, _ in read_config(path)]
    assert rows == [("lr", 1.0), ("max_steps", 3), ("max_steps", 7)]
    assert (settings(path)["lr"], settings(path)["max_steps"]) == (1.0, 7)
    places = [where for *_, where in read_config(path)]
    assert places[1] == f"{tmp_path}/shared.py, line 3" and places[2] == f"{path}, line 3"


BAD_FILES = {
    "max_step = 5": "run.py, line 1: there is no setting max_step; did you mean max_steps",
    "\nlr = 'fast'": "run.py, line 2: lr must be of type float, like 0.006; found 'fast'",
    "import os": "run.py, line 1: a config file holds only assignments",
    "lr = open('/etc/passwd').read()": "line 1: a config file holds only assignments",
    "lr = max_steps = 1": "line 1: a config file holds only assignments",
    "lr, max_steps = 1, 2": "line 1: a config file holds only assignments",
    "lr = = 1": "run.py: invalid syntax",
    "lr = 1\nbase = 'shared.py'": "run.py, line 2: base names one file, comes first",
    "base = 'shared.py'\nbase = 'shared.py'": "run.py, line 2: base names one file",
    "base = 3": "run.py, line 1: base names one file",
    "base = 'other.py'": "other.py, line 1: base names one file, comes first, and has no base",
    "base = 'none.py'": "none.py: No such file",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_config_file_is_refused_by_name_and_line(text, tmp_path):
    config_file(tmp_path, "lr = 1.0\n", "shared.py")
    config_file(tmp_path, "base = 'shared.py'\n", "other.py")
    with pytest.raises(UserError, match=f"^[^\n]*{BAD_FILES[text]}[^\n]*$"):
        settings(config_file(tmp_path, text))


def test_a_config_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match="config file config/none.py: No such file"):
        settings("config/none.py")


# the files in config/

CONFIGS = sorted(glob.glob(os.path.join(ROOT, "config", "*.py")))
SHARED = ("mnist.py", "cifar10.py", "imagenet.py", "lafan.py")
OVERLAYS = (
    "ours.py",
    "ours_64.py",
    "beta1.py",
    "cifar10_beta1.py",
    "paper.py",
    "short.py",
    "long.py",
)


@pytest.mark.parametrize("path", CONFIGS, ids=map(os.path.basename, CONFIGS))
def test_every_config_file_sets_what_train_py_has_and_opens_with_its_command(path):
    settings, name = defaults(os.path.join(ROOT, "train.py")), os.path.basename(path)
    rows = list(read_config(path))
    assert rows
    for key, value, where in rows:
        assert checked(key, value, settings, where) == value
    with open(path) as file:
        text = file.read()
    first = text.removeprefix('"""').split("\n")[0]
    if name in SHARED:
        assert first == f"Shared by all runs config/{name[:-3]}_*.py, which name it as their base."
        return
    words = first.split()
    assert words[0] == "python" or words[:2] == ["torchrun", "--nproc_per_node=2"]
    files = [word for word in words if word.startswith("config/")]
    assert files[-1] == f"config/{name}" or name in OVERLAYS and f"config/{name}" in files
    for word in files:
        assert os.path.exists(os.path.join(ROOT, word))
    if name not in OVERLAYS:
        assert len(files) == 1 and f'\nbase = "{name.split("_")[0]}.py"\n' in text


def test_every_shared_file_is_there_and_the_base_of_a_run():
    names = {os.path.basename(path) for path in CONFIGS}
    assert names >= {*SHARED, *OVERLAYS}
    for shared in SHARED:
        assert any(name.startswith(f"{shared[:-3]}_") for name in names)


def test_our_changes_are_the_defaults_and_off_in_the_runs_of_the_paper():
    files = {os.path.basename(path): path for path in CONFIGS}
    values = {name: {key: v for key, v, _ in read_config(path)} for name, path in files.items()}
    found, ours, paper = (
        defaults(os.path.join(ROOT, "train.py")),
        values["ours.py"],
        values["paper.py"],
    )
    assert ours.items() <= found.items()
    changes = ours.keys() | values["ours_64.py"].keys()
    off = {key: paper[key] for key in changes}  # config/paper.py has them all
    for name in files.keys() - {*SHARED, *OVERLAYS}:
        run = found | values[name]
        assert {key: run[key] for key in changes} == off, name


# the settings block of a script


def block(script):
    """The settings that a script's --help lists, as text."""
    done = run_here(script, "--help")
    assert done.code == 0
    rows = done.output[done.output.index("Settings:") :].splitlines()[1:]
    return [re.fullmatch(r"  (\w+) = (.*?)  +(\S.*)", row) for row in rows]


@pytest.mark.parametrize(
    "script, n", [("train.py", 30), ("eval.py", 5), ("bench.py", 9), ("prior.py", 20)]
)
def test_help_lists_every_setting_with_default_and_comment(script, n):
    rows = block(script)
    assert len(rows) >= n and all(rows)


def test_defaults_are_what_train_py_itself_calls_its_settings():
    found, ours = defaults(os.path.join(ROOT, "train.py")), {}
    for row in block("train.py"):
        ours[row[1]] = row[2]
    computed = {"data_dir", "device", "use_compile", "n_workers"}
    assert {key: repr(value) for key, value in found.items()} == {
        key: text for key, text in ours.items() if key not in computed
    }
    assert computed < ours.keys()


# errors

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import configurator
print("began", flush=True)
{code}
"""


def end_of(code, **env):
    """How a process that executes this, without torch, ends."""
    command = [sys.executable, "-c", SCRIPT.format(root=ROOT, code=code)]
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=600
    )


def test_a_user_error_ends_a_program_with_one_line_wherever_it_is_raised():
    deep = (
        "def f(n):\n    if n == 0:\n        raise configurator.UserError('mend this')\n    f(n - 1)"
    )
    done = end_of(deep + "\ntry:\n    f(5)\nfinally:\n    print('closed', flush=True)")
    assert (done.returncode, done.stderr) == (2, "error: mend this\n")
    assert done.stdout == "began\nclosed\n"
    done = end_of("raise configurator.UserError('mend this')", RANK="0")
    assert (done.returncode, done.stderr) == (2, "error: mend this\n")
    done = end_of("raise configurator.UserError('mend this')", RANK="3")
    assert (done.returncode, done.stderr) == (2, "error (rank 3): mend this\n")


def test_other_errors_keep_their_traceback():
    done = end_of("raise ValueError('a bug')")
    assert done.returncode == 1 and done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.endswith("ValueError: a bug\n")


WORKER = """
from torch.utils.data import DataLoader
from configurator import UserError
class Broken(list):
    def __getitem__(self, i):
        raise UserError("none of 3 files could be decoded")
next(iter(DataLoader(Broken([1]), num_workers=1, multiprocessing_context="fork")))
"""


def test_an_error_from_within_a_worker_shows_its_own_message_alone(forker, tmp_path):
    (tmp_path / "script.py").write_text(WORKER)
    (done,) = forker.run(((tmp_path / "script.py",), "", {}))
    assert (done.code, done.errors) == (2, "error: none of 3 files could be decoded\n")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed.", "a process that reads images"),
        ("[../gloo/transport/tcp/pair.cc] Connection closed by peer", "another process of this"),
    ],
)
def test_the_end_of_another_process_is_explained_in_one_line(text, reason):
    done = end_of(f"raise RuntimeError({text!r})")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {reason}") and "--resume=True" in done.stderr
