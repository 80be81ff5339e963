"""Files from outside, damaged in a thousand ways: each gives a correct result or one line that
says what is wrong; never another exception, a hang, or more memory than the file justifies.

Every case is a function of its number. CI tries some, DAPS_FUZZ=2000 as many of each kind.
"""

import contextlib
import copy
import gzip
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import struct
import tarfile
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from test_data import idx_bytes
from test_images import photograph, write_cifar
from test_motion import clip
from test_settings import BASE, settings_block, small, train  # noqa: F401 (a fixture)
from test_train import same

import data
import eval as evaluation
from configurator import configure
from data import DataError, ImageFolder, centre_crop, cifar10, read_idx, read_image, read_motion
from eval import build_model, draw_curves, load, load_checkpoint, load_config, read_log, report

CASES = int(os.environ.get("DAPS_FUZZ", 150))
MiB = 2**20


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
    """Not an Exception, which a reader might take for a fault of the file."""


@contextlib.contextmanager
def limits(seconds=20):
    """No case may take long or say anything beside its result, be it a warning of a library."""

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


def attempt(read, path, error=DataError):
    """What a reader makes of a file, or None if it says in one line that names it what is wrong."""
    with limits():
        try:
            return read(path)
        except error as fault:
            message = str(fault)
            assert os.path.basename(path) in message and "\n" not in message, message
            assert type(fault) is error, repr(fault)


@pytest.fixture(autouse=True)
def modest_memory():
    """The process must not have grown much at any time during a test."""

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))

    if not os.path.exists("/proc/self/clear_refs"):  # Linux alone tells
        yield
        return
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = peak()
    yield
    assert peak() - before < 200, f"{peak() - before:.0f} MiB more than before"


# IDX, CIFAR-10, CSV


def test_idx_files_are_read_exactly_or_refused(tmp_path):
    path, rng = str(tmp_path / "x.gz"), np.random.default_rng(0)
    content = idx_bytes(rng.integers(256, size=(20, 28, 28)))
    n_read = 0
    for rng in cases("idx"):
        inside = rng.random() < 0.5
        inner = damaged(content, rng) if inside else content
        outer = gzip.compress(inner, 1, mtime=0)
        with open(path, "wb") as file:
            file.write(outer if inside else damaged(outer, rng))
        found = attempt(read_idx, path)
        if found is not None:
            n_read += 1
            assert idx_bytes(found) == inner
    assert 0 < n_read < CASES


@pytest.mark.parametrize(
    "promise", [(2**32 - 1,) * 3, (2**30,), (0, 2**31, 2**31), (2**20, 28, 28)]
)
def test_an_idx_header_that_promises_what_the_file_cannot_hold_is_not_believed(tmp_path, promise):
    path = str(tmp_path / "x.gz")
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(f">HBB{len(promise)}I", 0, 8, len(promise), *promise) + b"little")
    assert attempt(read_idx, path) is None


