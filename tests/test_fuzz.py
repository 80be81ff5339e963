"""Input files damaged in a thousand ways: each gives a result or a one-line error; never another
exception, a hang, or more memory than the file justifies.

Every case is a function of its number. One file of each kind is in test_checkpoint.py,
test_configurator.py, test_data.py and test_images.py; those here run with

    python -m pytest -m stress                          a few hundred of each kind
    DAPS_FUZZ=2000 python -m pytest -m stress tests/test_fuzz.py
"""

import contextlib
import io
import math
import os
import pickle
import random
import signal
import struct
import warnings
import zlib

import pytest
import torch
from conftest import photograph
from PIL import Image

import data
from checkpoint import load_checkpoint, read_log
from configurator import UserError, configure, defaults
from data import ImageFolder, centre_crop, read_image
from eval import load
from models import build_model

pytestmark = pytest.mark.stress

CASES = int(os.environ.get("DAPS_FUZZ", 150))
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")
SETTINGS = defaults(TRAIN)


def cases(kind):
    """A generator of random numbers for each case of a kind."""
    return [random.Random(f"{kind} {i}") for i in range(CASES)]


def damaged(whole, rng):
    """A copy of some bytes with one kind of damage."""
    body, place = bytearray(whole), rng.randrange(len(whole) + 1)
    n = rng.choice((1, 4, 64, 1000))
    kind = rng.randrange(9)
    if kind == 0:
        del body[place:]  # cut short
    elif kind == 1:
        del body[place : place + n]
    elif kind == 2:
        body[place:place] = rng.randbytes(n)
    elif kind == 3:
        body[place : place + n] = rng.randbytes(n)
    elif kind == 4:  # a number that is too large, most likely in a header
        place = rng.randrange(min(200, len(body)))
        word = rng.choice((b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\0" * 4, b"\xff" * 8, b"9" * 4))
        body[place : place + len(word)] = word
    elif kind == 5:
        body += body[place : place + n] or b"more"
    elif kind == 6:
        body = bytearray(rng.randbytes(n))
    else:
        for _ in range(rng.choice((1, 1, 2, 8))):
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return bytes(body)


class TooSlow(BaseException):
    """Not an Exception, which a reader might blame on the file."""


@contextlib.contextmanager
def limits(seconds=300):
    """No case may hang or print anything besides its result, not even a library's warning."""

    def stop(*caught):
        raise TooSlow(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(read, path):
    """A reader's result for a file, or None after a one-line error that names the file."""
    with limits():
        try:
            return read(path)
        except UserError as error:
            assert os.path.basename(path) in str(error) and "\n" not in str(error)


@pytest.fixture(autouse=True)
def modest_memory():
    """The process must not have grown much at any time during a test."""

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))

    if not os.path.exists("/proc/self/clear_refs"):  # only on Linux
        yield
        return
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = peak()
    yield
    assert peak() - before < 200, f"{peak() - before:.0f} MiB more than before"


# images

FORMATS = {
    "jpg": {},
    "png": {},
    "webp": {},
    "gif": {},
    "bmp": {},
    "tif": {"compression": "tiff_lzw"},
}


@pytest.mark.parametrize("ending", FORMATS)
def test_damaged_images_are_read_or_skipped_with_one_line(tmp_path, ending, capsys, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    good, path = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    photograph(90, 60).save(good, **FORMATS[ending])
    content = good.read_bytes()
    folder = ImageFolder("images", [str(good), str(path)], [str(path)], 16)
    capsys.readouterr()
    n_read = 0
    for rng in cases(ending):
        path.write_bytes(damaged(content, rng))
        for flags in folder.broken.values():
            flags.zero_()
        with limits():
            x, kept = folder.val_examples(torch.arange(1))
        lines = capsys.readouterr().err.splitlines()
        n_read += len(kept)
        assert len(x) == len(kept) == 1 - len(lines)
        assert all(f"b.{ending} is skipped" in line for line in lines)
    assert 0 < n_read < CASES


def bomb(kind):
    """A small file that claims to be a large image."""
    file = io.BytesIO()
    if kind == "png":  # and is one, of 13,000 x 13,000 zeros

        def chunk(name, body):
            crc = zlib.crc32(name + body)
            return struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)

        rows = zlib.compressobj(9)
        body = b"".join(rows.compress(bytes(1 + 13_000 * 3)) for _ in range(13_000)) + rows.flush()
        header = struct.pack(">2I5B", 13_000, 13_000, 8, 2, 0, 0, 0)
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header))
        file.write(chunk(b"IDAT", body) + chunk(b"IEND", b""))
    else:
        Image.new("1", (13_000, 13_000)).save(
            file, kind, **({"compression": "group4"} if kind == "tiff" else {})
        )
    return file.getvalue()


