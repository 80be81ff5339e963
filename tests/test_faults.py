"""Faults on purpose: kills, full disks, processes that die or disagree.

Three kills, a full disk and a fault of each kind run by default; kills at random moments over all
methods and data sets, and the rest, run with

    python -m pytest -m stress
"""

import contextlib
import glob
import os
import random
import signal
import socket
import time
from textwrap import indent

import pytest
import torch
from conftest import (
    BEFORE,
    PATIENCE,
    SMALL,
    TINY,
    TORCHRUN,
    WHERE,
    Server,
    assert_one_line,
    assert_same_run,
    launch,
    motion_dataset,
    photograph,
    same,
    struck,
    write_cifar,
    write_lafan,
    write_mnist,
)

import data
from checkpoint import load_checkpoint
from models import METHODS

stress = pytest.mark.stress


def test_a_run_killed_three_times_and_resumed_equals_one_that_was_not(
    forker, finished_twin, tmp_path
):
    """In a step, with a checkpoint half written, and just before it is moved into place."""
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    for i, (where, nth) in enumerate((("step", 6), ("save", 3), ("move", 3))):  # 1, 2: log, config
        done = forker.train(*settings, f"--resume={i > 0}", fault=struck(where, nth))
        assert done.code == -signal.SIGKILL, done.errors
        assert len(list(out_dir.glob("*.part"))) == (where != "step")
        assert load_checkpoint(out_dir / "last.pt")["step"] == 4
    assert "resumed at step 4" in forker.finish(*settings, "--resume=True")
    assert_same_run(out_dir, finished_twin)
    assert not list(out_dir.glob("*.part"))


# made-up data sets, and the code that makes scripts find them