def write_archive(path, parts, extra=()):
    """The six files in a tar, after some others."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for member in extra:
            tar.addfile(member)
        for name, part in parts.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))


@pytest.fixture(scope="module")
def cifar_parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_cifar(folder, n=2)
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def test_unpacked_cifar10_is_read_exactly_or_refused(tmp_path, cifar_parts):
    folder, n_read = tmp_path / "cifar10" / "cifar-10-batches-bin", 0
    os.makedirs(folder)
    for rng in cases("cifar"):
        parts = dict(cifar_parts)
        name = rng.choice(list(parts))
        parts[name] = damaged(parts[name], rng)
        for key, part in parts.items():
            (folder / key).write_bytes(part)
        found = attempt(lambda path: cifar10(str(tmp_path)), str(folder / name))
        if found is not None:
            n_read += 1
            records = b"".join(parts.values())  # in the order of their names: train, then test
            x, y = torch.cat([found.x_train, found.x_val]), torch.cat([found.y_train, found.y_val])
            ours = torch.cat([y.unsqueeze(1), x.flatten(1)], dim=1)
            assert ours.numpy().tobytes() == records and found.mean.isfinite().all()
    assert 0 < n_read < CASES


def test_an_archive_of_cifar10_is_read_exactly_or_refused(tmp_path, cifar_parts):
    path, n_read = str(tmp_path / "cifar10" / "cifar-10-binary.tar.gz"), 0
    os.makedirs(tmp_path / "cifar10")
    write_archive(path, cifar_parts)
    whole = cifar10(str(tmp_path))
    with open(path, "rb") as file:
        outer = file.read()
    inner = gzip.decompress(outer)
    for rng in cases("tar"):
        inside = rng.random() < 0.5
        with open(path, "wb") as file:
            file.write(gzip.compress(damaged(inner, rng), 1) if inside else damaged(outer, rng))
        found = attempt(lambda path: cifar10(str(tmp_path)), path)
        if found is not None:
            n_read += 1
            assert found.shape == whole.shape and found.y_train.max() <= 9
            assert inside or torch.equal(found.x_train, whole.x_train)
    assert 0 < n_read < CASES


def member(name, kind=tarfile.REGTYPE, link="", size=0):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


HOSTILE = {
    "absolute path": member("/tmp/daps_escaped"),
    "parent": member("../../daps_escaped"),
    "inside out": member("cifar-10-batches-bin/../../daps_escaped"),
    "symbolic link": member("cifar-10-batches-bin/link", tarfile.SYMTYPE, "/etc/passwd"),
    "folder that is a link": member("cifar-10-batches-bin", tarfile.SYMTYPE, "/tmp"),
    "hard link": member("cifar-10-batches-bin/hard", tarfile.LNKTYPE, "/etc/passwd"),
    "device": member("cifar-10-batches-bin/device", tarfile.CHRTYPE),
    "disk": member("cifar-10-batches-bin/disk", tarfile.BLKTYPE),
    "pipe": member("cifar-10-batches-bin/pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_members_of_an_archive_are_left_alone(tmp_path, cifar_parts, kind):
    os.makedirs(tmp_path / "cifar10")
    write_archive(tmp_path / "cifar10" / "cifar-10-binary.tar.gz", cifar_parts, [HOSTILE[kind]])
    before = sorted(tmp_path.rglob("*"))
    assert cifar10(str(tmp_path)).n_train == 10
    assert sorted(tmp_path.rglob("*")) == before
    assert not os.path.lexists("/tmp/daps_escaped")


LINKS = {
    "outside": "/etc/passwd",
    "parent": "../../../../../../etc/passwd",
    "itself": "data_batch_1.bin",
    "a link to it": "data_batch_2.bin",
    "nowhere": "none",
}


@pytest.mark.parametrize(
    "kind", (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
)
@pytest.mark.parametrize("link", LINKS)
def test_hostile_members_in_place_of_the_files_are_refused(tmp_path, cifar_parts, kind, link):
    os.makedirs(tmp_path / "cifar10")
    path = str(tmp_path / "cifar10" / "cifar-10-binary.tar.gz")
    parts = {
        k: v for k, v in cifar_parts.items() if k not in ("data_batch_1.bin", "data_batch_2.bin")
    }
    folder = "" if kind == tarfile.SYMTYPE else "cifar-10-batches-bin/"
    first = member("cifar-10-batches-bin/data_batch_1.bin", kind, folder + LINKS[link])
    back = member("cifar-10-batches-bin/data_batch_2.bin", kind, folder + "data_batch_1.bin")
    write_archive(path, parts, [first, back])
    assert attempt(lambda path: cifar10(str(tmp_path)), path) is None


@pytest.mark.parametrize("kind", (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE))
def test_an_archive_that_unpacks_to_gigabytes_is_refused(tmp_path, kind):
    """Three megabytes that say nothing but zero, all of which belong to the first member."""
    os.makedirs(tmp_path / "cifar10")
    path = str(tmp_path / "cifar10" / "cifar-10-binary.tar.gz")
    packer, header = zlib.compressobj(9, wbits=31), member("x", kind, size=3 << 30)
    header, block = (
        packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)
        for part in (header.tobuf(tarfile.GNU_FORMAT), bytes(MiB))
    )
    with open(path, "wb") as file:
        file.write(header + 3072 * block)
    assert attempt(lambda path: cifar10(str(tmp_path)), path) is None


def test_motion_is_read_as_it_is_written_or_refused(tmp_path):
    path, n_read = str(tmp_path / "x.csv"), 0
    np.savetxt(path, clip(33), delimiter=",", fmt="%.6f")
    with open(path, "rb") as file:
        content = file.read()
    for rng in cases("csv"):
        body = damaged(content, rng)
        with open(path, "wb") as file:
            file.write(body)
        found = attempt(read_motion, path)
        if found is not None:
            n_read += 1
            lines = filter(None, re.split("[\r\n]+", body.decode()))
            assert found.tolist() == [
                [float(word.strip()) for word in line.split(",")] for line in lines
            ]
            assert all(t.isfinite().all() for t in data.motion_features(found))
    assert 0 < n_read < CASES


@pytest.mark.parametrize("text", ("", "#", "\n\n\n", "1e400," * 25 + "0\n"))
def test_motion_without_frames_is_refused(tmp_path, text):
    (tmp_path / "x.csv").write_text(text * 40)
    assert attempt(read_motion, str(tmp_path / "x.csv")) is None


@pytest.mark.parametrize("column", (0, 25))
def test_motion_beyond_all_measure_is_refused(tmp_path, column):
    frames = clip(40)
    frames[7, column] = 1e30
    np.savetxt(tmp_path / "x.csv", frames, delimiter=",")
    assert attempt(read_motion, str(tmp_path / "x.csv")) is None


def test_a_frame_behind_a_damaged_character_is_not_taken_for_a_comment(tmp_path):
    np.savetxt(tmp_path / "x.csv", clip(40), delimiter=",", fmt="%.6f")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    lines[7] = "#" + lines[7][1:]
    (tmp_path / "x.csv").write_text("\n".join(lines))
    assert attempt(read_motion, str(tmp_path / "x.csv")) is None


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
        assert len(x) == len(kept) == 1 - len(lines) and x.isfinite().all()
        assert all(f"b.{ending} is skipped" in line for line in lines)
    assert 0 < n_read < CASES


def bomb(kind):
    """A small file that says that it is a large image."""
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
        read_image(tmp_path / "x.png", centre_crop, 16)


def test_a_program_that_calls_itself_an_image_is_not_run(tmp_path, monkeypatch):
    """PostScript is a language, which Pillow would hand to Ghostscript."""
    for name in ("gs", "gswin64c"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 10.0\ntouch {tmp_path}/ran\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "x.jpg").write_bytes(program)
    with pytest.raises(OSError, match="identify"):
        read_image(tmp_path / "x.jpg", centre_crop, 16)
    assert not (tmp_path / "ran").exists()


# checkpoints


@pytest.fixture(scope="module")
def state():
    """What the checkpoint of a tiny run holds."""
    config = settings_block() | dict(width=8, n_heads=2, n_tokens=4, vocab_size=8, mlp_ratio=1)
    model = build_model(config, (1, 28, 28))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": config}
    content |= {"step": 7, "best": -1.0, "skipped": 0, "seconds": 1.0, "memory": 1.0}
    return content | {
        "x_shape": [1, 28, 28],
        "x_mean": torch.tensor(0.0),
        "x_std": torch.tensor(1.0),
    }


def test_a_damaged_checkpoint_is_refused_or_what_it_was(tmp_path, state):
    path, n_read = str(tmp_path / "last.pt"), 0
    torch.save(state, path)
    assert same(load_checkpoint(path), state)
    with open(path, "rb") as file:
        content = file.read()
    for rng in cases("checkpoint"):
        with open(path, "wb") as file:
            file.write(damaged(content, rng))
        found = attempt(load_checkpoint, path, ValueError)
        if found is not None:
            n_read += 1
            assert same(found, state)
    assert n_read < CASES


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
            pickle.dump(bomb, file)
    elif kind == "state":
        torch.save(state | {"model": state["model"] | {"bomb": bomb}}, path)
    elif kind == "key":
        torch.save(state | {"config": state["config"] | {"method": bomb}}, path)
    else:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert attempt(lambda path: load(tmp_path), path, ValueError) is None
    assert not (tmp_path / "exploded").exists()


def test_a_checkpoint_that_is_small_until_it_is_unpacked_is_refused(tmp_path, state):
    """256 MiB of zeros in 1 MiB, which torch.load would unpack."""
    torch.save(state | {"extra": torch.empty(2**26)}, tmp_path / "large.pt")
    with (
        zipfile.ZipFile(tmp_path / "large.pt") as large,
        zipfile.ZipFile(tmp_path / "best.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for name in large.namelist():
            with large.open(name) as source, packed.open(name, "w") as target:
                shutil.copyfileobj(source, target)
    assert attempt(load_checkpoint, str(tmp_path / "best.pt"), ValueError) is None


def test_a_checkpoint_whose_tensors_are_one_number_each_is_refused(tmp_path, state):
    """Strides of zero: shapes that fit, and a file that is small."""
    config = state["config"] | {"width": 4096}
    with torch.device("meta"):
        giant = build_model(config, (1, 28, 28)).state_dict()
    model = {
        k: torch.zeros(1, dtype=t.dtype).expand(t.shape) if t.dim() else t for k, t in giant.items()
    }
    torch.save(state | {"config": config, "model": model}, tmp_path / "best.pt")
    assert attempt(lambda path: load(tmp_path), str(tmp_path / "best.pt"), ValueError) is None


@pytest.fixture
def few_letters(monkeypatch):
    """All data sets are a few letters."""
    letters = data.glyphs(n_train=20, n_val=10)
    monkeypatch.setattr(data, "DATASETS", dict.fromkeys(data.DATASETS, lambda *_, **__: letters))
    data.load_dataset.cache_clear()
    yield letters
    data.load_dataset.cache_clear()


VALUES = (
    None,
    0,
    -1,
    3,
    10**9,
    2**63,
    10**30,
    1.5,
    1e300,
    math.nan,
    math.inf,
    True,
    "",
    "x",
    "9" * 99,
)
VALUES += (
    "8 8 4",
    "lafan",
    "imagenet",
    "vqvae",
    "gaussian",
    "fsq",
    "daps_na",
    "a\nb\0c",
    [],
    [1, 2],
    {},
)
VALUES += (b"bytes", torch.zeros(3), torch.zeros(0), torch.zeros(2, 2, dtype=torch.complex64))
VALUES += (torch.zeros(1).expand(2**16, 2**16), torch.zeros(3, device="meta"))
VALUES += (torch.eye(3).to_sparse(),)


def hostile(state, rng):
    """The content of a checkpoint with something of it replaced, missing, or in addition."""
    state, original = dict(state), state["model"]
    for _ in range(rng.choice((1, 1, 2, 4))):
        part = rng.choice((None, "config", "config", "config", "model", "optimizer"))
        if part and isinstance(state.get(part), dict):
            target = state[part] = dict(state[part])
        else:
            target = state
        key = rng.choice([*target, "other"])
        like = target.get(key)
        if rng.random() < 0.15:
            target.pop(key, None)
        elif any(like is t for t in original.values()) and rng.random() < 0.7:
            changes = (torch.Tensor.double, torch.Tensor.half, torch.Tensor.int, torch.Tensor.bool)
            changes += (lambda t: t[None], lambda t: t.flatten(), lambda t: t * math.nan)
            changes += (lambda t: t.clone().fill_(math.inf), lambda t: t.new_zeros(()))
            changes += (lambda t: t.new_zeros(1).expand(2**20, *t.shape),)
            target[key] = rng.choice(changes)(like)
        elif type(like) is int and rng.random() < 0.5:
            target[key] = like + rng.choice((-like, -1, 1, like, 10**6, 2**31, 2**40))
        else:
            target[key] = rng.choice(VALUES)
    return state


@pytest.mark.parametrize("key", ("n_layers", "n_tokens", "vocab_size", "width", "mlp_ratio"))
@pytest.mark.parametrize("value", (2**14, 2**20, 2**30))
def test_a_checkpoint_that_asks_for_a_giant_is_refused_before_it_is_built(
    tmp_path, state, key, value
):
    torch.save(state | {"config": state["config"] | {key: value}}, tmp_path / "best.pt")
    assert attempt(lambda path: load(tmp_path), str(tmp_path / "best.pt"), ValueError) is None


def test_a_checkpoint_with_hostile_content_is_refused_or_can_be_evaluated(
    tmp_path, state, few_letters, monkeypatch, capsys
):
    path, n_read = str(tmp_path / "best.pt"), 0
    for name in ("draw_reconstructions", "draw_samples", "draw_codes", "draw_curves"):
        monkeypatch.setattr(evaluation, name, lambda *_: Image.new("L", (9, 9)))
    chosen = cases("hostile")[: max(CASES // 4, 100)]
    for rng in chosen:
        torch.save(hostile(state, rng), path)
        rows = attempt(lambda path: report([path]), str(tmp_path), ValueError)
        n_read += rows is not None
    assert 10 < n_read < 0.9 * len(chosen)


def test_a_run_is_resumed_from_hostile_files_or_refused(tmp_path, small):  # noqa: F811
    """Also of the optimizer's state, config.json and log.jsonl, by train.py itself."""
    words = [f"--{word}" for word in BASE.split()]
    assert train(*words, f"--out_dir={tmp_path / 'good'}")[0] == 0
    good, codes = load_checkpoint(tmp_path / "good" / "last.pt"), []
    for rng in cases("resume")[: max(CASES // 10, 10)]:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        name = rng.choice(("last.pt", "last.pt", "last.pt", "config.json", "log.jsonl"))
        if name == "last.pt":
            content = copy.deepcopy(good)
            if rng.random() < 0.5:
                content = hostile(content, rng)
            else:
                moments = rng.choice(list(content["optimizer"]["state"].values()))
                like = moments["exp_avg"]
                moments["exp_avg"] = rng.choice(
                    (like.flatten()[:1], like[None], like.new_zeros(()), *rng.sample(VALUES, 2))
                )
            torch.save(content, folder / name)
        else:
            if name == "config.json":  # which is read if there is no checkpoint
                (folder / "last.pt").unlink()
            (folder / name).write_bytes(damaged((folder / name).read_bytes(), rng))
        code, said = train(*words, "--max_steps=4", "--resume=True", f"--out_dir={folder}")
        codes.append(code)
        *warnings_, last = said.splitlines() or [""]
        assert code == 0 or code == 2 and last.startswith("error: resume: "), said
        assert all("log.jsonl, line" in line for line in warnings_), said
    assert {0, 2} == set(codes)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path, small):  # noqa: F811
    """torch takes moments and rules as they come, and reads beyond the end of short ones."""
    words = [f"--{word}" for word in BASE.split()]
    words += ["--resume=True", f"--out_dir={tmp_path}"]
    assert train(*words)[0] == 0
    good = load_checkpoint(tmp_path / "last.pt")
    for change in ("shape", "rule"):
        content = copy.deepcopy(good)
        moments = content["optimizer"]["state"][1]
        if change == "shape":
            moments["exp_avg"] = moments["exp_avg"].new_zeros(())
        else:
            content["optimizer"]["param_groups"][0]["maximize"] = True
        torch.save(content, tmp_path / "last.pt")
        code, said = train(*words, "--max_steps=4")
        assert code == 2 and "does not fit" in said, change


# settings


def settings_of(*argv):
    """What configure() makes of arguments, or None if it says in one line what is wrong."""
    block = settings_block()
    with limits(), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return configure(dict(block), [str(word) for word in argv])[0]
        except SystemExit as end:
            line = said.getvalue()
            assert end.code == 2 and line.count("\n") == 1 and line.startswith("error: "), line


def assert_settings(found):
    defaults = settings_block()
    assert found.keys() == defaults.keys()
    for key, value in found.items():
        assert type(value) is type(defaults[key])
        assert math.isfinite(value) if type(value) is float else str(value).isprintable()


CONFIG = '''"""A run."""

method = "daps_na"
n_tokens = 16  # B
lr = 1e-3
beta_final = 1
aligned = True
'''
WORDS = (
    "1",
    "-1",
    "1e3",
    "1e999",
    "-1e999",
    "9" * 400,
    "9" * 5000,
    "0x1f",
    "True",
    "None",
    "'daps'",
    "nan",
)
WORDS += (
    "[1]",
    "{}",
    "{[]: 1}",
    "(1, 2)",
    "1 + 2j",
    "'a' 'b'",
    "f'{1}'",
    "b'x'",
    "'a\\0b'",
    "'\\ud800'",
)
WORDS += (
    "(" * 90,
    "(" * 9999,
    "-" * 50_000 + "1",
    "[" * 60 + "]" * 60,
    "1." + "x" * 99,
    "__import__('os')",
)
WORDS += (
    "10**9",
    "lambda: 1",
    "'" + "x" * 10_000 + "'",
    "...",
    "0_1",
    "1__0",
    "\\",
    "\t1",
    " 1",
    "é",
)


def test_a_config_file_is_read_or_refused_by_one_line(tmp_path):
    path, n_read = tmp_path / "x.py", 0
    for rng in cases("config"):
        if rng.random() < 0.5:
            path.write_bytes(damaged(CONFIG.encode(), rng))
        else:
            key = rng.choice(
                ("lr", "n_tokens", "method", "aligned", "other", "a.b", "a[0]", "lr = seed")
            )
            path.write_text(CONFIG + f"{key} = {rng.choice(WORDS)}\n")
        found = settings_of(path)
        if found is not None:
            n_read += 1
            assert_settings(found)
    assert 0 < n_read < CASES


@pytest.mark.parametrize("key", ("lr", "n_tokens", "method", "aligned", "other", ""))
def test_an_argument_is_read_or_refused_by_one_line(key):
    for word in WORDS:
        found = settings_of(f"--{key}={word}")
        if found is not None:
            assert_settings(found)


def test_a_config_json_is_read_or_refused_by_one_line(tmp_path):
    path, n_read = tmp_path / "config.json", 0
    content = json.dumps(settings_block(), indent=2).encode()
    for rng in cases("json"):
        path.write_bytes(damaged(content, rng))
        found = attempt(load_config, path, ValueError)
        n_read += found is not None
        assert found is None or isinstance(found, dict)
    for text in ("[]", "7", "null", "[" * 100_000, "{" * 10, "9" * 5000, ""):
        path.write_text(text)
        assert attempt(load_config, path, ValueError) is None
    assert 0 < n_read < CASES


# logs


def log_content(n=12):
    rows = []
    for step in range(1, n + 1):
        rows.append({"step": step, "split": "train", "loss": -1.5, "ess": 0.3, "eta": 2.0 * step})
        if step % 4 == 0:
            rows.append(
                {"step": step, "split": "val", "beta_elbo": -9.0, "log_px": -8.0, "kl": 1.0}
            )
            rows[-1]["psnr"] = 12.5
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_damaged_log_loses_the_damaged_lines_alone_and_can_be_drawn(tmp_path, capsys):
    whole, path = log_content().encode(), tmp_path / "log.jsonl"
    for i, rng in enumerate(cases("log")):
        path.write_bytes(damaged(whole, rng))
        with limits():
            rows = read_log(tmp_path)
        *lines, torn = path.read_bytes().split(b"\n")
        untouched = [json.loads(line) for line in lines if line in whole.splitlines()]
        assert all(row in rows for row in untouched)
        lost = len(lines) + bool(torn) - len(rows)
        assert len(capsys.readouterr().err.splitlines()) in (lost, lost - 1)
        if i % 10 == 0:
            with limits():
                draw_curves([tmp_path])
            capsys.readouterr()


ROWS = ("7", "[]", "null", "{}", '{"step": 1}', '{"step": "1", "split": "train"}', "[" * 100_000)
ROWS += ('{"step": 0, "split": "val"}', '{"step": 1, "split": "val", "kl": "x"}', "NaN", "\udcff")
ROWS += ('{"step": 1, "split": "val", "kl": NaN}', '{"step": 1, "split": "val", "psnr": 1e999}')
ROWS += (
    '{"step": 1, "split": []}',
    '{"step": 1e99, "split": "val"}',
    '{"step": %s}' % ("9" * 9999),
)


@pytest.mark.parametrize("row", ROWS)
def test_a_line_that_train_py_did_not_write_is_named_and_skipped(tmp_path, row, capsys):
    content = log_content()
    (tmp_path / "log.jsonl").write_bytes((row + "\n" + content).encode(errors="surrogateescape"))
    with limits():
        draw_curves([tmp_path])
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {tmp_path}/log.jsonl, line 1: not a line of train.py"
    ]
    assert [json.dumps(row) for row in read_log(tmp_path)] == content.splitlines()


EXTREMES = (0.0, 1.0, -1e20, 1e20, 1e-300, 1e99, -1e99, 5e-324, 1e16, 1e16 + 2, 2**53, 10**99)


@pytest.mark.parametrize("values", [(a, b) for a in EXTREMES for b in EXTREMES[:5]])
def test_curves_of_extreme_values_can_be_drawn(tmp_path, values):
    rows = [
        {"step": i, "split": split, "eta": v, "ess": v, "psnr": v, "kl": v, "beta_elbo": v}
        for i, v in enumerate(values, 1)
        for split in ("train", "val")
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with limits():
        draw_curves([tmp_path])
