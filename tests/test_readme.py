"""README.md and docs/ are correct: commands run, code runs, links lead somewhere."""

import glob
import os
import re
import shlex
import shutil
import subprocess
import textwrap

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    environment,
    log_rows,
    photograph,
    run_here,
    train_here,
    write_cifar,
    write_lafan,
    write_mnist,
)
from torch import nn

import checkpoint
import data
import eval
import motion
from data import load_dataset

PAGES = ["README.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
TEXT = {}
for page in PAGES:
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        TEXT[page] = file.read()
README = TEXT["README.md"]
INLINE = r"`((?:python|torchrun|bash) [^`\n]*(?:\.py|\.sh|pytest)[^`\n]*)`"  # in sentences


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# Bash itself parses the commands: loops, variables and our scripts run, but the programs that they
# start only record a line with their arguments.
RECORDER = """
for name in python torchrun pip git cd curl wget; do
  eval "$name() { printf '%s\\x1f' $name \\"\\$@\\" >> \\"\\$RECORD\\"; echo >> \\"\\$RECORD\\"; }"
  export -f $name
done
bash() { printf '%s\\x1f' bash "$@" >> "$RECORD"; echo >> "$RECORD"; command bash "$@"; }
command_not_found_handle() { printf '%s\\x1f' "$@" >> "$RECORD"; echo >> "$RECORD"; }
export -f command_not_found_handle
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which commands run: configs and scripts of the project, tiny data sets."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("config", "experiments"):
        if os.path.exists(os.path.join(ROOT, name)):
            os.symlink(os.path.join(ROOT, name), folder / name)
    shipped = os.path.join("assets", "mnist_daps")
    for part in (shipped, os.path.join("docs", "runs")):  # copies: eval.py writes into them
        shutil.copytree(os.path.join(ROOT, part), folder / part)
    photos = ("photos/train/a", "photos/val/a", "data/imagenet/train/a", "data/imagenet/val/a")
    for part in (*photos, "pictures"):
        os.makedirs(folder / part)
        for i in range(20):
            photograph(40, 30, seed=i).save(folder / part / f"{i}.JPEG")
    tables = [
        (data, "MNIST_FILES", write_mnist(folder / "data" / "mnist", n=64)[1]),
        (data, "CIFAR10_FILES", write_cifar(folder / "data/cifar10/cifar-10-batches-bin", 20)[1]),
        (motion, "LAFAN_FILES", write_lafan(folder / "data")),
        (data, "LAFAN_FILES", motion.LAFAN_FILES),
        (data, "CACHE_DIR", str(folder / "cache")),
        (eval, "DATA_DIR", str(folder / "data")),
    ]
    letters = data.glyphs(n_train=400, n_val=48)
    load_dataset.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for module, name, table in tables:
            if hasattr(module, name):
                patch.setattr(module, name, table if name != "LAFAN_FILES" else tables[2][2])
        patch.setitem(data.DATASETS, "glyphs", lambda data_dir: letters)
        patch.chdir(folder)
        yield folder
    load_dataset.cache_clear()


def recorded(script, folder):
    """The commands that bash starts, each a list of words."""
    record = folder / "commands"
    record.write_text("")
    subprocess.run(
        ["bash", "-c", RECORDER + script], cwd=folder, env=environment(RECORD=str(record)),
        timeout=60, check=False, capture_output=True,
    )  # fmt: skip
    return [line.split("\x1f")[:-1] for line in record.read_text().splitlines()]


@pytest.fixture(scope="module")
def commands(folder):
    """Every command of every page, once, in order, including those in our scripts."""
    found = []
    for text in TEXT.values():
        script = "\n".join(blocks(text, "bash") + re.findall(INLINE, text))
        found += recorded(script, folder)
    return [list(words) for words in dict.fromkeys(map(tuple, found))]


class Stop(Exception):
    """Raised when a script has checked its settings and sets up the device."""


def check(words, monkeypatch):
    """Let a script read and check its arguments, up to where it would start computing."""
    script, *arguments = words
    if os.path.basename(script) in (
        "daps.py",
        "baselines.py",
    ):  # test_daps and test_baselines run them
        with open(os.path.join(ROOT, script)) as file:
            assert not arguments and 'if __name__ == "__main__":\n    demo()' in file.read()
        return

    def stop(device):
        raise Stop

    monkeypatch.setattr(checkpoint, "setup_device", stop)
    try:
        done = run_here(script, *arguments)
    except Stop:
        return
    assert done.code == 0 and "--help" in arguments, done.errors or f"{script} computes something"


def check_torchrun(words, monkeypatch):
    """Check the script and its arguments as seen by one of its processes."""
    (at,) = (i for i, word in enumerate(words) if word.endswith(".py") and "/" not in word)
    options = dict(word.lstrip("-").split("=") for word in words[1:at] if "=" in word)
    size = int(options.get("nnodes", 1)) * int(options["nproc_per_node"])
    restarts = options.get("max_restarts", "0")
    for key, value in (("WORLD_SIZE", size), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    check(words[at:], monkeypatch)


def check_pytest(words):
    """Markers are known, files exist."""
    with open(os.path.join(ROOT, "pyproject.toml")) as file:
        known = file.read()
    for word, following in zip(words, [*words, ""][1:], strict=True):
        assert word != "-m" or f'"{following.split()[-1]}:' in known, words
        assert not word.startswith("tests") or os.path.exists(os.path.join(ROOT, word)), words


def test_there_are_commands_to_install_train_test_and_compare(commands):
    lines = [" ".join(words) for words in commands]
    for start in (
        "pip install -r requirements.txt",
        "python train.py",
        "python eval.py",
        "python bench.py",
        "python daps.py",
        "python baselines.py",
        "python -m pytest",
        "torchrun",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_every_command_names_files_and_settings_that_exist(commands, folder):
    for words in commands:
        with pytest.MonkeyPatch.context() as patch:
            if words[0] == "torchrun":
                check_torchrun(words, patch)
            elif words[:3] == ["python", "-m", "pytest"]:
                check_pytest(words[3:])
            elif words[0] == "python":
                check(words[1:], patch)
            elif words[0] == "pip":
                assert words[:3] == ["pip", "install", "-r"] and len(words) == 4
                assert os.path.exists(os.path.join(ROOT, words[3])), words
            elif words[0] == "bash":
                assert os.path.exists(os.path.join(ROOT, words[1])), words
            else:
                assert words[0] in ("git", "cd", "curl", "wget"), words


def tiny(words):
    """Settings that make a run of train.py take a second."""
    line = " ".join(words)
    small = [*TINY, "--max_steps=2", "--eval_interval=2", "--n_layers=1", "--overwrite=True"]
    small += ["--batch_size=4", "--fsq_levels=8 4", "--mc_samples=2", "--eval_examples=8"]
    if "imagenet" in line:
        small += ["--n_tokens=16", "--image_size=32", "--n_workers=0"]
    if "--data_dir" not in line:
        small += ["--data_dir=data"]
    return small


def runs_in(words):
    return [word for word in words if not word.startswith("--") and not word.endswith(".py")]


def test_commands_that_train_and_evaluate_do_so_in_order(commands, folder):
    """With two steps of a small model on made-up data; pip and the tests are run by .ci/run."""
    trained, evaluated = 0, set()
    for program, *words in commands:
        if program != "python" or "--help" in words:
            continue
        if words[0] == "train.py":
            train_here(*words[1:], *tiny(words))
            trained += 1
        elif words[0] == "eval.py" and all(map(os.path.exists, runs_in(words))):
            # The weights of Inception are not available here: test_fid.py makes its own.
            words = [word for word in words[1:] if not word.startswith("--fid_weights")]
            done = run_here("eval.py", *words, "--data_dir=data", "--n_workers=0")
            assert done.code == 0, done.errors
            evaluated |= set(runs_in(words))
    records = {f"docs/runs/{name}" for name in os.listdir(os.path.join(ROOT, "docs", "runs"))}
    assert records <= evaluated
    assert trained >= 4 and os.path.exists(folder / "out" / "glyphs_daps" / "samples.png")
    assert os.path.exists(folder / "assets" / "mnist_daps" / "samples.png")


def test_scripts_of_experiments_start_commands_that_would_run(folder):
    for script in sorted(glob.glob("experiments/*.sh", root_dir=ROOT)):
        started = [words for words in recorded(f"bash {script}", folder) if words[0] == "python"]
        assert started, script
        for words in started:
            with pytest.MonkeyPatch.context() as patch:
                check(words[1:], patch)


# code


def how_it_works():
    return re.search(r"^## How it works\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]


def test_lines_of_code_that_the_readme_quotes_stand_in_daps():
    with open(os.path.join(ROOT, "daps.py")) as file:
        lines = {line.strip() for line in file}
    quoted = [
        line.strip() for code in blocks(how_it_works(), "python") for line in code.splitlines()
    ]
    assert len(quoted) >= 5
    for line in filter(None, quoted):
        assert line in lines, line


class Encoder(nn.Linear):
    """Networks that have nothing to do with ours: two tokens of four values."""

    vocab_size, n_tokens = 4, 2

    def forward(self, x, n_samples):
        q = torch.distributions.Categorical(logits=super().forward(x).view(-1, 1, 2, 4))
        z = q.expand((len(x), n_samples, 2)).sample()
        return z, q.log_prob(z).sum(-1)


class Decoder(nn.Embedding):
    def log_prob(self, x, z):
        return -(self(z).sum(2) - x.unsqueeze(1)).square().sum(-1)


def test_other_code_of_the_pages_runs(folder):
    """In order, with the names it assumes: the reader's own networks, x and beta."""
    if not os.path.exists("out/glyphs_daps/best.pt"):  # of `python train.py`
        train_here(*tiny([]))
    few = ("--max_steps=2", "--n_generated=10", "--n_steps=2", "--classifier_steps=0")
    done = run_here("prior.py", "out/glyphs_daps", *few, "--overwrite=True", "--n_workers=0")
    assert done.code == 0, done.errors
    quoted, foreign = blocks(how_it_works(), "python"), []
    for text in TEXT.values():
        torch.manual_seed(0)
        names = dict(encoder=Encoder(3, 8), decoder=Decoder(4, 3), x=torch.randn(64, 3), beta=0.01)
        for code in blocks(text, "python"):
            if code not in quoted:
                exec(compile(textwrap.dedent(code), "README", "exec"), names)
                foreign += [dict(names)] if "from daps import DAPS" in code else []
                if "searched" in code:
                    assert (names["searched"] >= names["drawn"] - 1e-3).all()
                if "model.decode(z)" in code:
                    assert names["z"].shape == (16, 8)
                    assert names["reconstruction"].shape == names["new"].shape == (16, 1, 28, 28)
    assert len(foreign) == 1 and foreign[0]["encoder"].weight.grad.abs().sum() > 0
    model, x, beta = (foreign[0][name] for name in ("model", "x", "beta"))
    optimizer, first = (
        torch.optim.Adam(model.parameters(), lr=0.03),
        foreign[0]["metrics"]["reward"],
    )
    for _ in range(100):
        loss, metrics = model(x, beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["reward"] > first + 1


def test_daps_imports_nothing_but_torch_and_math():
    """So that the file can be copied alone."""
    with open(os.path.join(ROOT, "daps.py")) as file:
        imports = re.findall(r"^\s*(?:import|from) (\w+)", file.read(), re.MULTILINE)
    assert set(imports) == {"torch", "math"}


# links and promises


def anchors(text):
    """The valid targets after #: the headings, in lower case, with - for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    text = re.sub(r"^```.*?^```", "", TEXT[page], flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.exists(os.path.join(ROOT, there)), link
        assert not anchor or anchor in anchors(TEXT[there]), link


def test_the_readme_has_at_most_300_lines_and_leads_to_every_page_and_file():
    assert len(README.splitlines()) <= 300
    for name in PAGES[1:] + glob.glob("*.py", root_dir=ROOT):
        assert f"]({name})" in README, name


def test_every_logged_metric_is_explained(finished_run):
    keys = {key for row in log_rows(finished_run) for key in row} - {"step", "split"}
    for key in keys | {"tau", "commit", "clipped", "cm", "degrees"}:
        assert any(f"`{key}`" in text for text in TEXT.values()), key


def test_ci_runs_the_readme_s_own_test_command():
    """.ci/run takes the first line of the README that runs pytest: it is the whole command."""
    line = next(line for line in README.splitlines() if "python -m pytest" in line)
    assert any(line in block.splitlines() for block in blocks(README, "bash"))
    assert shlex.split(line)[-3:] == ["python", "-m", "pytest"]