@pytest.fixture
def where(request, tmp_path):
    """For a data set: settings of a tiny run; code that makes a run find its data, or download them
    from a server on this machine, with a cache of its own."""
    name, server, code, folder = request.param, None, "", tmp_path / "data"
    settings = [f"--dataset={name}", *(TINY if name in ("glyphs", "mnist") else SMALL)]
    settings += ["--max_steps=24", "--eval_interval=4", "--eval_examples=48", "--mc_samples=2"]
    settings += ["--fsq_levels=8 4" if name in ("glyphs", "mnist") else "--fsq_levels=4 4"]
    if name == "mnist":
        _, hashes = write_mnist(tmp_path / "made", n=300)
        server = Server(
            {f"/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
        )
        code = f"data.MNIST_MIRRORS, data.MNIST_FILES = ['{server.url}/'], {hashes}\n"
    elif name == "lafan":
        hashes = write_lafan(tmp_path)
        made = (tmp_path / "lafan1" / "h1").iterdir()
        server = Server({f"/{path.name}": path.read_bytes() for path in made})
        code = f"motion.LAFAN_URL, motion.LAFAN_FILES = '{server.url}/', {hashes}\n"
        settings += ["--n_tokens=64", "--batch_size=4", "--decoder_layers=1", "--n_workers=0"]
    elif name == "cifar10":
        _, hashes = write_cifar(folder / "cifar10" / data.CIFAR10_FOLDER, n=20)
        code = f"data.CIFAR10_FILES = {hashes}\n"
    elif name == "imagenet":
        os.makedirs(folder)
        for i in range(30):
            photograph(48, 40, seed=i).save(folder / f"{i:02}.png")
        settings += ["--image_size=32", "--n_workers=1"]

    def run(out_dir, report=False):
        data_dir = out_dir.with_suffix(".data") if server else folder
        found = f"{code}data.CACHE_DIR = '{out_dir.with_suffix('.cache')}'\n"
        found += "" if report else "eval.report = lambda *runs, **options: None\n"
        return (*settings, f"--out_dir={out_dir}", f"--data_dir={data_dir}"), found

    yield run
    if server:
        server.stop()


# signals at random moments

HOW_MANY = {"start": 1, "step": 6, "evaluation": 2, "move": 6, "report": 1, "save": 6}
HOW_MANY |= {"statistics": 20, "features": 30, "download": 3}
MOMENTS = {
    "mnist daps": "download download step evaluation move save",
    "cifar10 daps_na": "start save step evaluation save report",
    "imagenet vqvae": "statistics statistics step save move evaluation",
    "lafan fsq": "download features features start save step",
}
for method in METHODS:
    chosen = random.Random(method).choices(("step", "save", "move"), k=2)
    MOMENTS[f"glyphs {method}"] = " ".join(chosen)
CASES = [pytest.param(*name.split(), MOMENTS[name].split(), id=name) for name in MOMENTS]


def random_strike(moment, rng, kill):
    """A signal at a random moment of one kind: its number, and the code for the child."""
    number = signal.SIGKILL if kill else rng.choice((signal.SIGTERM, signal.SIGINT))
    delay = rng.choice((0.0, rng.uniform(0.01, 0.05)))
    delay *= moment != "report"  # after which the run may be over
    return number, struck(moment, rng.randint(1, HOW_MANY[moment]), number, delay)


def assert_stopped(done, number):
    """By SIGKILL at once; by other signals with a line that says how to continue."""
    shown = done.output + done.errors
    if number == signal.SIGKILL:
        assert done.code == -signal.SIGKILL, shown
    else:
        assert done.code == 128 + number, shown
        line = done.output.splitlines()[-1]
        assert line.startswith("stopped") and "the same command" in line, shown
        assert "Traceback" not in done.errors


@stress
@pytest.mark.parametrize("where, method, moments", CASES, indirect=["where"])
def test_a_run_struck_at_random_and_resumed_equals_one_that_was_not(
    forker, tmp_path, where, method, moments
):
    report = "report" in moments  # which takes its time
    (settings, found), twin = where(tmp_path / "twin", report), tmp_path / "twin"
    forker.finish(*settings, f"--method={method}", fault=found)
    (settings, found), out_dir = where(tmp_path / "run", report), tmp_path / "run"
    settings, rng = (*settings, f"--method={method}"), random.Random(method)
    for i, moment in enumerate(moments):
        number, code = random_strike(moment, rng, kill=i % 2 == 0)
        done = forker.train(*settings, f"--resume={i > 0}", fault=found + code)
        assert_stopped(done, number)
    forker.finish(*settings, "--resume=True", fault=found)
    assert_same_run(out_dir, twin)
    assert sorted(os.listdir(out_dir)) == sorted(os.listdir(twin))


# disks that fill up: files may not grow beyond a size, from some moment on

LIMIT = """
import resource
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""
LIMITED_STEP = """
step, steps = torch.optim.AdamW.step, []
def limited_step(*arguments, **options):
    steps.append(1)
    if len(steps) == 6:
        limit({size})
    return step(*arguments, **options)
torch.optim.AdamW.step = limited_step
"""
LIMITED_WRITE = """
whole = checkpoint.write
def write(*what):
    limit(100)
    try:
        whole(*what)
    finally:
        limit(resource.RLIM_INFINITY)
checkpoint.write = write
"""
LOG_SIZE = "os.path.getsize('{out_dir}/log.jsonl') + 40"


@pytest.mark.parametrize(
    "name, size", [("best.pt", "100_000"), pytest.param("log.jsonl", LOG_SIZE, marks=stress)]
)
def test_a_full_disk_leaves_what_was_there_and_says_so(forker, finished_twin, tmp_path, name, size):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    fault = LIMIT + LIMITED_STEP.format(size=size.format(out_dir=out_dir))
    done = forker.train(*settings, fault=fault)
    assert_one_line(done, name, "could not be written (File too large)", "--resume=True")
    assert load_checkpoint(out_dir / "last.pt")["step"] == 4
    torn = not (out_dir / "log.jsonl").read_text().endswith("\n")
    assert torn == (name == "log.jsonl")
    assert not list(out_dir.glob("*.part"))  # its disk space is freed
    forker.finish(*settings, "--resume=True")
    assert_same_run(out_dir, finished_twin)


@stress
def test_a_report_that_cannot_be_written_is_made_later(forker, tmp_path):
    settings = (*TINY, "--max_steps=2", f"--out_dir={tmp_path / 'run'}")
    code = LIMIT + "draw = eval.draw_pictures\n"
    code += "eval.draw_pictures = lambda *arguments: (limit(1000), draw(*arguments))[1]\n"
    assert_one_line(forker.train(*settings, fault=code), "File too large", "--resume=True")
    assert "values used" in forker.finish(*settings, "--resume=True")


@stress
@pytest.mark.parametrize("where", ("imagenet", "lafan"), indirect=True)
def test_what_cannot_be_kept_for_next_time_is_computed_again(forker, tmp_path, where):
    """Statistics of images and features of motion go to a cache on a full disk."""
    settings, found = where(tmp_path / "run")
    full = (
        LIMIT
        + """
whole = data.write
def write(path, content):
    limit(50 if ".cache/" in path else 1 << 40)
    try:
        whole(path, content)
    finally:
        limit(1 << 40)
data.write = write
"""
    )
    for resume in (False, True):
        forker.finish(*settings, f"--resume={resume}", "--max_steps=2", fault=found + full)
        assert not list((tmp_path / "run.cache").iterdir())


@stress
@pytest.mark.parametrize("where", ["mnist"], indirect=True)
def test_a_download_onto_a_full_disk_is_refused_and_leaves_nothing(forker, tmp_path, where):
    settings, found = where(tmp_path / "run")
    done = forker.train(*settings, fault=found + LIMIT + "limit(70_000)\n")
    assert_one_line(done, "train-images-idx3-ubyte.gz could not be written (File too large)")
    assert not list((tmp_path / "run.data" / "mnist").iterdir())


@stress
def test_a_table_that_cannot_be_written_leaves_the_one_before(forker, finished_twin):
    before = (finished_twin / "eval.json").read_bytes()
    (done,) = forker.run((("eval.py", finished_twin), LIMIT + LIMITED_WRITE, {}))
    assert_one_line(done, "eval.json could not be written (File too large)")
    assert (finished_twin / "eval.json").read_bytes() == before


# a power cut

FSYNC = """
fsync = os.fsync
def told_fsync(number):
    print("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{number}")), flush=True)
    fsync(number)
