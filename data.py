"""Data sets: find or download, check, decode, and serve batches as a function of (seed, step).

Batches and noise are drawn for the whole (global) batch, and each process keeps its slice: example
i of step t and its noise do not depend on the number of processes.

    glyphs    letters and digits drawn on the fly in Pillow's built-in font; no network, no files
    mnist     the four IDX files, from data_dir/mnist or downloaded there
    cifar10   the official binary files, from data_dir/cifar10 or downloaded there
    imagenet  train/<class>/*.JPEG and val/<class>/*.JPEG, in data_dir/imagenet or in data_dir
              itself; or any folder of images
    lafan     motion: the CSV files of LAFAN1 on the Unitree H1, from data_dir/lafan1 or downloaded

Colour images are standardised per channel by the training set, motion per feature; binary images
stay 0 and 1. Published files must have the published sha256, wherever they come from.
Readers return examples as stored, images as uint8; standardise() moves them to the device and
converts them to float32 there.

N examples in a batch or in this process's slice of it; x is (N, *shape).
"""

import copy
import functools
import gzip
import hashlib
import io
import math
import multiprocessing
import os
import signal
import string
import sys
import tarfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import requests
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps
from torch.utils.data import DataLoader
from tqdm import tqdm

import motion
from checkpoint import as_bytes, write
from configurator import UserError

DATA_DIR = os.environ.get("DAPS_DATA", "~/.cache/daps")
CACHE_DIR = os.environ.get("DAPS_CACHE", "~/.cache/daps")  # for computed files


class Dataset:
    """Base of the data sets. Each has `name`, `shape` (of one x), `n_train`, `n_val`, `mean` and
    `std` (to standardise x) and the methods

    train_examples(index)  training examples (N, *shape), not yet standardised (or train_batch)
    val_examples(index)    the same for validation, and which entries of index they are: unreadable
                           examples are left out
    content(split)         arrays or bytes that are the same on all machines if the data are
    """

    slow_to_read = False  # whether reading needs worker processes
    in_order = False  # whether neighbours in the validation set are alike
    white = 255  # brightest pixel value
    error_names = ()

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's slice of training batch `step`."""
        index = train_indices(self.n_train, seed, step, batch_size)
        return self.train_examples(index[rank_slice(batch_size, rank, world_size)])

    def train_batches(self, seed, first, last, batch_size, rank, world_size, n_workers):
        """This rank's slices of training batches first ... last - 1, read ahead by n_workers."""
        options = dict(batch_size=batch_size, rank=rank, world_size=world_size)
        read = functools.partial(self.train_batch, seed, **options)
        return read_ahead(read, range(first, last), n_workers if self.slow_to_read else 0)

    def val_batches(self, batch_size, rank=0, world_size=1, limit=0, n_workers=0):
        """This rank's part of the validation set, or of `limit` examples of it, in batches: x, and
        its indices within that part."""
        part = self.val_index(limit)
        part = part[rank_slice(len(part), rank, world_size)]

        def read(index):
            x, kept = self.val_examples(part[index])
            return x, index[kept]

        batches = torch.arange(len(part)).split(batch_size) if len(part) else ()
        yield from read_ahead(read, batches, n_workers if self.slow_to_read else 0)

    def val_index(self, limit=0):
        """The indices of `limit` validation examples: the first ones or, if neighbours are alike,
        evenly spaced ones; 0 means all."""
        n = min(limit or self.n_val, self.n_val)
        return torch.arange(n) * self.n_val // n if self.in_order else torch.arange(n)

    def to(self, device):
        """A copy of the data set that standardises on this device."""
        data = copy.copy(self)
        data.mean, data.std = self.mean.to(device), self.std.to(device)
        return data

    def standardise(self, x):
        """Examples as read -> float32 on the device, standardised. Pinned memory makes the copy to
        a GPU asynchronous."""
        x = x.pin_memory() if self.mean.is_cuda else x
        x = x.to(self.mean.device, non_blocking=True).float()
        return (x / self.white - self.mean) / self.std

    def unit(self, x):
        """Standardised x, rescaled so that the range of the signal is 1: pixels in [0, 1]."""
        return x * self.std + self.mean

    def input_scale(self):
        """Mean and standard deviation of x after standardise()."""
        return 0.0, 1.0

    def summary(self):
        """What processes that train together must agree on."""
        sizes = {"n_train": self.n_train, "n_val": self.n_val, "the shape of x": self.shape}
        scales = {"the mean of x": self.mean.cpu(), "the scale of x": self.std.cpu()}
        content = digest(*self.content("train"), *self.content("val"))
        return sizes | {"the content of the data": content} | scales

    def key(self):
        """A short text that changes when the validation set does."""
        return digest(*self.content("val"))

    def errors(self, x, mean):
        """More measures of how far reconstructions are from x: (N,) for each of error_names."""
        return ()


