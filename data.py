"""Data sets: find or download, check, decode, and hand out batches as a function of (seed, step).

Batches and noise are drawn for the whole (global) batch, of which each process keeps its share:
example i of step t and its noise are the same whatever the number of processes.

    glyphs    letters and digits drawn on the spot with Pillow's built-in font; no network, no files
    mnist     the four IDX files, from data_dir/mnist or downloaded there
    cifar10   the official binary archive, from data_dir/cifar10 or downloaded there
    imagenet  train/<class>/*.JPEG and val/<class>/*.JPEG, in data_dir/imagenet or in data_dir
              itself; or any folder of images
    lafan     motion: the CSV files of LAFAN1 on the Unitree H1, from data_dir/lafan1 or downloaded

Images in colour are standardised per channel by the training set; binary ones stay 0 and 1.
"""

import functools
import glob
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import secrets
import signal
import string
import struct
import sys
import tarfile
import time
import warnings
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import requests
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps
from torch.utils.data import DataLoader
from tqdm import tqdm

DATA_DIR = os.environ.get("DAPS_DATA", "~/.cache/daps")
CACHE_DIR = os.environ.get("DAPS_CACHE", "~/.cache/daps")  # what was computed once


class DataError(ValueError):
    """Something is wrong with a data set; the message is one line that says what to do."""


@contextmanager
def quiet():
    """Without the warnings of libraries: what is wrong with a file is for us to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Examples:
    """What data sets share. They offer `name`, `shape` (what one x looks like to the networks),
    `n_train`, `n_val`, `mean` and `std` (what x is standardised by), train_batch and val_examples.
    """

    workers = False  # whether reading is work enough to share
    in_order = False  # whether neighbours in the validation set are alike
    white = 255  # brightest value of images
    error_names = ()

    def train_batches(self, seed, first, last, batch_size, rank, world_size, n_workers):
        """This rank's share of training batches first ... last - 1, read ahead by n_workers."""
        batch = functools.partial(self.train_batch, seed, batch_size=batch_size)
        batch = functools.partial(batch, rank=rank, world_size=world_size)
        return read_ahead(batch, range(first, last), n_workers if self.workers else 0)

    def val_batches(self, batch_size, rank=0, world_size=1, limit=0, n_workers=0):
        """This rank's part of the validation set, or of `limit` examples of it, in batches: places
        in that part, and x."""
        index = self.val_index(limit)
        index = index[share(len(index), rank, world_size)]
        rows = torch.arange(len(index)).split(batch_size) if len(index) else ()
        read = functools.partial(self.val_rows, index)
        yield from read_ahead(read, rows, n_workers if self.workers else 0)

    def val_index(self, limit=0):
        """Which examples `limit` stands for: the first or, of a set in order, some evenly spread
        over it; 0 for all."""
        n = min(limit or self.n_val, self.n_val)
        return torch.arange(n) * self.n_val // n if self.in_order else torch.arange(n)

    def val_rows(self, index, rows):
        """Places among rows, and x, of what can be read."""
        x, kept = self.val_examples(index[rows])
        return rows[kept], x

    def unit(self, x):
        """Standardised x in units in which the range of the signal is 1: pixels in [0, 1]."""
        return x * self.std.to(x.device) + self.mean.to(x.device)

    def standardised(self, x):
        return (x.float() / self.white - self.mean) / self.std

    def input_scale(self):
        """Mean and standard deviation of x as it is handed out."""
        return 0.0, 1.0

    def summary(self):
        """What processes that train together must agree on."""
        digest = hashlib.sha256()
        for part in self.content():
            digest.update(np.ascontiguousarray(part))
        sizes = {"n_train": self.n_train, "n_val": self.n_val, "the shape of x": self.shape}
        scales = {"the mean of x": self.mean, "the scale of x": self.std}
        return sizes | {"the content of the data": digest.hexdigest()[:16]} | scales

    def content(self):
        """Arrays that are the same on all machines if the data are."""
        raise NotImplementedError

    def errors(self, x, mean):
        """Further measures of how far reconstructions are from x: (N,) for each of error_names."""
        return ()


STOPS = {signal.SIGINT, signal.SIGTERM}


def read_ahead(read, keys, n_workers):
    """read(key) for each key, in order, by processes that work ahead; where a system cannot fork,
    by this one."""
    if n_workers == 0 or "fork" not in multiprocessing.get_all_start_methods():
        return map(read, keys)
    loader = DataLoader(
        Reading(read),
        batch_size=None,
        sampler=keys,
        num_workers=n_workers,
        multiprocessing_context="fork",
        worker_init_fn=leave_the_group,
        pin_memory=torch.cuda.is_available(),
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until they have left the group
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Reading:
    read: callable

    def __getitem__(self, key):
        return self.read(key)


def leave_the_group(worker):
    """Ctrl-C and torchrun signal all processes of a group; workers shall end with their parent."""
    os.setpgrp()
    while signal.sigpending() & STOPS:  # of those that came on the way here
        signal.sigwait(STOPS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@dataclass
class Dataset(Examples):
    """Images in memory as uint8, of which `white` is the brightest value, and labels as uint8."""

    name: str
    x_train: torch.Tensor  # (n, C, height, width)
    y_train: torch.Tensor  # (n,)
    x_val: torch.Tensor
    y_val: torch.Tensor
    white: int = 1
    mean: torch.Tensor = field(default_factory=lambda: torch.tensor(0.0))  # of [0, 1] pixels
    std: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))

    @property
    def shape(self):
        return tuple(self.x_train.shape[1:])

    @property
    def n_train(self):
        return len(self.x_train)

    @property
    def n_val(self):
        return len(self.x_val)

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's share of training batch `step`: (batch_size / world_size, *shape) float32."""
        index = train_indices(self.n_train, seed, step, batch_size)
        return self.standardised(self.x_train[index[share(batch_size, rank, world_size)]])

    def val_examples(self, index):
        """Validation examples (n, *shape) float32, and which of the index they are: all."""
        return self.standardised(self.x_val[index]), slice(None)

    def key(self):
        """Changes when the validation set does."""
        return hashlib.sha256(self.x_val.numpy().tobytes()).hexdigest()[:16]

    def content(self):
        return self.x_train.numpy(), self.x_val.numpy()

    def input_scale(self):
        if self.white > 1:
            return super().input_scale()
        x = self.x_train[:10_000].float()
        return x.mean().item(), x.std().item()


