"""Faults on purpose: kills at random moments, full disks, processes that die or disagree.

A sample runs by default; all kills, over all methods and data sets, with

    DAPS_KILLS=50 python -m pytest tests/test_faults.py

Importing torch takes longer than a tiny run. So one process imports all that train.py needs and
forks for each run; a fault is code that the child executes before train.py.
"""

import contextlib
import glob
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import types
from textwrap import indent

import pytest
import torch
from conftest import ROOT, TINY, environment, start
from test_data import Server, write_mnist
from test_images import SMALL, photograph, write_cifar
from test_motion import motion, write_lafan
from test_train import assert_same_run, same

import data
from data import LAFAN_FILES, MNIST_FILES
from eval import METHODS, load_checkpoint

IMPORTS = """
import json, os, runpy, signal, sys, threading, time
import requests, torch, torch.nn.parallel
import data, eval
letters = data.glyphs(n_train=2000, n_val=48)
data.DATASETS["glyphs"] = lambda data_dir: letters
"""
FORKER = """
def fork(job):
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.alarm(300)  # a run that hangs is ended
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
        command = [sys.executable, "-c", IMPORTS + FORKER]
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

BEFORE = """
def before(owner, name):
    original = getattr(owner, name)
    def struck(*arguments, **options):
        strike()
        return original(*arguments, **options)
    setattr(owner, name, struck)
"""
STRIKE = """
calls = []
def blow():  # Ctrl-C and schedulers signal all processes of a group
    os.kill(0 if {number} in (2, 15) else os.getpid(), {number})

def strike():
    calls.append(1)
    if len(calls) == {nth}:
        timer = threading.Timer({delay}, blow)
        timer.daemon = True
        timer.run() if {delay} < 0.01 else timer.start()