def digest(*parts):
    """A short hash of arrays or bytes."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part if isinstance(part, bytes) else np.ascontiguousarray(part))
    return sha256.hexdigest()[:16]


@dataclass
class ArrayDataset(Dataset):
    """Images in memory as uint8, from 0 to `white`, and labels as uint8."""

    name: str
    x_train: torch.Tensor  # (n_train, C, height, width)
    y_train: torch.Tensor  # (n_train,)
    x_val: torch.Tensor
    y_val: torch.Tensor
    white: int = 1
    mean: torch.Tensor = field(default_factory=lambda: torch.tensor(0.0))  # of [0, 1] pixels
    std: torch.Tensor = field(default_factory=lambda: torch.tensor(1.0))

    def __post_init__(self):
        self.n_train, self.n_val = len(self.x_train), len(self.x_val)
        self.shape = tuple(self.x_train.shape[1:])

    def train_examples(self, index):
        return self.x_train[index]

    def val_examples(self, index):
        return self.x_val[index], slice(None)

    def content(self, split):
        return [getattr(self, f"x_{split}").numpy()]

    def input_scale(self):
        if self.white > 1:
            return super().input_scale()
        x = self.x_train[:10_000].float()
        return x.mean().item(), x.std().item()


@functools.lru_cache(maxsize=1)
def load_dataset(name, data_dir=DATA_DIR, image_size=256):
    """A data set by name; image_size is for data sets with images of all sizes."""
    if name not in DATASETS:
        raise UserError(f'dataset is "{name}", must be one of: {", ".join(DATASETS)}')
    options = {"image_size": image_size} if name == "imagenet" else {}
    return DATASETS[name](os.path.expanduser(data_dir), **options)


# ---------------------------------------------------------------------------------------------
# batches and noise: pure functions of (seed, step) and the index in the global batch

TRAIN_ORDER, TRAIN_NOISE, VAL_NOISE, TRAIN_CROP = range(4)  # separate streams of randomness


def rank_slice(n, rank, world_size):
    """The slice of a batch of n that belongs to this rank."""
    return slice(n * rank // world_size, n * (rank + 1) // world_size)


@functools.lru_cache(maxsize=2)
def epoch_order(n, seed, epoch):
    return np.random.default_rng([seed, TRAIN_ORDER, epoch]).permutation(n)


def train_indices(n, seed, step, batch_size):
    """Batch `step` of an endless sequence of shuffled epochs over n examples: (batch_size,)."""
    count = np.arange(step * batch_size, (step + 1) * batch_size)  # examples since step 0
    epochs = range(count[0] // n, count[-1] // n + 1)
    return torch.from_numpy(
        np.concatenate([epoch_order(n, seed, e)[count[count // n == e] % n] for e in epochs])
    )


def uniform_noise(stream, seed, step, batch_size, shape, rank=0, world_size=1, device="cpu"):
    """This rank's slice of the noise (batch_size, *shape) of a batch: uniform in [0, 1), generated
    on the device.

    Number j of example i is a hash of (stream, seed, step, i, j), so it is the same on every
    device, for any number of processes and after a resume.
    """
    keys = np.random.SeedSequence([seed, stream, step]).generate_state(4, np.uint32)
    k = keys.view(np.int32).tolist()
    part = range(batch_size)[rank_slice(batch_size, rank, world_size)]
    i = torch.arange(part.start, part.stop, dtype=torch.int32, device=device).unsqueeze(1)
    j = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
    a, b = mix(mix(i ^ k[0]) + k[1]), mix(mix(i ^ k[2]) + k[3])  # two random words per example
    h = mix(mix(j ^ a).add_(b))
    return h.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().div_(2**24).view(len(i), *shape)


def mix(h):
    """A hash of 32-bit integers, in place: every bit of the result depends on every bit of h. The
    constants are those of lowbias32 (Wellons 2018); the masks make shifts logical."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x7FEB352D
    h ^= (h >> 15) & 0x1FFFF
    h *= 0x846CA68B - 2**32
    h ^= (h >> 16) & 0xFFFF
    return h


