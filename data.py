"""Data sets: find or download, check, decode, and hand out batches as a function of (seed, step).

Batches and noise are drawn for the whole (global) batch, of which each process keeps its share:
example i of step t and its noise are the same whatever the number of processes.

    glyphs  letters and digits drawn on the spot with Pillow's built-in font; no network, no files
    mnist   the four IDX files, from data_dir/mnist or downloaded there
"""

import functools
import gzip
import hashlib
import math
import os
import string
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import requests
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm import tqdm

DATA_DIR = os.environ.get("DAPS_DATA", "~/.cache/daps")


class DataError(ValueError):
    """Something is wrong with a data set; the message is one line that says what to do."""


@dataclass
class Dataset:
    """Images as uint8 0/1, labels as uint8; `shape` is what one x looks like to the networks."""

    name: str
    x_train: torch.Tensor  # (n, C, height, width)
    y_train: torch.Tensor  # (n,)
    x_val: torch.Tensor
    y_val: torch.Tensor

    @property
    def shape(self):
        return tuple(self.x_train.shape[1:])

    def train_batch(self, seed, step, batch_size, rank=0, world_size=1):
        """This rank's share of training batch `step`: (batch_size / world_size, *shape) float32."""
        index = train_indices(len(self.x_train), seed, step, batch_size)
        return self.x_train[index[share(batch_size, rank, world_size)]].float()

    def val_batches(self, batch_size, rank=0, world_size=1):
        """This rank's part of the validation set, in order, in batches."""
        for x in self.x_val[share(len(self.x_val), rank, world_size)].split(batch_size):
            yield x.float()


@functools.lru_cache(maxsize=1)
def load_dataset(name, data_dir=DATA_DIR):
    if name not in DATASETS:
        raise DataError(f'dataset is "{name}", must be one of: {", ".join(DATASETS)}')
    return DATASETS[name](os.path.expanduser(data_dir))


# ---------------------------------------------------------------------------------------------
# batches and noise: pure functions of (seed, step) and the place in the global batch

TRAIN_ORDER, TRAIN_NOISE, VAL_NOISE = range(3)  # streams of randomness that never meet


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


def read_idx(path):
    """A gzipped IDX file of unsigned bytes as an array, if it is whole and of the promised size."""
    try:
        with gzip.open(path) as file:
            zero, kind, n_dims = struct.unpack(">HBB", file.read(4))
            if zero != 0 or kind != 8 or not 1 <= n_dims <= 3:
                raise ValueError("not an IDX file of bytes")
            shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
            size = math.prod(shape)
            if size > 1 << 30:
                raise ValueError(f"promises {size:,} bytes, too many to be true")
            body = file.read(size + 1)  # one more than promised, which must not be there
            if len(body) != size:
                found = "fewer" if len(body) < size else "more"
                raise ValueError(f"promises {size:,} bytes, holds {found}")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as fault:
        reason = f"cannot be read ({fault}); delete the file to download it anew"
        raise DataError(f"{path}: {reason}") from None
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


DATASETS = {"glyphs": glyphs, "mnist": mnist}


# ---------------------------------------------------------------------------------------------
# downloads


def download(urls, path, sha256):
    """Fetch path from the first of urls that delivers the right bytes; move it into place whole."""
    name, faults = os.path.basename(path), []
    part = f"{path}.{os.getpid()}.part"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        for url in urls:
            try:
                with requests.get(url, stream=True, timeout=20) as reply:
                    reply.raise_for_status()
                    digest = hashlib.sha256()
                    size = int(reply.headers.get("content-length", 0)) or None
                    bar = tqdm(total=size, unit="B", unit_scale=True, desc=name, leave=False)
                    with bar, open(part, "wb") as file:
                        for block in reply.iter_content(1 << 16):
                            digest.update(block)
                            bar.update(file.write(block))
            except requests.RequestException as fault:
                faults.append(f"{url}: {type(fault).__name__}")
                continue
            if digest.hexdigest() == sha256:
                os.replace(part, path)
                return
            faults.append(f"{url}: wrong content")
    except OSError as fault:
        raise DataError(
            f"{path}: cannot be written ({fault.strerror}); choose another --data_dir"
        ) from None
    finally:
        if os.path.exists(part):
            os.remove(part)
    raise DataError(
        f"{name} is not in {os.path.dirname(path)} and no mirror delivered it "
        f"({'; '.join(faults)}); put the file there by hand, set --data_dir to where it is, "
        "or take --dataset=glyphs, which needs no files"
    )
