"""README.md and docs/: commands and code run, quotes are verbatim, links lead somewhere."""

import contextlib
import glob
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, TINY, log_rows, run_here, write_mnist, write_pictures

import data
import run
from data import load_dataset

PAGES = ["README.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
TEXT = {page: pathlib.Path(ROOT, page).read_text(encoding="utf-8") for page in PAGES}
README = TEXT["README.md"]
INLINE = r"`((?:python|bash|torchrun) [^`\n]*\.(?:py|sh)\b[^`\n]*)`"  # commands in sentences


def blocks(text, language=r"\w*"):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text):
    return re.sub(r"^```.*?^```\n?", "", text, flags=re.DOTALL | re.MULTILINE)


def split(script):
    """The commands of a script, without comments, each a list of words."""
    lines = script.replace("\\\n", " ").replace("&&", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which commands run: configs and scripts of the project, tiny data sets."""
    folder = tmp_path_factory.mktemp("readme")
    for part in ("config", "experiments", "assets/mnist_daps", "docs/runs"):
        shutil.copytree(os.path.join(ROOT, part), folder / part)
    write_pictures(folder / "pictures", 20)
    _, hashes = write_mnist(folder / "data" / "mnist")
    load_dataset.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "MNIST_FILES", hashes)
        patch.setattr(data, "CACHE_DIR", str(folder / "cache"))
        patch.setattr(data, "DATA_DIR", str(folder / "data"))
        patch.chdir(folder)
        yield folder
    load_dataset.cache_clear()


class Ready(Exception):
    """Raised where a script has checked its settings and is about to compute."""


def check(words, patch):
    """The script exists and accepts its arguments; under torchrun, as one of its processes."""
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    options = dict(word[2:].split("=") for word in words[:at] if "=" in word)
    patch.setenv("WORLD_SIZE", options.get("nproc_per_node", "1"))

    def ready(device):
        raise Ready

    patch.setattr(run, "setup_device", ready)
    with contextlib.suppress(Ready):
        done = run_here(*words[at:])
        assert done.code == 0 and "--help" in words, (words, done.errors)


def shrunk(words):
    """The arguments of a script, with others that make it take a second."""
    script, line, here = words[0], " ".join(words), words[1:]
    if script == "train.py":
        here += [*TINY, "--max_steps=2", "--eval_interval=2", "--n_layers=1", "--batch_size=4"]
    elif script == "prior.py":
        here += ["--max_steps=2", "--n_steps=2"]
    return [*here, "--n_workers=0", *([] if "--data_dir" in line else ["--data_dir=data"])]


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_files_and_settings_that_exist(page, folder):
    inline = re.findall(INLINE, prose(TEXT[page]))
    for words in split("\n".join(blocks(TEXT[page], "bash") + inline)):
        with pytest.MonkeyPatch.context() as patch:
            if words[0] == "bash" or words[1] in ("daps.py", "experiments/bias.py"):
                assert os.path.exists(os.path.join(ROOT, words[1])), words  # other tests run them
            elif words[0] != "pip" and words[1] != "-m":
                check(words, patch)


def test_scripts_of_experiments_start_commands_that_would_run(folder):
    """Bash runs the scripts, with a python that only writes down its arguments."""
    recorder = "python() { printf '%q ' python \"$@\"; echo; }; export -f python; command bash "
    for script in sorted(glob.glob("experiments/*.sh")):
        command = ["bash", "-c", recorder + script]
        done = subprocess.run(command, text=True, capture_output=True)
        assert done.returncode == 0 and done.stdout, (script, done.stderr)
        for words in split(done.stdout):
            with pytest.MonkeyPatch.context() as patch:
                check(words, patch)


def test_the_readme_s_commands_and_code_run_in_order(folder):
    """Two steps of a small model on made-up data; .ci/run installs, and runs the tests."""
    names, done = {}, []
    for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", README, re.S | re.M):
        if language == "python" and not code.startswith("    "):  # indented: a quote
            torch.manual_seed(0)
            exec(compile(code, "README.md", "exec"), names)
            if "x_again" in code:  # a guess from the frequency of ones would be right for 61 %
                assert (names["x_again"].round() == names["x"]).float().mean() > 0.85
            elif "LocalDecoder" in code:
                names["model"](names["x"], 0.01)[0].backward()
            elif "model.sample" in code:
                assert names["codes"].shape == (16, 8)
                assert names["images"].shape == names["new"].shape == (16, 1, 28, 28)
                assert names["images"].min() >= 0 and names["images"].max() <= 1
        for program, *words in split(code) if language == "bash" else []:
            words = words[1:] if program == "torchrun" else words
            if program != "pip" and words[0] != "-m" and "lafan" not in " ".join(words):
                result = run_here(words[0], *shrunk(words))
                assert result.code == 0, (words, result.errors)
                done.append(words[0])
    assert names["digits"].shape == (10, 1, 28, 28)
    assert done.count("train.py") >= 5 and {"eval.py", "prior.py"} <= set(done)


def test_records_print_their_tables(folder):
    records = sorted(glob.glob("docs/runs/*.jsonl"))
    for path in records:
        assert f"python eval.py {path}" in "".join(TEXT.values()), path
    done = run_here("eval.py", *records)
    assert done.code == 0 and done.output.count("\n") > 40, done.errors


def test_python_in_docs_runs(folder):
    """The search, here on made-up digits, never ends below what it began with."""
    for page in PAGES[1:]:
        for code in blocks(TEXT[page], "python"):
            names = {}
            exec(compile(code.replace("1000", "20"), page, "exec"), names)
            if "searched" in names:
                assert (names["searched"] >= names["drawn"] - 1e-3).all()


def test_quoted_code_stands_in_daps():
    source = pathlib.Path(ROOT, "daps.py").read_text().splitlines()
    quoted = [code for code in blocks(README, "python") if code.startswith("    ")]
    assert len(quoted) >= 3
    for line in "".join(quoted).splitlines():
        assert line in source, line


@pytest.mark.parametrize("name", ["daps.py", "flow.py", "search.py", "motion.py"])
def test_files_to_copy_need_only_torch_and_for_motion_numpy_and_pillow(name):
    source = pathlib.Path(ROOT, name).read_text()
    imports = re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE)
    more = {"numpy", "PIL"} if name == "motion.py" else {"search"}  # search: where it is asked for
    assert set(imports) <= {"torch", "math"} | more


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(TEXT[page])):
        path, _, anchor = link.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not link.startswith("https://"):
            assert os.path.exists(os.path.join(ROOT, there)), link
            headings = re.findall(r"^#+ (.*)$", prose(TEXT.get(there, "")), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert not anchor or anchor in anchors, link


def test_the_readme_is_short_and_leads_to_every_page_and_file():
    assert len(prose(README).split()) <= 1500
    assert max(map(len, README.splitlines())) <= 120
    for name in PAGES[1:] + glob.glob("*.py", root_dir=ROOT):
        assert f"]({name}" in README, name


def test_every_logged_metric_is_explained(finished_run):
    keys = {key for row in log_rows(finished_run) for key in row} - {"step", "split"}
    for key in keys | {"tau", "commit", "clipped", "cm", "degrees"}:
        assert f"`{key}`" in TEXT["docs/logged_metrics.md"], key


def test_ci_runs_the_readme_s_own_test_command():
    """.ci/run takes the first line of the README that has `python -m pytest`: a whole command."""
    line = next(line for line in README.splitlines() if "python -m pytest" in line)
    assert line in "".join(blocks(README, "bash")).splitlines()
    assert split(line)[-1] == ["python", "-m", "pytest"]