# ---------------------------------------------------------------------------------------------
# reading ahead

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def read_ahead(read, keys, n_workers):
    """read(key) for each key, in order, prefetched by worker processes; by this process if the
    system cannot fork."""
    if n_workers == 0 or "fork" not in multiprocessing.get_all_start_methods():
        return map(read, keys)
    loader = DataLoader(
        keys,
        batch_size=None,
        collate_fn=read,
        num_workers=n_workers,
        multiprocessing_context="fork",
        worker_init_fn=leave_signals_to_parent,
        pin_memory=torch.cuda.is_available(),
    )
    # Workers inherit the mask, so no signal reaches them before they have left the process group.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent(worker):
    """Ctrl-C and torchrun signal a whole process group; a worker should end with its parent."""
    os.setpgrp()
    while signal.sigpending() & STOP_SIGNALS:  # discard those that arrived before setpgrp
        signal.sigwait(STOP_SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# ---------------------------------------------------------------------------------------------
# files: published and cached

TIMEOUT = 20  # give up on a server after this many seconds without a byte


def fetch(path, urls, sha256):
    """The bytes of a published file: read from path or, if it does not exist, downloaded from the
    first of urls that works (each is tried twice) and saved at path. The hash must match."""
    folder, name = os.path.split(path)
    try:
        if os.path.exists(path):
            with open(path, "rb") as file:
                body = file.read()
            if hashlib.sha256(body).hexdigest() == sha256:
                return body
            advice = "delete it to re-download"
            raise UserError(f"{path} is not the published file (damaged?); {advice}")
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another --data_dir") from None
    errors = {}
    for url in (*urls, *urls):
        try:
            body = download(url, name)
        except requests.RequestException as error:
            errors[url] = type(error).__name__
            continue
        if hashlib.sha256(body).hexdigest() == sha256:
            write(path, body)
            return body
        errors[url] = "wrong content"
    errors = "; ".join(f"{url}: {error}" for url, error in errors.items())
    raise UserError(
        f"{name} is not in {folder} and no mirror delivered it ({errors}); put the file there by "
        "hand, set --data_dir to where it is, or use --dataset=glyphs, which needs no files"
    )


def download(url, name):
    """The bytes at a URL, downloaded with a progress bar."""
    with requests.get(url, stream=True, timeout=TIMEOUT) as reply:
        reply.raise_for_status()
        size = reply.headers.get("content-length", "")
        size = int(size) if size.isdecimal() else None
        options = dict(unit="B", unit_scale=True, leave=False, disable=None)
        body = bytearray()
        with tqdm(total=size, desc=name, **options) as bar:
            for block in reply.iter_content(1 << 16):
                body += block
                bar.update(len(block))
    return bytes(body)


def cached(name, compute):
    """compute(), tensors and plain types, or what it returned before, kept in the cache folder."""
    path = os.path.join(os.path.expanduser(CACHE_DIR), name)
    with suppress(Exception):  # not there yet, or damaged
        return torch.load(path, map_location="cpu", weights_only=True)
    content = compute()
    with suppress(UserError):  # a full disk: it is computed again next time
        write(path, as_bytes(torch.save, content))
    return content


def fingerprint(shape, files):
    """Changes when the files do: their names, sizes and times."""
    stats = []
    for path in files:
        try:
            stat = os.stat(path)
            stats.append((path, stat.st_size, stat.st_mtime_ns))
        except OSError:  # a broken link
            stats.append(path)
    return digest(repr([shape, stats]).encode())


# ---------------------------------------------------------------------------------------------
# glyphs


def glyphs(data_dir=None, n_train=20_000, n_val=2_000, seed=0):
    """62 letters and digits, 28 x 28, binary, each with a random affine map and stroke width."""
    characters = string.digits + string.ascii_uppercase + string.ascii_lowercase
    strokes = range(0, 7, 2)
    # Draw each letter once per stroke width, at four times the size; transform it per example.
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
        forward = np.array([[c, -s], [s, c]]) @ [[1, shear[i]], [0, 1]] @ np.diag(scale[:, i])
        back = np.linalg.inv(forward)  # PIL maps output pixels to source pixels
        offset = 56 - back @ (14 + shift[:, i])
        coefficients = (*back[0], offset[0], *back[1], offset[1])
        options = (Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC)
        x[i, 0] = np.asarray(masters[y[i]][stroke[i]].transform((28, 28), *options)) > 127
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype(np.uint8))
    return ArrayDataset("glyphs", x[:n_train], y[:n_train], x[n_train:], y[n_train:])


