"""Faults on purpose: kills at random moments, full disks, processes that die or disagree.

A sample runs by default; all kills, over all methods and data sets, with

    DAPS_KILLS=50 python -m pytest tests/test_faults.py

Importing torch takes longer than a tiny run. So one process imports all that train.py needs and
forks for each run; a fault is code that the child executes before train.py.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import types

import pytest
from conftest import ROOT, TINY, environment
from test_data import Server, write_mnist
from test_images import SMALL, photograph, write_cifar
from test_motion import write_lafan
from test_train import assert_same_run

import data
from data import LAFAN_FILES, MNIST_FILES
from eval import METHODS, load_checkpoint

FORKER = """
import json, os, runpy, signal, sys, threading, time
import requests, torch, torch.nn.parallel
import data, eval
letters = data.glyphs(n_train=2000, n_val=300)  # drawn once for all children
data.DATASETS["glyphs"] = lambda data_dir: letters

def fork(job):
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.alarm(120)  # a run that hangs is ended
    os.environ.update(job["env"])
    for number, name in enumerate((os.devnull, job["output"], job["errors"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    exec(job["fault"], globals())
    sys.argv = job["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

for line in sys.stdin:
    children = [fork(job) for job in json.loads(line)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""


class Forker:
    def __init__(self, folder):
        self.folder = folder
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", FORKER]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True, stdin=pipe, stdout=pipe
        )

    def run(self, *jobs):
        """Run jobs (argv, fault, env) at once: for each its exit code and what it wrote."""
        jobs = [
            dict(
                argv=[*map(str, argv)],
                fault=fault,
                env=env,
                output=str(self.folder / f"output{i}"),
                errors=str(self.folder / f"errors{i}"),
            )
            for i, (argv, fault, env) in enumerate(jobs)
        ]
        print(json.dumps(jobs), file=self.process.stdin, flush=True)
        codes = json.loads(self.process.stdout.readline())
        results = []
        for code, job in zip(codes, jobs, strict=True):
            texts = []
            for name in ("output", "errors"):
                with open(job[name], errors="replace") as file:
                    texts.append(file.read())
            results.append(types.SimpleNamespace(code=code, output=texts[0], errors=texts[1]))
        return results

    def train(self, *arguments, fault="", **env):
        (done,) = self.run((("train.py", *arguments), fault, env))
        return done

    def finish(self, *arguments, fault=""):
        done = self.train(*arguments, fault=fault)
        assert done.code == 0, done.output + done.errors
        return done


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("forker"))
    yield forker
    forker.process.stdin.close()
    forker.process.wait()


# Where a signal strikes: code that calls strike() at moments of one kind. Of these the nth counts,
# and the signal comes then or, as a random delay decides, a little later.

STRIKE = """
calls = []
def strike():
    calls.append(1)
    if len(calls) == {nth}:
        timer = threading.Timer({delay}, os.kill, (os.getpid(), {number}))
        timer.daemon = True
        timer.run() if {delay} < 0.01 else timer.start()

def before(owner, name):
    original = getattr(owner, name)
    def struck(*arguments, **options):
        strike()
        return original(*arguments, **options)
    setattr(owner, name, struck)
"""
PLACES = {
    "start": "before(data, 'load_dataset')",
    "step": "before(torch.optim.AdamW, 'step')",
    "evaluation": "before(eval, 'validation_noise')",
    "move": "before(os, 'replace')",
    "report": "before(eval, 'draw_curves')",
    "statistics": "before(data, 'read_image')",
    "features": "before(data, 'motion_features')",
    "download": """
blocks = requests.Response.iter_content
def struck_blocks(*arguments):
    for block in blocks(*arguments):
        strike()
        yield block[:100]
        yield block[100:]
requests.Response.iter_content = struck_blocks
""",
    "save": """
import io
whole_save = torch.save
def save(state, file):
    if isinstance(file, str):
        return whole_save(state, file)
    buffer = io.BytesIO()
    whole_save(state, buffer)
    half = len(buffer.getvalue()) // 2
    file.write(buffer.getvalue()[:half])
    file.flush()
    strike()
    file.write(buffer.getvalue()[half:])
torch.save = save
""",
}
HOW_MANY = {"start": 1, "step": 6, "evaluation": 2, "move": 6, "report": 1, "save": 4}
HOW_MANY |= {"statistics": 20, "features": 40, "download": 20}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def blow(place, rng):
    """A signal at a random moment of one kind: its number, and the code for the child."""
    number, nth = rng.choice(SIGNALS), rng.randint(1, HOW_MANY[place])
    delay = rng.choice((0.0, rng.uniform(0.01, 0.05)))
    return number, STRIKE.format(nth=nth, delay=delay, number=int(number)) + PLACES[place]


def assert_stopped(done, number):
    """By SIGKILL at once; by other signals with a line that says how to go on."""
    shown = done.output + done.errors
    if number == signal.SIGKILL:
        assert done.code == -signal.SIGKILL, shown
    else:
        assert done.code == 128 + number, shown
        line = done.output.splitlines()[-1]
        assert line.startswith("stopped") and "the same command" in line, shown
        assert "Traceback" not in done.errors


# the data sets, made up, and the code that has train.py find them


def served(folder, names, variables):
    """Files on a server, and code that makes it the one they are downloaded from."""
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
    hashes = {n: hashlib.sha256(files[f"/{n}{names[n]}"]).hexdigest() for n in names}
    server = Server(files)
    return server, variables.format(url=f"{server.url}/", hashes=hashes)


@pytest.fixture
def where(request, tmp_path):
    """For a data set: settings of a tiny run; code that has a run find its data, or fetch them from
    a server on this machine, and keep what it computes to itself."""
    name, server, code, folder = request.param, None, "", tmp_path / "data"
    settings = [f"--dataset={name}", *(TINY if name in ("glyphs", "mnist") else SMALL)]
    settings += ["--max_steps=24", "--eval_interval=4", "--mc_samples=2"]
    settings += ["--fsq_levels=8 4" if name in ("glyphs", "mnist") else "--fsq_levels=4 4"]
    if name == "mnist":
        write_mnist(tmp_path / "made", n=300)
        variables = "data.MNIST_MIRRORS, data.MNIST_FILES = ['{url}'], {hashes}"
        server, code = served(tmp_path / "made", dict.fromkeys(MNIST_FILES, ".gz"), variables)
    elif name == "lafan":
        write_lafan(tmp_path)
        variables = "data.LAFAN_URL, data.LAFAN_FILES = '{url}', {hashes}"
        made = tmp_path / "lafan1" / "h1"
        server, code = served(made, dict.fromkeys(LAFAN_FILES, ".csv"), variables)
        settings += ["--n_tokens=64", "--batch_size=4", "--decoder_layers=1"]
    elif name == "cifar10":
        write_cifar(folder / "cifar10" / "cifar-10-batches-bin", n=20)
    elif name == "imagenet":
        os.makedirs(folder)
        for i in range(30):
            photograph(48, 40, seed=i).save(folder / f"{i:02}.png")
        settings += ["--image_size=32", "--n_workers=1"]

    def run(out_dir):
        data_dir = out_dir.with_suffix(".data") if server else folder
        place = f"data.CACHE_DIR = '{out_dir.with_suffix('.cache')}'\n{code}\n"
        return ("train.py", *settings, f"--out_dir={out_dir}", f"--data_dir={data_dir}"), place

    yield run
    if server:
        server.server.shutdown()


KILLS = int(os.environ.get("DAPS_KILLS", 10))
DATA_PLACES = {
    "mnist daps": "download download step evaluation move save",
    "cifar10 daps_na": "start save step evaluation save report",
    "imagenet vqvae": "statistics statistics step save move evaluation",
    "lafan fsq": "download features features start save step",
}


def cases():
    """Which run is struck where: all 50 blows, or two for each data set."""
    found, sample, rng = [], ["glyphs vqvae", *DATA_PLACES], random.Random(0)
    for name in [*(f"glyphs {method}" for method in METHODS), *DATA_PLACES]:
        places = DATA_PLACES.get(name, " ".join(rng.choices(("step", "save", "move"), k=2))).split()
        if KILLS < 50 and name in DATA_PLACES:
            places = places[1::4]
        skip = pytest.mark.skipif(KILLS < 50, reason="runs with DAPS_KILLS=50")
        marks = () if name in sample else (pytest.mark.slow, skip)
        label = f"{name}: {' '.join(places)}"
        found.append(pytest.param(*name.split(), places, marks=marks, id=label))
    return found


@pytest.mark.parametrize("where, method, places", cases(), indirect=["where"])
def test_a_run_struck_at_random_and_resumed_equals_one_that_was_not(
    forker, tmp_path, where, method, places
):
    (arguments, place), twin = where(tmp_path / "twin"), tmp_path / "twin"
    forker.finish(*arguments[1:], f"--method={method}", fault=place)
    (arguments, place), out_dir = where(tmp_path / "run"), tmp_path / "run"
    rng = random.Random(method)
    for i, name in enumerate(places):
        number, code = blow(name, rng)
        resume = f"--resume={i > 0}"
        done = forker.train(*arguments[1:], f"--method={method}", resume, fault=place + code)
        assert_stopped(done, number)
    forker.finish(*arguments[1:], f"--method={method}", "--resume=True", fault=place)
    assert_same_run(out_dir, twin)
    assert sorted(os.listdir(out_dir)) == sorted(os.listdir(twin))


# disks that fill up: files may not grow beyond a size, from some moment on

LIMIT = """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

step, steps = torch.optim.AdamW.step, []
def limited_step(*arguments, **options):
    steps.append(1)
    if len(steps) == 6:
        limit({size})
    return step(*arguments, **options)
torch.optim.AdamW.step = limited_step
"""


@pytest.mark.parametrize(
    "name, size",
    [("best.pt", "100_000"), ("log.jsonl", "os.path.getsize('{out_dir}/log.jsonl') + 40")],
)
def test_a_full_disk_leaves_what_was_there_and_says_so(forker, finished_twin, tmp_path, name, size):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    fault = LIMIT.format(size=size.format(out_dir=out_dir))
    done = forker.train(*settings, fault=fault)
    assert done.code == 2 and done.errors.count("\n") == 1, done.errors
    for words in (name, "could not be written (", "File too large", "--resume=True"):
        assert words in done.errors
    assert load_checkpoint(out_dir / "last.pt")["step"] == 4
    assert (name == "log.jsonl") == (not (out_dir / "log.jsonl").read_text().endswith("\n"))  # torn
    forker.finish(*settings, "--resume=True")
    assert_same_run(out_dir, finished_twin)


@pytest.fixture(scope="module")
def finished_twin(forker, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("finished") / "twin"
    forker.finish(*TINY, f"--out_dir={out_dir}")
    return out_dir


def test_a_report_that_cannot_be_written_is_made_later(forker, tmp_path):
    settings = (*TINY, "--max_steps=2", f"--out_dir={tmp_path / 'run'}")
    code = LIMIT.format(size=0) + "draw = eval.draw_samples\n"
    code += "eval.draw_samples = lambda *arguments: (limit(1000), draw(*arguments))[1]\n"
    done = forker.train(*settings, fault=code)
    assert done.code == 2 and done.errors.count("\n") == 1, done.errors
    assert "File too large" in done.errors and "--resume=True" in done.errors
    assert "codes used" in forker.finish(*settings, "--resume=True").output


@pytest.mark.parametrize("where", ("imagenet", "lafan"), indirect=True)
def test_what_cannot_be_kept_for_next_time_is_computed_again(forker, tmp_path, where):
    """Statistics of images and features of motion go to a cache, on a disk that is full."""
    arguments, place = where(tmp_path / "run")
    full = LIMIT.format(size=0) + "write = data.write_whole\n"
    full += "data.write_whole = lambda *what: (limit(50), write(*what), limit(1 << 40))\n"
    for resume in (False, True):
        forker.finish(*arguments[1:], f"--resume={resume}", "--max_steps=2", fault=place + full)
        assert not list((tmp_path / "run.cache").iterdir())


@pytest.mark.parametrize("where", ["mnist"], indirect=True)
def test_a_download_onto_a_full_disk_is_refused_and_leaves_nothing(forker, tmp_path, where):
    arguments, place = where(tmp_path / "run")
    full = LIMIT.format(size=0) + "limit(70_000)\n"
    done = forker.train(*arguments[1:], fault=place + full)
    assert done.code == 2 and "cannot be written (File too large)" in done.errors.splitlines()[-1]
    assert not list((tmp_path / "run.data" / "mnist").iterdir())


def test_a_table_that_cannot_be_written_leaves_the_one_before(forker, finished_twin):
    before = (finished_twin / "eval.json").read_bytes()
    code = LIMIT.format(size=0) + "limit(100)\n"
    (done,) = forker.run((("eval.py", finished_twin), code, {}))
    assert done.code == 2 and "File too large" in done.errors
    assert (finished_twin / "eval.json").read_bytes() == before


# what a power cut or a kill leaves behind


FSYNC = """
fsync = os.fsync
def told_fsync(number):
    print("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{number}")), flush=True)
    fsync(number)
os.fsync = told_fsync
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the /proc of Linux")
def test_the_log_is_on_the_disk_before_the_checkpoint_it_belongs_to(forker, tmp_path):
    settings = (*TINY, "--max_steps=1", f"--out_dir={tmp_path / 'run'}")
    output = forker.finish(*settings, fault=FSYNC).output.splitlines()
    order = [line.split()[1] for line in output if line.startswith("fsync")]
    assert order[-4:] == ["log.jsonl", "best.pt.tmp", "log.jsonl", "last.pt.tmp"]


def test_a_signal_while_a_cache_is_written_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(part, path):
        assert os.path.exists(part)
        sys.exit(143)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(SystemExit):
        data.write_whole(str(tmp_path / "cache.json"), "{}")
    assert not os.listdir(tmp_path)


def test_parts_that_killed_processes_left_are_removed_an_hour_later(tmp_path):
    (tmp_path / "x.gz.1234.part").write_text("long ago")
    (tmp_path / "x.gz.5678.part").write_text("by a process that is at it")
    (tmp_path / "other.gz.1234.part").write_text("not ours")
    for name in ("x.gz.1234.part", "other.gz.1234.part"):
        os.utime(tmp_path / name, (time.time() - 4000,) * 2)
    names = {data.part_of(str(tmp_path / "x.gz")) for _ in range(100)}
    assert len(names) == 100  # also for machines that share a folder and number processes alike
    assert sorted(os.listdir(tmp_path)) == ["other.gz.1234.part", "x.gz.5678.part"]


@pytest.mark.parametrize("where", ["mnist"], indirect=True)
def test_a_download_is_on_the_disk_before_it_gets_its_name(forker, tmp_path, where):
    arguments, place = where(tmp_path / "run")
    fault = place + FSYNC + STRIKE.format(nth=1, delay=0, number=9) + PLACES["move"]
    done = forker.train(*arguments[1:], fault=fault)
    assert done.code == -signal.SIGKILL
    assert done.output.startswith("fsync train-images-idx3-ubyte.gz.")
    (part,) = (tmp_path / "run.data" / "mnist").iterdir()
    assert part.read_bytes() == (tmp_path / "made" / "train-images-idx3-ubyte.gz").read_bytes()
