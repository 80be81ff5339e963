"""Shared by the tests: scripts as a user runs them, shared runs, faults, made-up data.

Run as a script, this file is the process that Forker starts.
"""

# ruff: noqa: E402
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch starts: tests compare with this CPU

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import pathlib
import runpy
import signal
import socket
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image

import data
import eval as evaluation
import motion
from configurator import UserError, explain, read_config, settings_block
from models import OnePassEncoder, token_log_prob
from run import load_checkpoint

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULTS, _ = settings_block(os.path.join(ROOT, "train.py"))
TINY = ("--batch_size=16", "--n_samples=4", "--vocab_size=32", "--width=32", "--max_steps=12")
TINY += ("--eval_interval=4", "--log_interval=1")
SMALL = ("--n_tokens=16", "--vocab_size=16", "--width=16", "--n_layers=1")
SMALL += ("--n_samples=3", "--log_interval=1", "--lr=1e-3", "--mc_samples=2")
SMALL += ("--fsq_levels=4 4", "--batch_size=8", "--max_steps=6", "--eval_interval=3")

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it
LETTERS = data.glyphs(n_train=2000, n_val=48)
data.DATASETS["glyphs"] = lambda data_dir: LETTERS  # a tenth of them will do


def log_prob_of_all(encoder, x, codes):
    """log q(z|x) of one x (1, ...) for every row of codes (M, B): (M,), with gradient."""
    if isinstance(encoder, OnePassEncoder):
        logits = encoder.logits(x).unsqueeze(1).expand(-1, len(codes), -1, -1)
    else:
        context = encoder.tokens.context(encoder.patch_encoder(x))
        logits = encoder.tokens.logits(context, codes.unsqueeze(0))
    return token_log_prob(logits, codes.unsqueeze(0)).sum(dim=-1)[0]


def config(*names, **changes):
    """The settings of train.py, overridden by every config/<name>.py, then by the changes."""
    paths = [os.path.join(ROOT, "config", f"{name}.py") for name in names]
    return DEFAULTS | {key: v for path in paths for key, v, _ in read_config(path)} | changes


@pytest.fixture(autouse=True)
def same_start():
    """Each test starts from one seed, and with denormal numbers, which setup_device turns off."""
    torch.manual_seed(0)
    torch.set_flush_denormal(False)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# scripts, in a process of their own or in this one

PATIENCE = 400  # seconds after which a run counts as hung, even on a busy machine


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # for subprocesses


def run(*command, **extra):
    """Run python with these arguments; the finished process with its output as text."""
    options = dict(cwd=ROOT, env=ONE_THREAD | extra, timeout=PATIENCE, text=True)
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, **options)