@functools.lru_cache(maxsize=1)
def load_dataset(name, data_dir=DATA_DIR, image_size=256):
    """A data set by its name; image_size is for those whose images come in all sizes."""
    if name not in DATASETS:
        raise DataError(f'dataset is "{name}", must be one of: {", ".join(DATASETS)}')
    options = {"image_size": image_size} if name == "imagenet" else {}
    return DATASETS[name](os.path.expanduser(data_dir), **options)


# ---------------------------------------------------------------------------------------------
# batches and noise: pure functions of (seed, step) and the place in the global batch

TRAIN_ORDER, TRAIN_NOISE, VAL_NOISE, TRAIN_CROP = range(4)  # streams of randomness that never meet


def share(n, rank, world_size):
    """The slice of a batch of n that belongs to this rank."""
    return slice(n * rank // world_size, n * (rank + 1) // world_size)


@functools.lru_cache(maxsize=2)
def epoch_order(n, seed, epoch):
    return np.random.default_rng([seed, TRAIN_ORDER, epoch]).permutation(n)


def train_indices(n, seed, step, batch_size):
    """Batch `step` of an endless sequence of shuffled epochs over n examples: (batch_size,)."""
    place = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = range(place[0] // n, place[-1] // n + 1)
    return torch.from_numpy(
        np.concatenate([epoch_order(n, seed, e)[place[place // n == e] % n] for e in epochs])
    )


def uniform_noise(stream, seed, step, batch_size, shape, rank=0, world_size=1):
    """This rank's share of the noise (batch_size, *shape) of a batch, uniform in [0, 1).

    It is drawn on the CPU: a GPU would draw other numbers from the same seed.
    """
    state = np.random.SeedSequence([seed, stream, step]).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
    return torch.rand(batch_size, *shape, generator=generator)[share(batch_size, rank, world_size)]


# ---------------------------------------------------------------------------------------------
# glyphs


def glyphs(data_dir=None, n_train=20_000, n_val=2_000, seed=0):
    """62 letters and digits, 28 x 28, binary, each bent by a random affine map and stroke width."""
    characters = string.digits + string.ascii_uppercase + string.ascii_lowercase
    strokes = range(0, 7, 2)
    # Draw each letter once per stroke width, four times too large; bend and shrink it per example.
    masters = [[draw_glyph(c, s) for s in strokes] for c in characters]
    rng = np.random.default_rng(seed)
    n = n_train + n_val
    y = rng.integers(len(characters), size=n)
    stroke = rng.integers(len(strokes), size=n)
    angle, shear = rng.uniform(-0.3, 0.3, size=(2, n))
    scale = rng.uniform(0.85, 1.2, size=(2, n)) * 28 / 112
    shift = rng.uniform(-2.0, 2.0, size=(2, n))
    x = np.empty((n, 1, 28, 28), np.uint8)
    for i in range(n):
        c, s = np.cos(angle[i]), np.sin(angle[i])
        forward = (
            np.array([[c, -s], [s, c]]) @ np.array([[1, shear[i]], [0, 1]]) @ np.diag(scale[:, i])
        )
        back = np.linalg.inv(forward)  # PIL asks where in the source each output pixel comes from
        offset = 56 - back @ (14 + shift[:, i])
        coefficients = (*back[0], offset[0], *back[1], offset[1])
        master = masters[y[i]][stroke[i]]
        image = master.transform(
            (28, 28), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC
        )
        x[i, 0] = np.asarray(image) > 127
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype(np.uint8))
    return Dataset("glyphs", x[:n_train], y[:n_train], x[n_train:], y[n_train:])


def draw_glyph(character, stroke):
    """One character, white on black, centred on 112 x 112."""
    page = Image.new("L", (112, 112))
    font = ImageFont.load_default(88)
    ImageDraw.Draw(page).text((56, 56), character, 255, font, anchor="mm", stroke_width=stroke)
    glyph = page.crop(page.getbbox())
    page = Image.new("L", (112, 112))
    page.paste(glyph, ((112 - glyph.width) // 2, (112 - glyph.height) // 2))
    # Shrinking by four looks at one pixel in sixteen: blur first, so that none goes unseen.
    return page.filter(ImageFilter.BoxBlur(1.5))


# ---------------------------------------------------------------------------------------------
# MNIST

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://yann.lecun.com/exdb/mnist/",
)
MNIST_FILES = {  # sha256
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def mnist(data_dir):
    """MNIST, binarised at > 127. What is downloaded must match its hash; what is in data_dir must
    decode without a fault, so that other data in the same format and by the same names will do."""
    folder = os.path.join(data_dir, "mnist")
    paths = [os.path.join(folder, f"{name}.gz") for name in MNIST_FILES]
    for path, sha256 in zip(paths, MNIST_FILES.values(), strict=True):
        if not os.path.exists(path):
            download([mirror + os.path.basename(path) for mirror in MNIST_MIRRORS], path, sha256)
    parts = [read_idx(path) for path in paths]
    for images, labels in (parts[:2], parts[2:]):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or len(images) == 0:
            raise DataError(
                f"{folder}: images {images.shape} and labels {labels.shape} do not match, want "
                "(n, 28, 28) and (n,); delete the folder to download MNIST anew"
            )
    x_train, y_train, x_val, y_val = (torch.from_numpy(part) for part in parts)
    x_train, x_val = ((x.unsqueeze(1) > 127).byte() for x in (x_train, x_val))
    return Dataset("mnist", x_train, y_train, x_val, y_val)


DEFLATE = 1032  # gzip makes nothing smaller than by this factor


def read_idx(path):
    """A gzipped IDX file of unsigned bytes as an array, if it is whole and of the promised size."""
    try:
        with gzip.open(path) as file:
            zero, kind, n_dims = struct.unpack(">HBB", file.read(4))
            if zero != 0 or kind != 8 or not 1 <= n_dims <= 3:
                raise ValueError("not an IDX file of bytes")
            shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
            size = math.prod(shape)
            if size > min(1 << 30, DEFLATE * os.path.getsize(path)):
                raise ValueError(f"promises {size:,} bytes, too many to be true")
            body = file.read(size + 1)  # one more than promised, which must not be there
            if len(body) != size:
                found = "fewer" if len(body) < size else "more"
                raise ValueError(f"promises {size:,} bytes, holds {found}")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as fault:
        reason = f"cannot be read ({fault}); delete the file to download it anew"
        raise DataError(f"{path}: {reason}") from None
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


# ---------------------------------------------------------------------------------------------
# CIFAR-10

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue


def cifar10(data_dir):
    """CIFAR-10 from its binary files, unpacked or in their archive."""
    folder = os.path.join(data_dir, "cifar10")
    unpacked = os.path.join(folder, CIFAR10_FOLDER)
    archive = os.path.join(folder, os.path.basename(CIFAR10_URL))
    if not os.path.isdir(unpacked) and not os.path.exists(archive):
        download([CIFAR10_URL], archive, CIFAR10_SHA256)
    names = (*CIFAR10_TRAIN, "test_batch.bin")
    if os.path.isdir(unpacked):
        parts = [read_cifar(os.path.join(unpacked, name)) for name in names]
    else:
        parts = [cifar_records(archive, body) for body in read_cifar_archive(archive, names)]
    train = torch.cat(parts[:5])
    y_train, y_val = (part[:, 0].contiguous() for part in (train, parts[5]))
    x_train, x_val = (part[:, 1:].reshape(-1, 3, 32, 32) for part in (train, parts[5]))
    # Of integers, so that the result does not depend on the order of a sum.
    n = x_train[:, 0].numel()
    counts = [torch.bincount(x_train[:, c].flatten(), minlength=256).double() for c in range(3)]
    levels = torch.arange(256, dtype=torch.float64) / 255
    sums = [[(count * power).sum() for count in counts] for power in (levels, levels.square())]
    return Dataset(
        "cifar10",
        x_train,
        y_train,
        x_val,
        y_val,
        255,
        *mean_and_std(torch.tensor(sums, dtype=torch.float64), n),
    )


def mean_and_std(sums, n):
    """Of the channels of n pixels, from the sums of their values and squares (2, 3): (3, 1, 1)
    float32 each."""
    mean, square = sums / n
    std = (square - mean.square()).clamp_min(0).sqrt().clamp_min(1e-3)
    return mean.float().view(3, 1, 1), std.float().view(3, 1, 1)


def read_cifar_archive(path, names):
    """The bytes of these files in an archive. It is never unpacked onto the disk and need not be
    trusted: of its members, ordinary files in the right place are read."""
    most = 6 * 10_000 * CIFAR10_RECORD + (1 << 20)
    bodies = {}
    try:
        # Read to its end, where a checksum stands, and before anybody looks inside: there, a size
        # may be any number.
        with gzip.open(path) as file:
            body = file.read(min(most, DEFLATE * os.path.getsize(path)) + 1)
        if len(body) > most:
            raise ValueError(f"unpacks to more than {most:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:") as tar:
            for member, _ in zip(tar, range(1000), strict=False):
                folder, _, name = member.name.rpartition("/")
                if folder == CIFAR10_FOLDER and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    bodies[name] = tar.extractfile(member).read(10_000 * CIFAR10_RECORD + 1)
        if missing := [name for name in names if name not in bodies]:
            raise ValueError(f"holds no file {CIFAR10_FOLDER}/{missing[0]}")
    except Exception as fault:  # what a damaged file makes tarfile raise is not documented
        reason = str(fault).split("\n")[0] or type(fault).__name__
        raise DataError(f"{path}: cannot be read ({reason}); delete it to download anew") from None
    return [bodies[name] for name in names]


def read_cifar(path):
    """The records of one file: (n, 3073) uint8."""
    try:
        with open(path, "rb") as file:
            return cifar_records(path, file.read(10_000 * CIFAR10_RECORD + 1))
    except OSError as fault:
        reason = f"cannot be read ({fault.strerror}); delete it to download anew"
        raise DataError(f"{path}: {reason}") from None


def cifar_records(path, body):
    if len(body) == 0 or len(body) % CIFAR10_RECORD:
        wanted = f"up to 10,000 records of {CIFAR10_RECORD:,} bytes"
        found = f"{len(body):,} bytes"
        raise DataError(f"{path}: has {found}, must have {wanted}; delete it to download anew")
    records = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, CIFAR10_RECORD)
    if records[:, 0].max() > 9:
        label = records[:, 0].max()
        raise DataError(f"{path}: has a label {label}, must be 0 to 9; delete it to download anew")
    return records


# ---------------------------------------------------------------------------------------------
# ImageNet, or any folder of images

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class ImageFolder(Examples):
    """Images on the disk, decoded when they are needed: random resized crops, flipped or not, for
    training; the centre for validation.

    A file that cannot be decoded is named, counted and skipped: in training the next one takes its
    place, in validation it is left out.
    """

    workers = in_order = True  # in the order of the folders, which are classes

    def __init__(self, name, train_files, val_files, image_size):
        self.name, self.files = name, {"train": train_files, "val": val_files}
        self.n_train, self.n_val = len(train_files), len(val_files)
        self.shape = (3, image_size, image_size)
        # One flag per file, which all workers share.
        self.broken = {k: torch.zeros(len(f), dtype=torch.bool) for k, f in self.files.items()}
        for flags in self.broken.values():
            flags.share_memory_()
        self.mean, self.std = self.statistics()

    def read(self, split, i, crop):
        """Image i as (3, size, size) uint8, cut by crop(width, height) -> box; None if broken."""
        path = self.files[split][i]
        try:
            return torch.from_numpy(read_image(path, crop, self.shape[1])).permute(2, 0, 1)
        except Exception as fault:  # what a damaged file makes Pillow raise is not documented
            if not self.broken[split][i]:
                self.broken[split][i] = True
                reason = str(fault).split("\n")[0] or type(fault).__name__
                print(f"warning: {path} is skipped ({reason})", file=sys.stderr, flush=True)

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's share of training batch `step`: (batch_size / world_size, *shape) float32."""
        index = train_indices(self.n_train, seed, step, batch_size).tolist()
        x = []
        for place in range(batch_size)[share(batch_size, rank, world_size)]:
            for i in range(index[place], index[place] + self.n_train):
                rng = np.random.default_rng([seed, TRAIN_CROP, step, place])
                image = self.read("train", i % self.n_train, functools.partial(random_crop, rng))
                if image is not None:
                    break
            else:
                raise DataError(f"{self.name}: none of {self.n_train} files could be decoded")
            x.append(image.flip(2) if rng.random() < 0.5 else image)
        return self.standardised(torch.stack(x))

    def val_examples(self, index):
        """Validation examples (n, *shape) float32, and which of the index they are."""
        images = [self.read("val", i, centre_crop) for i in index.tolist()]
        kept = [k for k, image in enumerate(images) if image is not None]
        x = torch.stack([images[k] for k in kept]) if kept else torch.zeros(0, *self.shape)
        return self.standardised(x), kept

    def key(self):
        return fingerprint(self.shape, self.files["val"])

    def content(self):
        names = [os.path.basename(f) for files in self.files.values() for f in files]
        return [np.frombuffer(repr(names).encode(), np.uint8)]

    def statistics(self, n=2000):
        """Mean and standard deviation of each channel, (3, 1, 1) each, over the centres of up to n
        training images evenly spread over the set. Computed once and kept for next time."""
        n = min(n, self.n_train)
        index = [i * self.n_train // n for i in range(n)]
        key = fingerprint(self.shape, [self.files["train"][i] for i in index])
        path = os.path.join(os.path.expanduser(CACHE_DIR), f"statistics_{key}.json")
        try:
            with open(path) as file:
                mean, std = torch.tensor(json.load(file), dtype=torch.float32).view(2, 3, 1, 1)
            if std.min() > 0 and mean.isfinite().all() and std.isfinite().all():
                return mean, std
        except (OSError, ValueError, TypeError, RuntimeError, OverflowError):
            pass  # not there yet, or damaged
        sums, n_pixels = torch.zeros(2, 3, dtype=torch.float64), 0
        for i in tqdm(index, desc="statistics", leave=False, disable=None):
            image = self.read("train", i, centre_crop)
            if image is not None:
                image = image.double().flatten(1) / 255  # (3, pixels)
                sums += torch.stack([image.sum(dim=1), image.square().sum(dim=1)])
                n_pixels += image.size(1)
        if n_pixels == 0:
            raise DataError(f"{self.name}: none of {n} training files could be decoded")
        mean, std = mean_and_std(sums, n_pixels)
        write_whole(path, json.dumps([mean.flatten().tolist(), std.flatten().tolist()]))
        return mean, std


def fingerprint(shape, files):
    """Changes when the files do: their names, sizes and times."""
    stats = []
    for path in files:
        try:
            stat = os.stat(path)
            stats.append((path, stat.st_size, stat.st_mtime_ns))
        except OSError:  # a link that leads nowhere
            stats.append(path)
    return hashlib.sha256(repr([shape, stats]).encode()).hexdigest()[:16]


def write_whole(path, content):
    """Keep text or tensors for next time, whole or not at all; that a place cannot be written is
    no fault."""
    part = part_of(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if isinstance(content, str):
            with open(part, "w") as file:
                file.write(content)
        else:
            torch.save(content, part)
        os.replace(part, path)
    except (OSError, RuntimeError):
        pass
    finally:  # also when a signal ends the program
        if os.path.exists(part):
            os.remove(part)


def part_of(path):
    """A new name beside path, to write to before moving into place. What killed processes have left
    under such names is removed, an hour after they last wrote."""
    for old in glob.glob(f"{glob.escape(path)}.*.part"):
        with suppress(OSError):  # somebody else was faster
            if time.time() - os.path.getmtime(old) > 3600:
                os.remove(old)
    return f"{path}.{secrets.token_hex(4)}.part"


@quiet()
def read_image(path, crop, size):
    """The part crop(width, height) -> (left, top, right, bottom) of an image as (size, size, 3).

    What a file is decided by its content. Of what Pillow knows, some formats are programs, which
    it would have run by others: only FORMATS are opened.
    """
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        most = max(1 << 26, 100 * os.path.getsize(path))  # a photograph has fewer than 50 per byte
        if width * height > most:
            raise ValueError(f"{width} x {height} pixels, too many for a file of its size")
        if image.getexif().get(0x0112, 1) != 1:  # lies on its side
            image = ImageOps.exif_transpose(image)
            width, height = image.size
        box = crop(width, height)
        # A JPEG decodes at 1/2, 1/4 or 1/8 of its size for a fraction of the work: as small as will
        # still cover the crop.
        shrink = max(1.0, min(box[2] - box[0], box[3] - box[1]) / size)
        image.draft("RGB", (int(width / shrink), int(height / shrink)))
        sx, sy = image.width / width, image.height / height
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"pixels of mode {image.mode}, not of 8 bits")
        if image.mode not in ("RGB", "L"):
            image = image.convert("RGB")  # CMYK, palettes, transparency
        box = (box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box)
        return np.array(image.convert("RGB"))


def centre_crop(width, height):
    """The largest square in the middle."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_crop(rng, width, height):
    """8 to 100 % of the area with an aspect of 3/4 to 4/3, anywhere; the centre if none fits."""
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return centre_crop(width, height)


def find_images(folder):
    """All images under a folder, at any depth, through links, sorted."""
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add(os.path.realpath(place))
        folders.sort()  # of two links to one folder, the first counts
        names = [n for n in names if n.lower().endswith(IMAGES) and not n.startswith(".")]
        found += [os.path.join(place, name) for name in names]
    return sorted(found)


def imagenet(data_dir, image_size=256):
    """Folders train and val of images, or one folder of images, of which every twentieth is for
    validation."""
    root = os.path.join(data_dir, "imagenet")
    root = root if os.path.isdir(root) else data_dir
    splits = [os.path.join(root, split) for split in ("train", "val")]
    layout = "train/<class>/*.JPEG and val/<class>/*.JPEG, or images in one folder"
    if not os.path.isdir(root):
        raise DataError(f"{root}: no such folder; set --data_dir to a folder with {layout}")
    there = [os.path.isdir(path) for path in splits]
    if any(there) and not all(there):
        missing = splits[there.index(False)]
        raise DataError(f"{missing}: no such folder; {root} must have {layout}")
    files = [find_images(path) for path in splits] if all(there) else [find_images(root)]
    for path, found in zip(splits if all(there) else [root], files, strict=True):
        if not found:
            raise DataError(f"{path}: no images in it; set --data_dir to a folder with {layout}")
    if len(files) == 1:
        if len(files[0]) < 2:
            raise DataError(f"{root}: one image is not enough to train and to validate")
        files = [f for i, f in enumerate(files[0]) if i % 20], files[0][::20]
    return ImageFolder("imagenet", *files, image_size)


# ---------------------------------------------------------------------------------------------
# LAFAN1, motion of people retargeted to the Unitree H1 robot

LAFAN_URL = "https://huggingface.co/datasets/lvhaidong/LAFAN1_Retargeting_Dataset/resolve/main/h1/"
LAFAN_VAL = ("dance2_subject2", "fight1_subject2", "run2_subject1", "walk2_subject4")
LAFAN_FILES = {  # sha256
    "dance1_subject1": "741ffc4541e0b235528b662cc5d48444e51eb1f583a644104d0f77eb74aaa33a",
    "dance1_subject2": "879a41e51dff423a6f38ecd1c46e2200a3a0b49378295baae9b90bf45a3d0cc2",
    "dance1_subject3": "345f832292cd679d4ad0df4e8d470fbe2a59021665e05147557445d71710ec43",
    "dance2_subject1": "dd0bb1d670e10e922088039cfed0ffe6d92cfc679a5c5c4b7c67fa9d2dab484f",
    "dance2_subject2": "3d85b8805ee7dd60ae642fda7bcbc16f50cd51729b009310c57275776f48c4d5",
    "dance2_subject3": "7f923152099c51b5c991f4fbd15c306938107a3831ed07e0918cfb963cc868ab",
    "dance2_subject4": "cc9cc0b09833a9c76f1fa80fa011155401d2578c8f51214510c351e63f159ded",
    "dance2_subject5": "79131f6c85a47d940a34a9c80fc100e85d26bec0f94e19b911eb7289867112e3",
    "fallAndGetUp1_subject1": "3f3ce6dae557824cf8c403612fbe5cb638016a09b2e7e76afd5410a97b971eed",
    "fallAndGetUp1_subject4": "47b93bf42490ff86c4ac4165f8485ede096e0dcd663e688793587cebf3067663",
    "fallAndGetUp1_subject5": "304bf9f677023ee264090cfbc33692168c8e1218291c3e953c4d17dfe84fbf51",
    "fallAndGetUp2_subject2": "40d66b9518d87f4546111f08c7d3af47d8bff5fefeb5938c717bcf590a8e4911",
    "fallAndGetUp2_subject3": "0122a6356b49504608a4a5b3c69e89f01b56ecb4ff9d3ee252259b49baeb8c95",
    "fallAndGetUp3_subject1": "a13f9979f6198e2357fb75047dbeeac1de38f4b1332f40605f1a834d63bac03b",
    "fight1_subject2": "43cb12bcd690b99c3ad6c4d81131e386b3feb6c5eb667d5521c5d05f6d9b6e9e",
    "fight1_subject3": "3f3b02b77d22cc5d0fd1b8347e27847f951f6bbb8b35e32115a0331c2eaf2bab",
    "fight1_subject5": "1fdc44087a23300bd2a3998738b539f8074e0be7b7c8a4d0a3f82b604b714a32",
    "fightAndSports1_subject1": "79aeb659913b754fb69356a3e2d24fc08106791a80df4b131c144a87e908f86f",
    "fightAndSports1_subject4": "dc9225f5fdf0015d23f6e3db3f5d4047278b1c67eb3b18a461c13cc3ec6da6cf",
    "jumps1_subject1": "277ce96fb63f00732df09bc8372f1d09b7e955896528a87c88afd728464fa24a",
    "jumps1_subject2": "7ad7683dd2d5289fb37e5ee1b10c53a45f152f94e1f1236edd219cdca05d21f3",
    "jumps1_subject5": "6ed9772cdabbfb39f831b0fbe93bcc5f1876562ef8865370a24516a5d3742949",
    "run1_subject2": "f04071a7c590f7368ee2ea2d055ce259993c75cbf11dd041c257414e1f095f63",
    "run1_subject5": "a7b911995e0aded12dffe1bf49a104efadc7fd14aaf1b796053ce50f69f9df21",
    "run2_subject1": "579d6091313657390d1d74d478ba62fe39e07da1de2c627c4f524f95e5245f5b",
    "run2_subject4": "6221913b21e2f065cba8f7efc0d9b2fa19fffdaa470d497e97fe21927ec628c0",
    "sprint1_subject2": "8fa0d2d6ff808fde3bf735f09d96e803ecca879a86129696df162552bf1e22da",
    "sprint1_subject4": "6f3196c818c7114299b0cfdd3d4e3091f2f19243f8bfc709ca2d9f1534a73522",
    "walk1_subject1": "38ef42249a9e8a4c658a46ad00aaf00a61e28992b5da5a97ab3f032a935280bf",
    "walk1_subject2": "c290ee82e1493c8db8fe36a777d803ceb495d753f10569df334ef555941c07f6",
    "walk1_subject5": "a1a1ba3d66454a526dc60923738142099a534c6d946eb8090051e22bda70aec5",
    "walk2_subject1": "5abc173b40fd615df1f453d0ea4358abffd143cb5d817c3b2aaee4c9584ec4de",
    "walk2_subject3": "e61d392146b015e17696288d06a3a960e81b8b0f0b4eda92568f36232dab8e66",
    "walk2_subject4": "e9486c7c1884e76544dbd3b60c2e979a695e34031021fcc5433e89c7664f969a",
    "walk3_subject1": "97365395f9992b66e68ff906837821f7477ce19bbbcfe25c18cf01c78d6b0e0c",
    "walk3_subject2": "04bf99cad408b70c99ed64d0cf33bf1e595a4d6026be76a2bcfdb35ecc742a3c",
    "walk3_subject3": "ea6f3af5b9b7cfc8092e7ec6e4e13e83387318c6bd1b7fc8cc42e522e0540d89",
    "walk3_subject4": "6736207f56c5806b1e1fb0552fbefe8bc27170d5b7d7f20f561182797becee73",
    "walk3_subject5": "7a001fb33ac10037c5fd6bd340086fc9c796793cedb0bb1a58e48b1f432fcaeb",
    "walk4_subject1": "de335cb7a81988a43545be8e7bbe21ba066d9c1bc793f5e6372e44ff2870b559",
}
FRAMES, FPS = 32, 30  # of a segment; per second

# The robot's links: name, parent (0 is the pelvis, 1 the first link, ...), offset from the parent
# in metres, axis of the joint, tilt of the joint about x in radians, middle of the joint's range.
TILT = 2 * math.atan2(0.216438, 0.976296)
H1 = (
    ("left hip yaw", 0, (0, 0.0875, -0.1742), "z", 0, 0),
    ("left hip roll", 1, (0.039468, 0, 0), "x", 0, 0),
    ("left hip pitch", 2, (0, 0.11536, 0), "y", 0, -0.305),
    ("left knee", 3, (0, 0, -0.4), "y", 0, 0.895),
    ("left ankle", 4, (0, 0, -0.4), "y", 0, -0.175),
    ("right hip yaw", 0, (0, -0.0875, -0.1742), "z", 0, 0),
    ("right hip roll", 6, (0.039468, 0, 0), "x", 0, 0),
    ("right hip pitch", 7, (0, -0.11536, 0), "y", 0, -0.305),
    ("right knee", 8, (0, 0, -0.4), "y", 0, 0.895),
    ("right ankle", 9, (0, 0, -0.4), "y", 0, -0.175),
    ("torso", 0, (0, 0, 0), "z", 0, 0),
    ("left shoulder pitch", 11, (0.0055, 0.15535, 0.42999), "y", TILT, 0),
    ("left shoulder roll", 12, (-0.0055, 0.0565, -0.0165), "x", -TILT, 1.385),
    ("left shoulder yaw", 13, (0, 0, -0.1343), "z", 0, 1.575),
    ("left elbow", 14, (0.0185, 0, -0.198), "y", 0, 0.68),
    ("right shoulder pitch", 11, (0.0055, -0.15535, 0.42999), "y", -TILT, 0),
    ("right shoulder roll", 16, (-0.0055, -0.0565, -0.0165), "x", TILT, -1.385),
    ("right shoulder yaw", 17, (0, 0, -0.1343), "z", 0, -1.575),
    ("right elbow", 18, (0.0185, 0, -0.198), "y", 0, 0.68),
)


def multiply(a, b):
    """Quaternions (..., 4), real part first: first b's rotation, then a's."""
    (aw, av), (bw, bv) = ((q[..., :1], q[..., 1:]) for q in (a, b))
    real = aw * bw - (av * bv).sum(dim=-1, keepdim=True)
    return torch.cat(
        [real, aw * bv + bw * av + torch.linalg.cross(*torch.broadcast_tensors(av, bv))], dim=-1
    )


def conjugate(q):
    return q * q.new_tensor([1, -1, -1, -1])


def upper(q):
    """Of the two quaternions of a rotation, the one with w >= 0."""
    return q * torch.where(q[..., :1] < 0, -1.0, 1.0)


def rotate(q, v):
    """Vectors v (..., 3) turned by unit quaternions q (..., 4)."""
    w, u = q[..., :1], q[..., 1:]
    u, v = torch.broadcast_tensors(u, v)
    cross = 2 * torch.linalg.cross(u, v)
    return v + w * cross + torch.linalg.cross(u, cross)


def about(axis, angle):
    """The rotation by angle (...) about an axis "x", "y" or "z": (..., 4)."""
    q = angle.new_zeros(*angle.shape, 4)
    q[..., 0], q[..., 1 + "xyz".index(axis)] = (angle / 2).cos(), (angle / 2).sin()
    return q


def forward_kinematics(angles):
    """Joint angles (..., 19) -> positions (..., 19, 3) and orientations (..., 19, 4) of the links
    in the frame of the pelvis."""
    still = angles.new_tensor([1.0, 0, 0, 0]).expand(*angles.shape[:-1], 4)
    positions, turns = [angles.new_zeros(*angles.shape[:-1], 3)], [still]
    for j, (_, parent, offset, axis, tilt, _) in enumerate(H1):
        positions.append(positions[parent] + rotate(turns[parent], angles.new_tensor(offset)))
        joint = multiply(about("x", angles.new_tensor(tilt)), about(axis, angles[..., j]))
        turns.append(multiply(turns[parent], joint))
    return torch.stack(positions[1:], dim=-2), torch.stack(turns[1:], dim=-2)


def inverse_kinematics(turns):
    """Joint angles (..., 19) from the links' orientations (..., 19, 4), which need not be exact:
    what a joint cannot do is left out."""
    angles = []
    for j, (_, parent, _, axis, tilt, middle) in enumerate(H1):
        above = turns[..., parent - 1, :] if parent else turns.new_tensor([1.0, 0, 0, 0])
        joint = multiply(conjugate(above), turns[..., j, :])
        joint = multiply(about("x", turns.new_tensor(-tilt)), joint)
        angle = 2 * torch.atan2(joint[..., 1 + "xyz".index(axis)], joint[..., 0])
        angles.append(torch.remainder(angle - middle + math.pi, 2 * math.pi) + middle - math.pi)
    return torch.stack(angles, dim=-1)


@quiet()
def read_motion(path):
    """The frames of a file, (n, 26) float64: root position (3), quaternion x y z w, 19 angles."""
    advice = "delete the file to download it anew"
    try:
        frames = np.loadtxt(path, delimiter=",", ndmin=2, comments=None, encoding="utf-8")
    except (OSError, ValueError) as fault:
        reason = str(fault).splitlines()[0]
        raise DataError(f"{path}: cannot be read ({reason}); {advice}") from None
    if len(frames) < FRAMES:
        raise DataError(f"{path}: has {len(frames)} frames, must have at least {FRAMES}; {advice}")
    if frames.shape[1] != 26:
        raise DataError(f"{path}: has {frames.shape[1]} columns, must have 26; {advice}")
    fine = (abs(frames) < 10_000).all(axis=1)  # metres and radians
    if not fine.all():
        line = fine.argmin() + 1
        raise DataError(f"{path}, line {line}: a number is not finite or too large; {advice}")
    off = abs(np.linalg.norm(frames[:, 3:7], axis=1) - 1)
    if off.max() > 1e-3:
        line = off.argmax() + 1
        raise DataError(f"{path}, line {line}: columns 4 to 7 are no unit quaternion; {advice}")
    return frames


def motion_features(frames):
    """What does not depend on the segment: frames (n, 26) float64 -> link features (n, 133), root
    position (n, 3), orientation (n, 4), linear and angular velocity in its own frame (n, 6)."""
    frames = torch.from_numpy(frames)
    positions, turns = forward_kinematics(frames[:, 7:])
    links = torch.cat([positions, upper(turns)], dim=-1).flatten(1).float()  # (n, 19 * 7)
    place, q = frames[:, :3], frames[:, [6, 3, 4, 5]]
    q = q / q.norm(dim=1, keepdim=True)
    later = torch.arange(len(q)).add(1).clamp_max(len(q) - 1)
    earlier = torch.arange(len(q)).sub(1).clamp_min(0)
    seconds = (later - earlier).unsqueeze(1) / FPS
    speed = rotate(conjugate(q), place[later] - place[earlier]) / seconds
    turn = upper(multiply(conjugate(q[earlier]), q[later]))
    sine = turn[:, 1:].norm(dim=1, keepdim=True)
    angle = 2 * torch.atan2(sine, turn[:, :1])
    spin = turn[:, 1:] / sine.clamp_min(1e-12) * angle / seconds
    return links, place, q, torch.cat([speed, spin], dim=1)


class Motion(Examples):
    """Segments of 32 frames as features (32, 121): for each of 19 links its position and
    orientation in the frame of the pelvis; for the root its position and orientation relative to
    where the segment begins (on the ground below the first frame, x ahead), its linear and angular
    velocity. Columns that hardly vary in training (variance below 1e-5) are dropped: 25 of 146.
    """

    name, in_order, error_names = "lafan", True, ("cm", "degrees")

    def content(self):
        return [part.numpy() for parts in self.parts.values() for part in parts]

    def __init__(self, clips):
        """clips: for "train" and "val", the features of each file."""
        self.parts, self.starts = {}, {}
        for split, stride in (("train", 1), ("val", FRAMES)):
            self.parts[split] = [torch.cat(part) for part in zip(*clips[split], strict=True)]
            ends = np.cumsum([len(links) for links, *_ in clips[split]])
            begins = [0, *ends[:-1]]
            self.starts[split] = [
                torch.arange(a, b - FRAMES + 1, stride) for a, b in zip(begins, ends, strict=True)
            ]
        self.val_files = torch.arange(sum(map(len, self.starts["val"]))).split(
            [len(starts) for starts in self.starts["val"]]
        )  # the segments of each validation file
        self.starts = {split: torch.cat(starts) for split, starts in self.starts.items()}
        self.n_train, self.n_val = len(self.starts["train"]), len(self.starts["val"])
        # Statistics of training alone: links over all frames, the root over segments.
        links = self.parts["train"][0]
        every = self.starts["train"][:: FRAMES // 2]
        root = self.segments("train", every)[..., -13:].flatten(0, 1)
        mean, var = (torch.cat([f(links, 0), f(root, 0)]) for f in (torch.mean, torch.var))
        low = torch.cat([links.amin(dim=0), root.amin(dim=0)])
        high = torch.cat([links.amax(dim=0), root.amax(dim=0)])
        self.keep, self.all_mean = var >= 1e-5, mean
        self.shape = (FRAMES, int(self.keep.sum()))
        self.mean, self.std = (t[self.keep].float() for t in (mean, var.sqrt()))
        self.range = (high - low)[self.keep].float()

    def segments(self, split, starts):
        """Segments that begin at these frames: (N, 32, 146) float64, all columns."""
        index = starts.unsqueeze(1) + torch.arange(FRAMES)
        links, place, q, velocity = (part[index] for part in self.parts[split])
        origin, heading = self.origin(place[:, 0], q[:, 0])
        back = conjugate(heading).unsqueeze(1)  # (N, 1, 4)
        place, q = rotate(back, place - origin.unsqueeze(1)), multiply(back, q)
        # A rotation has two quaternions: take w >= 0 first, then go on without a jump.
        flips = (q[:, 1:] * q[:, :-1]).sum(dim=-1, keepdim=True).sign()
        first = torch.where(q[:, :1, :1] < 0, -1.0, 1.0).to(q)
        q = q * torch.cat([first, flips], dim=1).cumprod(dim=1)
        return torch.cat([links, place, q, velocity], dim=-1)

    def origin(self, place, q):
        """Where a segment begins: the point on the ground (N, 3), the rotation to its heading."""
        w, x, y, z = q.unbind(dim=-1)
        yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        return place * place.new_tensor([1, 1, 0]), about("z", yaw)

    def standardised(self, x):
        return (x[..., self.keep].float() - self.mean) / self.std

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's share of training batch `step`: (batch_size / world_size, *shape) float32."""
        index = train_indices(self.n_train, seed, step, batch_size)
        index = index[share(batch_size, rank, world_size)]
        return self.standardised(self.segments("train", self.starts["train"][index]))

    def val_examples(self, index):
        """Validation examples (n, *shape) float32, and which of the index they are: all."""
        return self.standardised(self.segments("val", self.starts["val"][index])), slice(None)

    def unit(self, x):
        """Standardised x in units in which each feature has a range of 1 in training."""
        return x * (self.std / self.range).to(x.device)

    def frames(self, x, origin=None):
        """The inverse: features (N, 32, 121) -> frames (N, 32, 26) float64 as in the files, in the
        world if origin (point, heading) is given."""
        full = self.all_mean.expand(*x.shape[:-1], -1).clone()
        full[..., self.keep] = (x.cpu().float() * self.std + self.mean).double()
        turns = full[..., :133].unflatten(-1, (19, 7))[..., 3:]
        angles = inverse_kinematics(turns / turns.norm(dim=-1, keepdim=True).clamp_min(1e-9))
        place, q = full[..., 133:136], full[..., 136:140]
        q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        if origin is not None:
            point, heading = (t.unsqueeze(1) for t in origin)
            place, q = rotate(heading, place) + point, multiply(heading, q)
        return torch.cat([place, q[..., [1, 2, 3, 0]], angles], dim=-1)

    def true_origin(self, index):
        """Where validation segments begin in the world."""
        start = self.starts["val"][index]
        return self.origin(self.parts["val"][1][start], self.parts["val"][2][start])

    def errors(self, x, mean):
        """Of joint positions in cm and of joint angles in degrees, after the inverse."""
        true, ours = self.frames(x), self.frames(mean)
        distance = (joint_positions(true) - joint_positions(ours)).norm(dim=-1)  # (N, 32, 20)
        angle = (true[..., 7:] - ours[..., 7:]).abs()
        angle = torch.minimum(angle, 2 * math.pi - angle) * 180 / math.pi
        return 100 * distance.mean(dim=(1, 2)), angle.mean(dim=(1, 2))


def joint_positions(frames):
    """Positions of the pelvis and the 19 links in the world: (..., 26) -> (..., 20, 3)."""
    positions, _ = forward_kinematics(frames[..., 7:])
    q = frames[..., None, [6, 3, 4, 5]]
    return torch.cat([frames[..., None, :3], rotate(q, positions) + frames[..., None, :3]], dim=-2)


def lafan(data_dir):
    """The 40 files in data_dir/lafan1/h1, downloaded if missing. Features are computed once and
    kept for next time."""
    folder = os.path.join(data_dir, "lafan1", "h1")
    paths = {name: os.path.join(folder, f"{name}.csv") for name in LAFAN_FILES}
    for name, path in paths.items():
        if not os.path.exists(path):
            download([f"{LAFAN_URL}{name}.csv"], path, LAFAN_FILES[name])
    key = fingerprint(["features, version 1", H1], list(paths.values()))
    cache = os.path.join(os.path.expanduser(CACHE_DIR), f"lafan_{key}.pt")
    try:
        clips = torch.load(cache, weights_only=True)
    except Exception:  # not there yet, or damaged
        clips = {"train": [], "val": []}
        for name, path in tqdm(paths.items(), desc="features", leave=False, disable=None):
            split = "val" if name in LAFAN_VAL else "train"
            clips[split].append(motion_features(read_motion(path)))
        write_whole(cache, clips)
    return Motion(clips)


DATASETS = {
    "glyphs": glyphs,
    "mnist": mnist,
    "cifar10": cifar10,
    "imagenet": imagenet,
    "lafan": lafan,
}


def example_shape(name, image_size):
    """What one x of a data set looks like, without a look at the files."""
    shapes = {
        "cifar10": (3, 32, 32),
        "imagenet": (3, image_size, image_size),
        "lafan": (FRAMES, 121),
    }
    return shapes.get(name, (1, 28, 28))


# ---------------------------------------------------------------------------------------------
# downloads


TIMEOUT = 20  # seconds without a byte after which a server is given up


def download(urls, path, sha256):
    """Fetch path from the first of urls that delivers the right bytes, asking each twice; move it
    into place whole."""
    name, faults = os.path.basename(path), {}
    part = part_of(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        for url in (*urls, *urls):
            try:
                with requests.get(url, stream=True, timeout=TIMEOUT) as reply:
                    reply.raise_for_status()
                    digest = hashlib.sha256()
                    size = reply.headers.get("content-length", "")
                    size = int(size) if size.isdecimal() else None
                    options = dict(unit="B", unit_scale=True, leave=False, disable=None)
                    bar = tqdm(total=size, desc=name, **options)
                    with bar, open(part, "wb") as file:
                        for block in reply.iter_content(1 << 16):
                            digest.update(block)
                            bar.update(file.write(block))
                        file.flush()
                        os.fsync(file.fileno())
            except requests.RequestException as fault:
                faults[url] = type(fault).__name__
                continue
            if digest.hexdigest() == sha256:
                os.replace(part, path)
                return
            faults[url] = "wrong content"
    except OSError as fault:
        raise DataError(
            f"{path}: cannot be written ({fault.strerror}); choose another --data_dir"
        ) from None
    finally:
        if os.path.exists(part):
            os.remove(part)
    faults = "; ".join(f"{url}: {fault}" for url, fault in faults.items())
    raise DataError(
        f"{name} is not in {os.path.dirname(path)} and no mirror delivered it "
        f"({faults}); put the file there by hand, set --data_dir to where it is, "
        "or take --dataset=glyphs, which needs no files"
    )