@pytest.mark.parametrize("kind", ("png", "gif", "tiff"))
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, kind):
    (tmp_path / "x.png").write_bytes(bomb(kind))
    with limits(), pytest.raises(ValueError, match="pixels"):
        warnings.simplefilter("ignore")  # of Pillow, as ImageFolder does
        read_image(tmp_path / "x.png", centre_crop, 16)


# checkpoints


@pytest.fixture(scope="module")
def state():
    """The content of a tiny run's checkpoint."""
    config = SETTINGS | dict(width=8, n_heads=2, n_tokens=4, vocab_size=8, mlp_ratio=1)
    model = build_model(config, (1, 28, 28))
    content = {"model": model.state_dict(), "optimizer": {}, "config": config, "step": 7}
    content |= {"best": -1.0, "skipped": 0, "seconds": 1.0, "x_shape": [1, 28, 28]}
    return content | {"data_mean": torch.tensor(0.0), "data_std": torch.tensor(1.0)}


def test_a_damaged_checkpoint_is_read_or_refused(tmp_path, state):
    path, n_read = str(tmp_path / "last.pt"), 0
    torch.save(state, path)
    with open(path, "rb") as file:
        content = file.read()
    for rng in cases("checkpoint"):
        with open(path, "wb") as file:
            file.write(damaged(content, rng))
        n_read += attempt(load_checkpoint, path) is not None
    assert n_read < CASES / 2


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which writes it still
@pytest.mark.parametrize("kind", ("zip", "old zip", "pickle", "state", "key", "script"))
def test_a_checkpoint_that_is_a_bomb_is_refused_and_does_not_go_off(tmp_path, state, kind):
    path, bomb = str(tmp_path / "best.pt"), Bomb(tmp_path / "exploded")
    if kind == "zip":
        torch.save(bomb, path)
    elif kind == "old zip":
        torch.save(state | {"bomb": bomb}, path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        with open(path, "wb") as file:
            pickle.dump(bomb, file, protocol=2)
    elif kind == "state":
        torch.save(state | {"model": state["model"] | {"bomb": bomb}}, path)
    elif kind == "key":
        torch.save(state | {"config": state["config"] | {"method": bomb}}, path)
    else:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert attempt(lambda path: load(tmp_path), path) is None
    assert not (tmp_path / "exploded").exists()


# settings

CONFIG = '''"""A run."""

method = "daps_na"
n_tokens = 16  # B
lr = 1e-3
beta_final = 1
aligned = True
'''
WORDS = ["1", "-1", "1e3", "1e999", "-1e999", "9" * 400, "9" * 5000, "0x1f", "True", "None", "nan"]
WORDS += ["'daps'", "[1]", "{}", "{[]: 1}", "(1, 2)", "1 + 2j", "'a' 'b'", "f'{1}'", "b'x'"]
WORDS += ["'a\\0b'", "(" * 90, "(" * 9999, "-" * 50_000 + "1", "[" * 60 + "]" * 60, "10**9"]
WORDS += ["1." + "x" * 99, "__import__('os')", "lambda: 1", "'" + "x" * 10_000 + "'", "..."]
WORDS += ["0_1", "1__0", "\\", "\t1", " 1", "é"]


def settings_of(*argv):
    """The result of configure() on these arguments, or None after a one-line error."""
    with limits():
        try:
            found, _ = configure(dict(SETTINGS), [str(word) for word in argv])
        except UserError as error:
            assert "\n" not in str(error)
            return None
    assert found.keys() == SETTINGS.keys()
    for key, value in found.items():
        assert type(value) is type(SETTINGS[key])
        assert type(value) is not float or math.isfinite(value)
    return found


def test_a_config_file_is_read_or_refused_in_one_line(tmp_path):
    path, n_read = tmp_path / "x.py", 0
    keys = ("lr", "n_tokens", "method", "aligned", "base", "other", "a.b", "a[0]", "lr = seed")
    for rng in cases("config"):
        if rng.random() < 0.5:
            path.write_bytes(damaged(CONFIG.encode(), rng))
        else:
            path.write_text(CONFIG + f"{rng.choice(keys)} = {rng.choice(WORDS)}\n")
        n_read += settings_of(path) is not None
    assert 0 < n_read < CASES


@pytest.mark.parametrize("key", ("lr", "n_tokens", "method", "aligned", "other", ""))
def test_an_argument_is_read_or_refused_in_one_line(key):
    found = [settings_of(f"--{key}={word}") for word in WORDS]
    assert any(found) == (key in SETTINGS)


# logs


def test_a_log_cut_anywhere_keeps_its_whole_lines(tmp_path):
    rows = [{"step": step, "split": "train", "loss": -1.5, "kl": None} for step in range(1, 4)]
    path, text = tmp_path / "log.jsonl", "".join(str(row).replace("'", '"') + "\n" for row in rows)
    text = text.replace("None", "null")
    for size in range(len(text) + 1):
        path.write_text(text[:size])
        assert read_log(path) == rows[: text[:size].count("\n")]