"""
STRIKE += BEFORE
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
HOW_MANY |= {"statistics": 20, "features": 30, "download": 3}


def blow(place, rng, kill):
    """A signal at a random moment of one kind: its number, and the code for the child."""
    number = signal.SIGKILL if kill else rng.choice((signal.SIGTERM, signal.SIGINT))
    nth = rng.randint(1, HOW_MANY[place])
    delay = rng.choice((0.0, rng.uniform(0.01, 0.05)))
    delay *= place != "report"  # after which the run may be over
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
    settings += ["--max_steps=24", "--eval_interval=4", "--eval_examples=48", "--mc_samples=2"]
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

    def run(out_dir, report=False):
        data_dir = out_dir.with_suffix(".data") if server else folder
        place = f"data.CACHE_DIR = '{out_dir.with_suffix('.cache')}'\n{code}\n"
        place += "" if report else "eval.report = lambda *runs, **options: None\n"
        return ("train.py", *settings, f"--out_dir={out_dir}", f"--data_dir={data_dir}"), place

    yield run
    if server:
        server.server.shutdown()


ALL = int(os.environ.get("DAPS_KILLS", 0)) >= 50
SLOW = (pytest.mark.slow, pytest.mark.skipif(not ALL, reason="runs with DAPS_KILLS=50"))
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
        if not ALL and name in DATA_PLACES:
            places = places[1::4]
        marks = () if name in sample else SLOW
        label = f"{name}: {' '.join(places)}"
        found.append(pytest.param(*name.split(), places, marks=marks, id=label))
    return found


@pytest.mark.parametrize("where, method, places", cases(), indirect=["where"])
def test_a_run_struck_at_random_and_resumed_equals_one_that_was_not(
    forker, tmp_path, where, method, places
):
    report = "report" in places  # which takes its time
    (arguments, place), twin = where(tmp_path / "twin", report), tmp_path / "twin"
    forker.finish(*arguments[1:], f"--method={method}", fault=place)
    (arguments, place), out_dir = where(tmp_path / "run", report), tmp_path / "run"
    rng = random.Random(method)
    for i, name in enumerate(places):
        number, code = blow(name, rng, kill=i % 2 == 0)
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


# several processes


def ranks(*commands):
    """Jobs for processes that train together, from the arguments and the fault of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(len(commands)))
    return [
        (("train.py", *arguments), fault, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, (arguments, fault) in enumerate(commands)
    ]


@pytest.fixture(scope="module")
def finished_pair(forker, tmp_path_factory):
    """The out_dir of a run of two processes that was never interrupted."""
    out_dir = tmp_path_factory.mktemp("finished") / "pair"
    command = ((*TINY, f"--out_dir={out_dir}"), "")
    for done in forker.run(*ranks(command, command)):
        assert done.code == 0, done.errors
    return out_dir


@pytest.mark.parametrize(
    "dies, place, nth", [(1, "start", 1), (1, "step", 6), (0, "evaluation", 2)]
)
def test_when_a_process_dies_the_other_says_so_and_stops(
    forker, finished_pair, tmp_path, dies, place, nth
):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    commands = [(settings, ""), (settings, "")]
    strike = STRIKE.format(nth=nth, delay=0, number=int(signal.SIGKILL)) + PLACES[place]
    commands[dies] = (settings, strike)
    began = time.monotonic()
    both = forker.run(*ranks(*commands))
    assert time.monotonic() - began < 60
    assert both[dies].code == -signal.SIGKILL
    other = both[1 - dies]
    assert other.code == 1 and other.errors.count("\n") == 1, other.errors
    assert "another process of this run died" in other.errors and "--resume=True" in other.errors
    command = ((*settings, "--resume=True"), "")
    assert [done.code for done in forker.run(*ranks(command, command))] == [0, 0]
    assert_same_run(out_dir, finished_pair)


def test_a_signal_to_one_process_stops_all_after_the_same_step(forker, finished_pair, tmp_path):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    strike = STRIKE.format(nth=6, delay=0, number=int(signal.SIGTERM)) + PLACES["step"]
    both = forker.run(*ranks((settings, ""), (settings, strike)))
    assert [done.code for done in both] == [143, 143] and not both[1].errors
    assert "stopped at step 6" in both[0].output
    command = ((*settings, "--resume=True"), "")
    assert [done.code for done in forker.run(*ranks(command, command))] == [0, 0]
    assert_same_run(out_dir, finished_pair)


OTHER = "letters = data.glyphs(n_train={}, n_val=48, seed={})"
DISAGREE = {
    "lr": (("--lr=1e-3",), ""),
    "n_train": ((), OTHER.format(1999, 0)),
    "the content of the data": ((), OTHER.format(2000, 1)),
}


@pytest.mark.parametrize("key", DISAGREE)
def test_processes_that_disagree_stop_at_the_start(forker, tmp_path, key):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    more, fault = DISAGREE[key]
    for done in forker.run(*ranks((settings, ""), ((*settings, *more), fault))):
        assert done.code == 2 and f"the processes disagree on {key}: " in done.errors
        assert done.errors.count("\n") == 1, done.errors
    assert os.listdir(out_dir) == [".lock"]


def test_processes_without_the_checkpoint_are_told(forker, finished_pair, tmp_path):
    """As on a second machine that does not share out_dir."""
    settings = (*TINY, "--resume=True", "--max_steps=14")
    here, there = f"--out_dir={finished_pair}", f"--out_dir={tmp_path / 'none'}"
    for done in forker.run(*ranks(((*settings, here), ""), ((*settings, there), ""))):
        assert done.code == 2 and "disagree on the step of last.pt: 12 and 0" in done.errors


def test_data_agree_wherever_they_are_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    for folder, shift in (("a", 0), ("b", 0), ("c", 1)):
        os.makedirs(tmp_path / folder)
        for i in range(4):
            photograph(20, 20, seed=i).save(tmp_path / folder / f"{i + shift}.png")
    a, b, c = (data.imagenet(str(tmp_path / f), image_size=16).summary() for f in "abc")
    key = "the content of the data"
    assert a[key] == b[key] != c[key]
    assert torch.equal(a["the mean of x"], b["the mean of x"])
    assert motion(n=100).summary().keys() == a.keys()


def test_restarts_without_resume_are_refused(forker, tmp_path):
    settings = (*TINY, f"--out_dir={tmp_path / 'run'}")
    done = forker.train(*settings, TORCHELASTIC_MAX_RESTARTS="3")
    assert done.code == 2 and "add --resume=True" in done.errors
    assert not (tmp_path / "run").exists()


READER = """
import multiprocessing
main = os.getpid()
def strike():
    if os.getpid() == main:
        for reader in multiprocessing.active_children():
            reader.kill()
            time.sleep(0.5)  # it surfaces here
"""
READER += BEFORE


@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
@pytest.mark.parametrize("place", ("step", "save"))
def test_when_a_reader_of_images_dies_the_run_says_so_and_can_be_resumed(
    forker, tmp_path, where, place
):
    arguments, code = where(tmp_path / "run")
    done = forker.train(*arguments[1:], fault=code + READER + PLACES[place])
    assert done.code == 1 and done.errors.count("\n") == 1, done.errors
    assert done.errors.startswith("error: a process that reads images died")
    output = forker.finish(*arguments[1:], "--resume=True", fault=code).output
    assert "resumed at the start" in output


def launch(out_dir, *options, fault="", settings=()):
    """Start torchrun, of a tiny run with a fault."""
    script = f"import sys\nsys.path.insert(0, {ROOT!r})\n{IMPORTS}\n{fault}\n"
    script += "runpy.run_path('train.py', run_name='__main__')\n"
    out_dir.with_suffix(".py").write_text(script)
    run = (out_dir.with_suffix(".py"), *TINY, *settings, f"--out_dir={out_dir}")
    return start("-m", "torch.distributed.run", *options, *run)


ONCE = "if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':\n"


def test_torchrun_restarts_a_run_while_another_goes_on_beside_it(finished_pair, tmp_path):
    """Two jobs on one machine, in the two ways to keep them apart."""
    kill = STRIKE.format(nth=6, delay=0, number=int(signal.SIGKILL)) + PLACES["step"]
    kill, resume = ONCE + indent(kill, "    "), ["--resume=True"]
    first = ("--standalone", "--nproc_per_node=2", "--max_restarts=1")
    second = ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nproc_per_node=2")
    out_dirs = tmp_path / "first", tmp_path / "second"
    jobs = [
        launch(out_dirs[0], *first, fault=kill, settings=resume),
        launch(out_dirs[1], *second),
    ]
    for job, out_dir in zip(jobs, out_dirs, strict=True):
        output, errors = job.communicate(timeout=200)
        assert job.returncode == 0, errors
        assert ("resumed at step 4" in output) == (out_dir == out_dirs[0])
        assert_same_run(out_dir, finished_pair)


def test_two_machines_train_as_two_processes_do(finished_pair, tmp_path):
    """Two agents of torchrun on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"--rdzv_endpoint=localhost:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=7", place)
    out_dir = tmp_path / "run"
    jobs = [launch(out_dir, *options) for _ in range(2)]
    texts = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], texts
    assert sum("8 for each of 2 processes" in output for output, _ in texts) == 1
    assert_same_run(out_dir, finished_pair)


@pytest.mark.parametrize(
    "place, path", [("start", ".lock"), ("step", "last.pt"), ("report", "eval.json")]
)
def test_two_runs_never_write_to_one_folder(forker, finished_twin, tmp_path, place, path):
    """Whether the first has got as far as reading its data, a checkpoint, or the last pictures."""
    settings, path = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run" / path
    seconds = 0.3 if place == "step" else 4
    slow = STRIKE.format(nth=0, delay=0, number=0) + f"strike = lambda: time.sleep({seconds})\n"
    late = f"while not os.path.exists('{path}'): time.sleep(0.01)\n"
    jobs = [(("train.py", *settings), slow + PLACES[place], {})]
    jobs += [
        (("train.py", *settings, f"--{key}=True"), late, {}) for key in ("resume", "overwrite")
    ]
    first, *others = forker.run(*jobs)
    assert first.code == 0, first.errors
    assert_same_run(tmp_path / "run", finished_twin)
    for other in others:
        assert other.code == 2 and "is in use: another process is training there" in other.errors


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the /proc of Linux")
@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
def test_readers_of_images_go_when_their_run_is_killed(forker, tmp_path, where):
    arguments, code = where(tmp_path / "run")
    code += STRIKE.format(nth=3, delay=0, number=int(signal.SIGKILL)) + PLACES["step"]
    code += """
import multiprocessing
kill = blow
def blow():
    print(f"\\n{os.getpid()} {len(multiprocessing.active_children())}", flush=True)
    kill()
"""
    done = forker.train(*arguments[1:], "--n_workers=2", fault=code)
    assert done.code == -signal.SIGKILL
    session, n_readers = map(int, done.output.splitlines()[-1].split())
    assert n_readers == 2
    patience = time.monotonic() + 30
    while processes_of(session) and time.monotonic() < patience:
        time.sleep(0.1)
    assert not processes_of(session)


def processes_of(session):
    found = []
    for place in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getsid(int(os.path.basename(place))) == session:
                found.append(place)
    return found


# the same answer twice


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in ("daps", "vqvae") else SLOW) for m in METHODS]
)
def test_a_run_depends_on_its_seed_and_not_on_how_often_it_is_looked_at(forker, tmp_path, method):
    settings = (*TINY, "--max_steps=6", "--mc_samples=2", "--fsq_levels=8 4", f"--method={method}")
    runs = {
        "once": ("--eval_interval=6",),
        "again": ("--eval_interval=6",),
        "seldom": ("--eval_interval=6", "--log_interval=4"),
        "often": ("--eval_interval=1", "--log_interval=2"),
        "other": ("--eval_interval=6", "--seed=1"),
    }
    jobs = [
        (("train.py", *settings, *more, f"--out_dir={tmp_path / name}"), "", {})
        for name, more in runs.items()
    ]
    for done in forker.run(*jobs):
        assert done.code == 0, done.errors
    assert_same_run(tmp_path / "again", tmp_path / "once")
    once, *others, other = (load_checkpoint(tmp_path / name / "last.pt") for name in runs)
    for key in ("model", "optimizer"):
        assert all(same(found[key], once[key]) for found in others)
        assert not same(other[key], once[key])
    rows = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in runs]
    assert {line for line in rows[3] if '"step": 6' in line} == set(rows[0][-2:])
    assert set(rows[2]) < set(rows[0]) and not set(rows[4]) & set(rows[0])


@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
def test_results_do_not_depend_on_who_reads_the_images_nor_change_with_the_reading(
    forker, tmp_path, where
):
    names = ("0", "1", "3")
    arguments, code = where(tmp_path / "run", report=True)
    more = [("--max_steps=4", f"--n_workers={n}", f"--out_dir={tmp_path / n}") for n in names]
    for done in forker.run(*[((*arguments, *words), code, {}) for words in more]):
        assert done.code == 0, done.errors
    for n in names[1:]:
        assert_same_run(tmp_path / n, tmp_path / "0")
    answers = []
    for n in names:
        (done,) = forker.run((("eval.py", tmp_path / "0", f"--n_workers={n}"), code, {}))
        assert done.code == 0, done.errors
        pictures = [path.read_bytes() for path in sorted((tmp_path / "0").glob("*.png"))]
        answers.append((done.output, (tmp_path / "0" / "eval.json").read_text(), pictures))
    assert answers[0] == answers[1] == answers[2] and len(pictures) == 4