def run_here(script, *arguments):
    """Run a script in this process, which saves importing torch: its exit code, stdout and stderr.
    Only an error that would show a traceback is raised."""
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers, argv = [signal.getsignal(number) for number in signals], sys.argv
    output, errors, code, stderr = io.StringIO(), io.StringIO(), 0, sys.__stderr__
    sys.argv, sys.__stderr__ = [script, *map(str, arguments)], errors
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            with torch.random.fork_rng():
                runpy.run_path(os.path.join(ROOT, script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        except (UserError, OSError, ModuleNotFoundError) as error:
            with pytest.raises(SystemExit) as end:
                explain(type(error), error, None)
            code = end.value.code
        finally:
            sys.argv, sys.__stderr__ = argv, stderr
            for number, handler in zip(signals, handlers, strict=True):
                signal.signal(number, handler)
    return types.SimpleNamespace(code=code, output=output.getvalue(), errors=errors.getvalue())


def train_here(*arguments, script="train.py"):
    """A script in this process; it must not fail."""
    done = run_here(script, *arguments)
    assert done.code == 0, done.output + done.errors
    return done.output


def assert_one_line(done, *words):
    """A run ended with one line that contains these words, and exit code 2."""
    assert done.code == 2, done.output + done.errors
    assert done.errors.startswith("error") and done.errors.count("\n") == 1, done.errors
    for word in words:
        assert word in done.errors


class Forker:
    """Importing torch takes longer than a tiny run, so one process imports all that the scripts
    need and forks for each run. A fault is code that the child executes before its script."""

    def __init__(self, folder):
        command, pipe = [sys.executable, os.path.abspath(__file__)], subprocess.PIPE
        options = dict(cwd=ROOT, env=ONE_THREAD | {"PYTHONPATH": ROOT}, text=True)
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **options)
        self.folder = folder

    def run(self, *jobs):
        """Run jobs (argv, fault, env) in parallel: the exit code and output of each."""
        files = [[str(self.folder / f"{kind}{i}") for kind in "oe"] for i in range(len(jobs))]
        jobs = [([*map(str, argv)], *rest, f) for (argv, *rest), f in zip(jobs, files, strict=True)]
        print(json.dumps(jobs), file=self.process.stdin, flush=True)
        codes, results = json.loads(self.process.stdout.readline()), []
        for code, names in zip(codes, files, strict=True):
            output, errors = (pathlib.Path(name).read_text() for name in names)
            results.append(types.SimpleNamespace(code=code, output=output, errors=errors))
        return results

    def train(self, *arguments, fault="", script="train.py"):
        (done,) = self.run(((script, *arguments), fault, {}))
        return done

    def finish(self, *arguments, **options):
        done = self.train(*arguments, **options)
        assert done.code == 0, done.output + done.errors
        return done.output

    def ranks(self, *commands):
        """Processes that train together, from the arguments and the fault of each."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(len(commands)))
        jobs = []
        for rank, (arguments, fault) in enumerate(commands):
            rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            jobs.append((("train.py", *arguments), fault, env | rank))
        return self.run(*jobs)

    def finish_ranks(self, *arguments):
        everyone = self.ranks(*[(arguments, "")] * 2)
        for done in everyone:
            assert done.code == 0, done.output + done.errors
        return everyone[0].output


def fork(argv, fault, env, files):
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.alarm(PATIENCE)  # a run that hangs is ended
    os.environ.update(env)
    for number, name in enumerate((os.devnull, *files)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    exec(fault, globals())
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("forker"))
    yield forker
    forker.process.kill()
    forker.process.wait()


# faults


def strike(where, nth=1, number=signal.SIGKILL):
    """The signal arrives at the nth moment of a kind in this process, which will run a script."""
    owner, name = {
        "start": (data, "load_dataset"),
        "step": (torch.optim.AdamW, "step"),
        "evaluation": (evaluation, "validation_noise"),
        "save": (os, "fsync"),  # with half of a file written
        "move": (os, "replace"),  # just before a file gets its name
        "report": (evaluation, "draw_curves"),
    }[where]
    original, calls = getattr(owner, name), []

    def struck(*arguments, **options):
        calls.append(1)
        if len(calls) == nth:
            if where == "save":
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            # Ctrl-C and schedulers signal every process of a group.
            os.kill(os.getpid() if number == signal.SIGKILL else 0, number)
        return original(*arguments, **options)

    setattr(owner, name, struck)


# runs that tests share, and how they are compared


@pytest.fixture(scope="session")
def finished_run(forker, tmp_path_factory):
    """The out_dir of a tiny run that was never interrupted."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    forker.finish(*TINY, f"--out_dir={out_dir}")
    return out_dir


def same(a, b):
    """Whether two checkpoints' contents are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def assert_same_run(out_dir, twin):
    for name in ("last.pt", "best.pt"):
        ours, theirs = (load_checkpoint(str(folder / name)) for folder in (out_dir, twin))
        for key in ("model", "optimizer", "step", "best", "n_split"):
            assert same(ours[key], theirs[key]), (name, key)
    assert (out_dir / "log.jsonl").read_text() == (twin / "log.jsonl").read_text()


def log_rows(out_dir, split=""):
    rows = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if split in row["split"]]


# made-up data in the formats of the published files, and a server


def write_hashed(path, body):
    """Write bytes; their sha256."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(body)
    return hashlib.sha256(body).hexdigest()


def write_mnist(folder, n=20):
    """The four files of n random images: arrays by name, and the MNIST_FILES that match them."""
    rng = np.random.default_rng(0)
    arrays, hashes = {}, {}
    for prefix in ("train", "t10k"):
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(256, size=(n, 28, 28))
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(10, size=n)
    for name, array in arrays.items():
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        body = gzip.compress(header + array.astype(np.uint8).tobytes())
        hashes[name] = write_hashed(os.path.join(folder, f"{name}.gz"), body)
    return arrays, hashes


def photograph(width, height, mode="RGB", seed=0):
    """A smooth picture with a bright top left quarter."""
    y, x = np.mgrid[0:height, 0:width]
    rng = np.random.default_rng(seed)
    page = np.stack([x * 255 / width, y * 255 / height, rng.integers(60) + 0 * x], axis=2) / 2
    page[: height // 2, : width // 2] += 120
    return Image.fromarray(page.astype(np.uint8)).convert(mode)


def write_pictures(folder, n, size=(20, 20)):
    os.makedirs(folder)
    for i in range(n):
        photograph(*size, seed=i).save(folder / f"{i:02}.png")


def motion_frames(n, seed=0):
    """Made-up frames (n, 26): a root that walks in a circle, joints that swing in their range."""
    rng, t = np.random.default_rng(seed), np.arange(n)[:, None] / 30
    yaw = 0.7 * t + rng.uniform(-3, 3)
    root = np.concatenate([3 * np.cos(yaw), 3 * np.sin(yaw), 1 + 0.05 * np.sin(9 * t)], axis=1)
    q = np.concatenate([0.05 * np.sin(t), 0 * t, np.sin(yaw / 2), np.cos(yaw / 2)], axis=1)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    angles = 0.4 * np.sin(rng.uniform(1, 5, 19) * t + rng.uniform(0, 6, 19))
    return np.concatenate([root, q, angles], axis=1)


def motion_dataset(n_train=3, n_val=4, n=100):
    """Made-up clips of n frames; each training clip is a frame longer than the one before."""
    train = [motion_frames(n + i, seed=i) for i in range(n_train)]
    val = [motion_frames(n, seed=50 + i) for i in range(n_val)]
    return data.MotionDataset({"train": train, "val": val})


def write_lafan(data_dir, n=70):
    """The 40 files of n made-up frames: the data.LAFAN_FILES that match them."""
    hashes = {}
    for i, name in enumerate(data.LAFAN_FILES):
        text = motion.frames_to_csv(torch.from_numpy(motion_frames(n, i)))
        path = os.path.join(data_dir, "lafan1", "h1", f"{name}.csv")
        hashes[name] = write_hashed(path, text.encode())
    return hashes


if __name__ == "__main__":
    for name in ("torch._dynamo", "torch.nn.parallel", "build", "sampler", "vocabulary"):
        importlib.import_module(name)  # what train.py would import for itself
    for line in sys.stdin:
        children = [fork(*job) for job in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