os.fsync = told_fsync
"""


@stress
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the /proc of Linux")
def test_the_log_is_on_the_disk_before_the_checkpoint_it_belongs_to(forker, tmp_path):
    settings = (*TINY, "--max_steps=1", f"--out_dir={tmp_path / 'run'}")
    code = FSYNC + "eval.report = lambda *runs, **options: None\n"
    output = forker.finish(*settings, fault=code).splitlines()
    order = [line.split()[1] for line in output if line.startswith("fsync")]
    order = [".".join(name.split(".")[:2]) for name in order]  # without .<random>.part
    assert order == ["log.jsonl", "config.json", "log.jsonl", "best.pt", "log.jsonl", "last.pt"]


# several processes


@pytest.mark.parametrize(
    "dies, moment, nth",
    [
        (1, "step", 6),
        pytest.param(1, "start", 1, marks=stress),
        pytest.param(0, "evaluation", 2, marks=stress),
    ],
)
def test_when_a_process_dies_the_other_says_so_and_stops(
    forker, finished_pair, tmp_path, dies, moment, nth
):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    commands = [(settings, ""), (settings, "")]
    commands[dies] = (settings, struck(moment, nth))
    both = forker.ranks(*commands)
    assert both[dies].code == -signal.SIGKILL
    assert_one_line(both[1 - dies], "another process of this run died", "--resume=True")
    assert both[1 - dies].errors.startswith("error: " if dies else "error (rank 1): ")
    forker.finish_ranks(*settings, "--resume=True")
    assert_same_run(out_dir, finished_pair)


def test_a_signal_to_one_process_stops_all_after_the_same_step(forker, finished_pair, tmp_path):
    settings, out_dir = (*TINY, f"--out_dir={tmp_path / 'run'}"), tmp_path / "run"
    both = forker.ranks((settings, ""), (settings, struck("step", 6, signal.SIGTERM)))
    assert [done.code for done in both] == [143, 143] and not both[1].errors
    assert "stopped; at step 6" in both[0].output
    forker.finish_ranks(*settings, "--resume=True")
    assert_same_run(out_dir, finished_pair)


OTHER = "letters = data.glyphs(n_train={}, n_val=48, seed={})"
DISAGREE = {
    "lr": (("--lr=1e-3",), ""),
    "n_train": ((), OTHER.format(1999, 0)),
    "the content of the data": ((), OTHER.format(2000, 1)),
}


@pytest.mark.parametrize(
    "key", ["lr", *(pytest.param(key, marks=stress) for key in list(DISAGREE)[1:])]
)
def test_processes_that_disagree_stop_at_the_start(forker, tmp_path, key):
    settings, (more, fault) = (*TINY, f"--out_dir={tmp_path / 'run'}"), DISAGREE[key]
    for done in forker.ranks((settings, ""), ((*settings, *more), fault)):
        assert_one_line(done, f"the processes disagree on {key}: ")
    assert os.listdir(tmp_path / "run") == [".lock"]


@stress
def test_processes_without_the_checkpoint_are_told(forker, finished_pair, tmp_path):
    """As on a second machine that does not share out_dir."""
    settings = (*TINY, "--resume=True", "--max_steps=14")
    here, there = f"--out_dir={finished_pair}", f"--out_dir={tmp_path / 'none'}"
    for done in forker.ranks(((*settings, here), ""), ((*settings, there), "")):
        assert_one_line(done, "disagree on the step of last.pt: 12 and 0")


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
    assert motion_dataset(n=100).summary().keys() == a.keys()


ONCE = "if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':\n"


@stress
def test_torchrun_restarts_a_run_while_another_goes_on_beside_it(finished_pair, tmp_path):
    """Two jobs on one machine, in the two ways to keep them apart."""
    kill, out_dirs = ONCE + indent(struck("step", 6), "    "), (tmp_path / "1", tmp_path / "2")
    first = (*TORCHRUN, "--max_restarts=1")
    second = (*TORCHRUN[:2], "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", TORCHRUN[-1])
    arguments = [(*TINY, f"--out_dir={out_dir}") for out_dir in out_dirs]
    resume = (*arguments[0], "--resume=True")
    jobs = [
        launch(tmp_path / "1.py", *first, arguments=resume, fault=kill),
        launch(tmp_path / "2.py", *second, arguments=arguments[1]),
    ]
    for job, out_dir in zip(jobs, out_dirs, strict=True):
        output, errors = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, errors
        assert ("resumed at step 4" in output) == (out_dir == out_dirs[0])
        assert_same_run(out_dir, finished_pair)


@stress
def test_two_machines_train_as_two_processes_do(finished_pair, tmp_path):
    """Two agents of torchrun on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv_endpoint=localhost:{free.getsockname()[1]}"
    options = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=7", endpoint)
    out_dir = tmp_path / "run"
    arguments = (*TINY, f"--out_dir={out_dir}")
    jobs = [
        launch(tmp_path / f"{i}.py", *TORCHRUN[:2], *options, arguments=arguments) for i in range(2)
    ]
    texts = [job.communicate(timeout=PATIENCE) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], texts
    assert sum("8 for each of 2 processes" in output for output, _ in texts) == 1
    assert_same_run(out_dir, finished_pair)


