"""The README keeps its word: its commands run, its code runs, its links lead somewhere."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, TINY, environment, run, succeed
from test_data import write_mnist
from test_images import photograph, write_cifar
from test_motion import write_lafan

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
    README = file.read()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
COMMANDS += re.findall(r"`(python [^`]*)`", README)  # within sentences
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project in which README commands leave their traces, with tiny data sets."""
    folder = tmp_path_factory.mktemp("readme") / "daps"
    ignore = shutil.ignore_patterns(".*", "out", "__pycache__", "assets")
    shutil.copytree(ROOT, folder, ignore=ignore)
    write_mnist(folder / "data" / "mnist", n=64)
    write_lafan(folder / "data")
    write_cifar(folder / "data" / "cifar10" / "cifar-10-batches-bin", n=20)
    photos = ("photos/train/a", "photos/val/a", "data/imagenet/train/a", "data/imagenet/val/a")
    for part in (*photos, "pictures"):
        os.makedirs(folder / part)
        for i in range(20):
            photograph(40, 30, seed=i).save(folder / part / f"{i}.JPEG")
    return folder


def in_copy(copy, *command):
    return succeed(*command, cwd=copy, DAPS_DATA=str(copy / "data"), DAPS_CACHE=str(copy / "cache"))


def test_the_readme_has_commands_to_install_train_test_and_compare():
    text = "\n".join(COMMANDS)
    for part in ("-r requirements.txt", "python train.py", "python -m pytest", "python eval.py"):
        assert part in text


def test_every_readme_command_runs_in_order(copy):
    """With a few steps of a small model; pip and the tests themselves are run by .ci/run."""
    parts = [part for command in COMMANDS for part in command.split(" && ")]
    for part in dict.fromkeys(parts):  # each once, in order
        words = part.split()
        if words[0] == "pip":
            assert words[:3] == ["pip", "install", "-r"] and os.path.exists(copy / words[3])
            continue
        if words[0] == "torchrun":
            words = ["python", "-m", "torch.distributed.run", "--standalone", *words[1:]]
        assert words.pop(0) == "python", part
        if words == ["daps.py"] or "--help" in words:
            in_copy(copy, *words)
        elif words == ["-m", "pytest"]:
            assert "test_every_readme_command" in in_copy(copy, *words, "--collect-only", "-q")
        elif "train.py" in words:
            small = ("--max_steps=2",) if "lafan" in part or "cifar10" in part else ()
            if "imagenet" in part:
                small += ("--n_tokens=16", "--image_size=32", "--n_workers=1")
            in_copy(copy, *words, *TINY, *small)
        elif "bench.py" in words:
            small = ("--only=steps", "--model=mnist", "--method=fsq", "--seconds=0.01")
            in_copy(copy, *words, *small)
        else:  # the weights of Inception are not at hand: test_fid.py has its own
            in_copy(copy, *(word for word in words if not word.startswith("--fid_weights")))
    assert len(COMMANDS) >= 6


def test_the_readme_s_python_for_loading_a_run_works(copy):
    """After `python train.py`, which the test above has run."""
    if not os.path.exists(copy / "out" / "glyphs_daps" / "best.pt"):
        in_copy(copy, "train.py", *TINY)
    (code,) = (code for code in PYTHON if "from eval import load" in code)
    shapes = "\nprint(z.shape, reconstruction.shape, new.shape)"
    output = in_copy(copy, "-c", code + shapes)
    image = "torch.Size([16, 1, 28, 28])"
    assert output.strip() == f"torch.Size([16, 8]) {image} {image}"


def test_daps_alone_in_an_empty_folder_imports_and_trains_foreign_networks(tmp_path):
    shutil.copy(os.path.join(ROOT, "daps.py"), tmp_path)
    (code,) = (code for code in PYTHON if "from daps import DAPS" in code)
    networks = """
import torch
from torch import nn
class Encoder(nn.Linear):
    vocab_size = 4
    def forward(self, x, n_samples):
        q = torch.distributions.Categorical(logits=super().forward(x).view(-1, 1, 2, 4))
        z = q.expand((len(x), n_samples, 2)).sample()
        return z, q.log_prob(z).sum(-1)
class Decoder(nn.Embedding):
    def log_prob(self, x, z):
        return -(self(z).sum(2) - x.unsqueeze(1)).square().sum(-1)
torch.manual_seed(0)
encoder, decoder, x, beta = Encoder(3, 8), Decoder(4, 3), torch.randn(64, 3), 0.01
"""
    code = (
        networks
        + code
        + """
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
first = metrics["reward"].item()
for _ in range(200):
    loss, metrics = model(x, beta)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(first, metrics["reward"].item())
"""
    )
    (tmp_path / "use.py").write_text(code)
    done = run("-I", "-c", "import sys; sys.path.insert(0, '.'); import use", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last > first + 1


def test_daps_imports_nothing_but_torch_and_math():
    with open(os.path.join(ROOT, "daps.py")) as file:
        imports = re.findall(r"^\s*(?:import|from) (\w+)", file.read(), re.MULTILINE)
    assert set(imports) == {"torch", "math"}


def test_links_and_pictures_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+?)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or os.path.exists(os.path.join(ROOT, link)), link


def test_every_logged_metric_and_every_file_has_its_line_in_the_readme(finished_run):
    with open(finished_run / "log.jsonl") as file:
        keys = set(re.findall(r'"(\w+)":', file.read())) - {"step", "split"}
    for key in keys:
        assert f"`{key}`" in README, key
    for name in os.listdir(ROOT):
        if name.endswith(".py"):
            assert f"[{name}]({name})" in README, name


def test_ci_runs_the_readme_s_own_test_command():
    """.ci/run takes the first line of the README that runs pytest; that is the whole command."""
    command = ["grep", "-m", "1", "python -m pytest", "README.md"]
    found = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert found.stdout.strip() in COMMANDS