def draw_glyph(character, stroke):
    """One character, white on black, centred on 112 x 112."""
    page = Image.new("L", (112, 112))
    font = ImageFont.load_default(88)
    ImageDraw.Draw(page).text((56, 56), character, 255, font, anchor="mm", stroke_width=stroke)
    glyph = page.crop(page.getbbox())
    page = Image.new("L", (112, 112))
    page.paste(glyph, ((112 - glyph.width) // 2, (112 - glyph.height) // 2))
    # Shrinking by four samples one pixel in sixteen: blur first, so that all of them count.
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
    """MNIST, binarised at > 127."""
    parts = []
    for name, sha256 in MNIST_FILES.items():
        path = os.path.join(data_dir, "mnist", f"{name}.gz")
        body = fetch(path, [f"{mirror}{name}.gz" for mirror in MNIST_MIRRORS], sha256)
        parts.append(torch.frombuffer(bytearray(gzip.decompress(body)), dtype=torch.uint8))
    # IDX: a header of 16 bytes before images, 8 before labels.
    x_train, x_val = (images[16:].view(-1, 1, 28, 28).gt(127).byte() for images in parts[::2])
    y_train, y_val = (labels[8:] for labels in parts[1::2])
    return ArrayDataset("mnist", x_train, y_train, x_val, y_val)


# ---------------------------------------------------------------------------------------------
# CIFAR-10

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"  # in the archive, or unpacked beside it
CIFAR10_FILES = {  # sha256
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def cifar10(data_dir):
    """CIFAR-10 from its binary files: unpacked, if all are there, or from the archive."""
    folder = os.path.join(data_dir, "cifar10")
    paths = {name: os.path.join(folder, CIFAR10_FOLDER, name) for name in CIFAR10_FILES}
    if all(map(os.path.exists, paths.values())):
        bodies = [fetch(paths[name], (), sha256) for name, sha256 in CIFAR10_FILES.items()]
    else:
        archive = os.path.join(folder, os.path.basename(CIFAR10_URL))
        archive = io.BytesIO(fetch(archive, [CIFAR10_URL], CIFAR10_SHA256))
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            bodies = [tar.extractfile(f"{CIFAR10_FOLDER}/{name}").read() for name in CIFAR10_FILES]
    # Each record is a label, then red, green and blue.
    records = [torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies]
    records = [record.view(-1, 1 + 3 * 32 * 32) for record in records]
    train, val = torch.cat(records[:5]), records[5]
    y_train, y_val = (part[:, 0].contiguous() for part in (train, val))
    x_train, x_val = (part[:, 1:].reshape(-1, 3, 32, 32) for part in (train, val))
    # Count integers, so that the result does not depend on the order of a sum.
    n = x_train[:, 0].numel()
    counts = [torch.bincount(x_train[:, c].flatten(), minlength=256).double() for c in range(3)]
    levels = torch.arange(256, dtype=torch.float64) / 255
    sums = [[(count * power).sum() for count in counts] for power in (levels, levels.square())]
    scale = mean_and_std(torch.tensor(sums, dtype=torch.float64), n)
    return ArrayDataset("cifar10", x_train, y_train, x_val, y_val, 255, *scale)


def mean_and_std(sums, n):
    """Mean and standard deviation per channel of n pixels, from the sums of their values and
    squares (2, 3): (3, 1, 1) float32 each."""
    mean, square = sums / n
    std = (square - mean.square()).clamp_min(0).sqrt().clamp_min(1e-3)
    return mean.float().view(3, 1, 1), std.float().view(3, 1, 1)


# ---------------------------------------------------------------------------------------------
# ImageNet, or any folder of images

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class ImageFolder(Dataset):
    """Images on disk, decoded on demand: random resized crops and flips for training, the centre
    crop for validation.

    A file that cannot be decoded is reported, counted and skipped: in training the next file
    replaces it, in validation it is left out.
    """

    slow_to_read = in_order = True  # ordered by folder, so by class

    def __init__(self, name, train_files, val_files, image_size):
        self.name, self.files = name, {"train": train_files, "val": val_files}
        self.n_train, self.n_val = len(train_files), len(val_files)
        self.shape = (3, image_size, image_size)
        # One flag per file, shared by all workers.
        self.broken = {k: torch.zeros(len(f)).bool().share_memory_() for k, f in self.files.items()}
        self.mean, self.std = self.statistics()
        # Labels, if the images are in folders by class and validation has no other classes.
        folders = [
            [os.path.basename(os.path.dirname(f)) for f in files] for files in self.files.values()
        ]
        classes = {name: i for i, name in enumerate(sorted(set(folders[0])))}
        if len(classes) > 1 and set(folders[1]) <= classes.keys():
            self.y_train, self.y_val = (torch.tensor([classes[n] for n in f]) for f in folders)

    def read(self, split, i, crop):
        """Image i as (3, size, size) uint8, cropped to crop(width, height); None if broken."""
        path = self.files[split][i]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # we report broken files ourselves
                image = read_image(path, crop, self.shape[1])
            return torch.from_numpy(image).permute(2, 0, 1)
        except Exception as error:  # Pillow does not document what damaged files raise
            if not self.broken[split][i]:
                self.broken[split][i] = True
                reason = str(error).split("\n")[0] or type(error).__name__
                print(f"warning: {path} is skipped ({reason})", file=sys.stderr, flush=True)

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's slice of training batch `step`: each crop is a function of (seed, step) and
        its index in the global batch."""
        index = train_indices(self.n_train, seed, step, batch_size).tolist()
        x = []
        for number in range(batch_size)[rank_slice(batch_size, rank, world_size)]:
            for i in range(index[number], index[number] + self.n_train):
                rng = np.random.default_rng([seed, TRAIN_CROP, step, number])
                image = self.read("train", i % self.n_train, functools.partial(random_crop, rng))
                if image is not None:
                    break
            else:
                raise UserError(f"{self.name}: none of {self.n_train} files could be decoded")
            x.append(image.flip(2) if rng.random() < 0.5 else image)
        return torch.stack(x)

    def val_examples(self, index):
        images = [self.read("val", i, centre_crop) for i in index.tolist()]
        kept = [k for k, image in enumerate(images) if image is not None]
        x = [images[k] for k in kept] or torch.empty(0, *self.shape, dtype=torch.uint8)
        return torch.stack(x) if kept else x, kept

    def content(self, split):
        return [repr([os.path.basename(f) for f in self.files[split]]).encode()]

    def key(self):
        return fingerprint(self.shape, self.files["val"])

    def statistics(self, n=2000):
        """Mean and standard deviation of each channel, (3, 1, 1) each, over the centre crops of up
        to n evenly spaced training images."""
        n = min(n, self.n_train)
        index = [i * self.n_train // n for i in range(n)]
        key = fingerprint(self.shape, [self.files["train"][i] for i in index])
        return cached(f"statistics_{key}.pt", lambda: self.compute_statistics(index))

    def compute_statistics(self, index):
        sums, n_pixels = torch.zeros(2, 3, dtype=torch.float64), 0
        for i in tqdm(index, desc="statistics", leave=False, disable=None):
            image = self.read("train", i, centre_crop)
            if image is not None:
                image = image.double().flatten(1) / 255  # (3, pixels)
                sums += torch.stack([image.sum(dim=1), image.square().sum(dim=1)])
                n_pixels += image.size(1)
        if n_pixels == 0:
            raise UserError(f"{self.name}: none of {len(index)} training files could be decoded")
        return mean_and_std(sums, n_pixels)


def read_image(path, crop, size):
    """The part crop(width, height) -> (left, top, right, bottom) of an image as (size, size, 3).

    The format follows from a file's content, not its name. Some formats that Pillow knows are
    programs, which it would pass to an interpreter, so only FORMATS are opened.
    """
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        most = max(1 << 26, 100 * os.path.getsize(path))  # photographs: fewer than 50 per byte
        if width * height > most:
            raise ValueError(f"{width} x {height} pixels, too many for a file of its size")
        if image.getexif().get(0x0112, 1) != 1:  # rotated or flipped
            image = ImageOps.exif_transpose(image)
            width, height = image.size
        box = crop(width, height)
        # A JPEG decodes at 1/2, 1/4 or 1/8 of its size for a fraction of the work: take the
        # smallest that still covers the crop.
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
    """8 to 100 % of the area with an aspect ratio of 3/4 to 4/3; the centre crop if none fits."""
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return centre_crop(width, height)


def find_images(folder):
    """All images under a folder, at any depth, following links, sorted."""
    found, visited = [], set()
    for path, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(path) in visited:
            folders.clear()  # a link that leads back
            continue
        visited.add(os.path.realpath(path))
        folders.sort()  # of two links to a folder, the first counts
        names = [n for n in names if n.lower().endswith(IMAGES) and not n.startswith(".")]
        found += [os.path.join(path, name) for name in names]
    return sorted(found)


def imagenet(data_dir, image_size=256):
    """Image folders train and val, or one folder of images; every twentieth is then used for
    validation."""
    root = os.path.join(data_dir, "imagenet")
    root = root if os.path.isdir(root) else data_dir
    splits = [os.path.join(root, split) for split in ("train", "val")]
    layout = "train/<class>/*.JPEG and val/<class>/*.JPEG, or images in one folder"
    folders = splits if any(map(os.path.isdir, splits)) else [root]
    files = [find_images(folder) for folder in folders]
    for folder, found in zip(folders, files, strict=True):
        if not found:
            reason = "no images in it" if os.path.isdir(folder) else "no such folder"
            raise UserError(f"{folder}: {reason}; set --data_dir to a folder with {layout}")
    if len(files) == 1:
        if len(files[0]) < 2:
            raise UserError(f"{root}: one image is not enough to train and to validate")
        files = [f for i, f in enumerate(files[0]) if i % 20], files[0][::20]
    return ImageFolder("imagenet", *files, image_size)


# ---------------------------------------------------------------------------------------------
# LAFAN1


class MotionDataset(Dataset):
    """Segments of motion as (32, 121): the features of motion.Segments, standardised, without the
    25 of 146 that hardly vary in training (variance below 1e-5)."""

    name, white, error_names = "lafan", 1, ("cm", "degrees")
    slow_to_read = in_order = True

    def __init__(self, clips):
        """clips: for "train" and "val", motion_features of each file."""
        self.train = motion.Segments(clips["train"], stride=1)
        self.val = motion.Segments(clips["val"], stride=motion.FRAMES)
        self.n_train, self.n_val = len(self.train), len(self.val)
        self.all_mean, var, span = self.train.statistics()  # (146,) each
        self.keep = var >= 1e-5
        self.shape = (motion.FRAMES, int(self.keep.sum()))
        self.mean, self.std, self.range = (
            column[self.keep].float() for column in (self.all_mean, var.sqrt(), span)
        )

    def to(self, device):
        data = super().to(device)
        data.range = self.range.to(device)
        return data

    def train_examples(self, index):
        return self.train[index][..., self.keep].float()

    def val_examples(self, index):
        return self.val[index][..., self.keep].float(), slice(None)

    def unit(self, x):
        """Standardised x, rescaled so that each feature has a range of 1 in training."""
        return x * (self.std / self.range)

    def frames(self, x, origin=None):
        """The inverse: x (N, 32, 121) -> frames (N, 32, 26) float64 as in the files, in world
        coordinates if origin (point, heading) is given."""
        features = self.all_mean.expand(*x.shape[:-1], -1).clone()
        features[..., self.keep] = (x.float() * self.std + self.mean).double().cpu()
        return motion.features_to_frames(features, origin)

    def errors(self, x, mean):
        return motion.frame_errors(self.frames(x), self.frames(mean))

    def content(self, split):
        return [part.numpy() for part in getattr(self, split).parts]


def lafan(data_dir):
    """The 40 files in data_dir/lafan1/h1. Features are computed once and cached."""
    bodies = {}
    for name, sha256 in motion.LAFAN_FILES.items():
        path = os.path.join(data_dir, "lafan1", "h1", f"{name}.csv")
        bodies[name] = fetch(path, [f"{motion.LAFAN_URL}{name}.csv"], sha256)
    key = digest(repr(["features, version 1", motion.H1, motion.LAFAN_FILES]).encode())

    def features():
        clips = {"train": [], "val": []}
        for name, body in tqdm(bodies.items(), desc="features", leave=False, disable=None):
            split = "val" if name in motion.LAFAN_VAL else "train"
            frames = motion.read_motion(io.BytesIO(body))
            clips[split].append(motion.motion_features(frames))
        return clips

    return MotionDataset(cached(f"lafan_{key}.pt", features))


DATASETS = {loader.__name__: loader for loader in (glyphs, mnist, cifar10, imagenet, lafan)}


def example_shape(name, image_size):
    """The shape of one x of a data set, without reading its files."""
    shapes = {"cifar10": (3, 32, 32), "lafan": (motion.FRAMES, 121)}
    shapes["imagenet"] = (3, image_size, image_size)
    return shapes.get(name, (1, 28, 28))