# two runs, one folder

WAIT = """
def until(*paths):
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
"""
HELD = """
waited = []
def strike():
    if not waited:
        waited.append(1)
        open({held!r}, "w").close()
        until(*{ends!r})
"""
LATER = """
import atexit
until({held!r})
atexit.register(lambda: open({end!r}, "w").close())
"""


@pytest.mark.parametrize(
    "moment", ["start", pytest.param("step", marks=stress), pytest.param("report", marks=stress)]
)
def test_two_runs_never_write_to_one_folder(forker, finished_twin, tmp_path, moment):
    """While the first reads its data, takes a step or draws its pictures, others come and go."""
    settings, held = (*TINY, f"--out_dir={tmp_path / 'run'}"), str(tmp_path / "held")
    keys = ("resume", "overwrite")
    ends = [str(tmp_path / key) for key in keys]
    first = WAIT + BEFORE + HELD.format(held=held, ends=ends) + WHERE[moment]
    jobs = [(("train.py", *settings), first, {})]
    for key, end in zip(keys, ends, strict=True):
        later = WAIT + LATER.format(held=held, end=end)
        jobs.append((("train.py", *settings, f"--{key}=True"), later, {}))
    first, *others = forker.run(*jobs)
    assert first.code == 0, first.errors
    for other in others:
        assert_one_line(other, "is in use: another process trains there")
    assert_same_run(tmp_path / "run", finished_twin)


# readers of images

READER = """
import multiprocessing
main = os.getpid()
def strike():
    if os.getpid() == main:
        for reader in multiprocessing.active_children():
            reader.kill()
            time.sleep({patience})  # it surfaces here, whenever the system says so
"""


@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
@pytest.mark.parametrize("moment", ("step", pytest.param("save", marks=stress)))
def test_when_a_reader_of_images_dies_the_run_says_so_and_can_be_resumed(
    forker, tmp_path, where, moment
):
    settings, found = where(tmp_path / "run")
    code = found + READER.format(patience=PATIENCE / 2) + BEFORE + WHERE[moment]
    assert_one_line(forker.train(*settings, fault=code), "error: a process that reads images died")
    assert "resumed at the start" in forker.finish(*settings, "--resume=True", fault=found)


TELL = """
import multiprocessing
kill = blow
def blow():
    print(f"\\n{os.getpid()} {len(multiprocessing.active_children())}", flush=True)
    kill()
"""


@stress
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the /proc of Linux")
@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
def test_readers_of_images_go_when_their_run_is_killed(forker, tmp_path, where):
    settings, found = where(tmp_path / "run")
    done = forker.train(*settings, "--n_workers=2", fault=found + struck("step", 3) + TELL)
    assert done.code == -signal.SIGKILL
    session, n_readers = map(int, done.output.splitlines()[-1].split())
    assert n_readers == 2
    deadline = time.monotonic() + PATIENCE
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(session)


def processes_of(session):
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(os.path.basename(path))) == session:
                found.append(path)
    return found


# the same answer twice


@stress
@pytest.mark.parametrize("method", METHODS)
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


@stress
@pytest.mark.parametrize("where", ["imagenet"], indirect=True)
def test_results_do_not_depend_on_who_reads_the_images_nor_change_with_the_reading(
    forker, tmp_path, where
):
    names = ("0", "1", "3")
    settings, found = where(tmp_path / "run", report=True)
    more = [("--max_steps=4", f"--n_workers={n}", f"--out_dir={tmp_path / n}") for n in names]
    for done in forker.run(*[(("train.py", *settings, *words), found, {}) for words in more]):
        assert done.code == 0, done.errors
    for n in names[1:]:
        assert_same_run(tmp_path / n, tmp_path / "0")
    answers = []
    for n in names:
        (done,) = forker.run((("eval.py", tmp_path / "0", f"--n_workers={n}"), found, {}))
        assert done.code == 0, done.errors
        pictures = [path.read_bytes() for path in sorted((tmp_path / "0").glob("*.png"))]
        answers.append((done.output, (tmp_path / "0" / "eval.json").read_text(), pictures))
    assert answers[0] == answers[1] == answers[2] and len(pictures) == 4
