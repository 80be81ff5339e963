"""Data sets: find or download, check, decode, and serve batches as a function of (seed, step).

    glyphs    letters and digits in Pillow's built-in font, drawn at the start; no network, no files
    mnist     the four IDX files, in data_dir/mnist
    cifar10   the official archive of binary files, or the same unpacked, in data_dir/cifar10
    imagenet  train/<class>/*.JPEG and val/<class>/*.JPEG, in data_dir/imagenet or in data_dir
              itself; or any folder of images
    lafan     motion: the CSV files of LAFAN1 on the Unitree H1, in data_dir/lafan1/h1

Published files are downloaded if they are missing, and must have the published sha256. Batches and
their noise do not depend on the number of processes that share them. N examples are in a batch, or
in this process's part of it; x is (N, *shape), images as uint8.
"""

import atexit
import glob
import gzip
import hashlib
import math
import os
import signal
import string
import tarfile
import warnings
from contextlib import suppress
from functools import lru_cache, partial
from weakref import WeakMethod

import numpy as np
import requests
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps
from torch.utils.data import DataLoader

import motion
from configurator import UserError
from models import Scale
from run import save, write

DATA_DIR = os.environ.get("DAPS_DATA", "~/.cache/daps")
CACHE_DIR = os.environ.get("DAPS_CACHE", "~/.cache/daps")  # for computed files
N_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

# ---------------------------------------------------------------------------------------------
# batches and noise: pure functions of (seed, step) and the number of an example in its batch

TRAIN_ORDER, TRAIN_NOISE, VAL_NOISE, TRAIN_CROP = range(4)  # separate streams of randomness


def share(n, rank, world_size):
    """The slice of n examples that belongs to this process."""
    return slice(n * rank // world_size, n * (rank + 1) // world_size)


@lru_cache(maxsize=2)
def epoch_order(n, seed, epoch):
    return np.random.default_rng([seed, TRAIN_ORDER, epoch]).permutation(n)


def train_indices(n, seed, step, batch_size):
    """Batch `step` of an endless sequence of shuffled epochs over n examples: (batch_size,)."""
    count = np.arange(step * batch_size, (step + 1) * batch_size)  # examples since step 0
    epochs = range(count[0] // n, count[-1] // n + 1)
    parts = [epoch_order(n, seed, e)[count[count // n == e] % n] for e in epochs]
    return torch.from_numpy(np.concatenate(parts))


def uniform_noise(stream, seed, step, numbers, shape):
    """Noise (n, *shape), uniform in [0, 1), for the examples with these numbers (n,) in a batch.
    Entry j of example i is a hash of (stream, seed, step, i, j): the same on every device."""
    keys = np.random.SeedSequence([seed, stream, step]).generate_state(4, np.uint32)
    k = keys.view(np.int32).tolist()
    i = numbers.to(torch.int32).unsqueeze(1)
    j = torch.arange(math.prod(shape), dtype=torch.int32, device=numbers.device)
    a, b = mix(mix(i ^ k[0]) + k[1]), mix(mix(i ^ k[2]) + k[3])  # two random words per example
    return to_uniform(mix(mix(j ^ a).add_(b))).view(len(i), *shape)


def mix(h):
    """lowbias32, a hash of 32-bit integers (Wellons 2018), in place; masks make shifts logical."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x7FEB352D
    h ^= (h >> 15) & 0x1FFFF
    h *= 0x846CA68B - 2**32
    h ^= (h >> 16) & 0xFFFF
    return h


def to_uniform(h):
    """The upper 24 bits of h, overwritten, as a number in [0, 1)."""
    return h.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().div_(2**24)


def on_device(x, device):
    """Examples as read -> float32 on the device, pixels in [0, 1]."""
    x = x.pin_memory() if "cuda" in str(device) else x  # makes the copy to a GPU asynchronous
    x = x.to(device, non_blocking=True)
    return x.float() / 255 if x.dtype == torch.uint8 else x


class Dataset:
    """Base of the data sets. Each has name, shape (of one x as networks see it), n_train, n_val,
    scale (standardises x) and two methods:

    read(split, index, keys)  examples of "train" or "val" and their labels: (N, ...), (N,); with
                              keys, the seeds of each, they are randomly augmented
    content(split)            arrays or bytes that change when the data do
    """

    slow_to_read = False  # whether reading needs worker processes
    in_order = False  # whether neighbours in the validation set are alike
    n_labels = 0
    error_names = ()

    def train_batch(self, seed, step, batch_size, part=slice(None)):
        """This part of training batch `step`."""
        index = train_indices(self.n_train, seed, step, batch_size)[part]
        keys = [(seed, TRAIN_CROP, step, i) for i in range(batch_size)[part]]
        return self.read("train", index, keys)

    def train_batches(self, seed, steps, batch_size, part=slice(None), n_workers=0):
        """This part of the training batches of a range of steps."""
        read = partial(self.train_batch, seed, batch_size=batch_size, part=part)
        return self.read_ahead(read, steps, n_workers)

    def val_batches(self, index, batch_size, n_workers=0):
        """The validation examples at index, in batches: their part of index, x and labels."""
        parts = index.split(batch_size) if len(index) else ()
        return self.read_ahead(lambda part: (part, *self.read("val", part)), parts, n_workers)

    def read_ahead(self, read, keys, n_workers):
        """read(key) for each key, in order; if slow, ahead by processes, at most one per core."""
        if n_workers == 0 or not self.slow_to_read or not hasattr(os, "fork"):
            return map(read, keys)
        options = dict(multiprocessing_context="fork", worker_init_fn=ignore_signals)
        options |= dict(num_workers=min(n_workers, N_CORES), pin_memory=torch.cuda.is_available())
        batches = iter(DataLoader(keys, batch_size=None, collate_fn=read, **options))
        stop = WeakMethod(batches._shutdown_workers)  # Python would send a signal they ignore
        atexit.register(lambda: (stop() or bool)())
        return batches

    def val_index(self, limit=0):
        """`limit` validation examples, 0 for all: the first or, in ordered sets, evenly spaced."""
        n = min(limit or self.n_val, self.n_val)
        return torch.arange(n) * self.n_val // n if self.in_order else torch.arange(n)

    def key(self, *splits):
        """A short text that changes when these splits do."""
        return digest(*(part for split in splits for part in self.content(split)))

    def errors(self, x, p):
        """More measures of how far p.mean is from x: (N,) for each of error_names."""
        return ()


def ignore_signals(worker):
    """Ctrl-C and schedulers signal every process; a worker ends with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def digest(*parts):
    """A short hash of arrays or bytes."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part if isinstance(part, bytes) else np.ascontiguousarray(part))
    return sha256.hexdigest()[:16]


@lru_cache(maxsize=1)
def load_dataset(name, data_dir="", image_size=256):
    """A data set by name, from DATA_DIR or another folder; image_size is that of imagenet."""
    options = {"image_size": image_size} if name == "imagenet" else {}
    return DATASETS[name](os.path.expanduser(data_dir or DATA_DIR), **options)


# ---------------------------------------------------------------------------------------------
# files: published and cached


def fetch(path, mirrors, sha256):
    """The bytes of a published file, from path or, if nothing is there, downloaded to it."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            body = file.read()
        if hashlib.sha256(body).hexdigest() == sha256:
            return body
        raise UserError(f"{path} is not the published file (damaged?); delete it to re-download")
    for mirror in mirrors:
        print(f"downloading {mirror}{os.path.basename(path)}", flush=True)
        with suppress(requests.RequestException):
            body = requests.get(mirror + os.path.basename(path), timeout=20).content
            if hashlib.sha256(body).hexdigest() == sha256:
                write(path, body)
                return body
    advice = "put it there by hand, or set --data_dir to where it is"
    raise UserError(f"{path} is missing and could not be downloaded; {advice}")


def read_hashes(name, suffix=""):
    """{file without suffix: sha256} of assets/<name>.sha256, for the tool `sha256sum -c`."""
    with open(os.path.join(os.path.dirname(__file__), "assets", f"{name}.sha256")) as file:
        return {name.removesuffix(suffix): sha256 for sha256, name in map(str.split, file)}


def cached(name, compute):
    """compute(), tensors and plain types, or what it returned before, kept in the cache folder."""
    path = os.path.join(os.path.expanduser(CACHE_DIR), name)
    with suppress(Exception):  # not there yet, or damaged
        return torch.load(path, map_location="cpu", weights_only=True)
    content = compute()
    with suppress(OSError):  # a full disk: it is computed again next time
        save(path, content)
    return content


# ---------------------------------------------------------------------------------------------
# data sets in memory: glyphs, MNIST, CIFAR-10


class ArrayDataset(Dataset):
    """Images (n, C, height, width) and labels (n,), as uint8."""

    def __init__(self, name, x_train, y_train, x_val, y_val, scale=None):
        self.name, self.n_train, self.n_val = name, len(x_train), len(x_val)
        self.x_train, self.y_train, self.x_val, self.y_val = x_train, y_train, x_val, y_val
        self.shape, self.n_labels = tuple(x_train.shape[1:]), int(y_train.max()) + 1
        sample = x_train[:10_000].float() / 255  # binary images: one number each will do
        self.scale = scale or Scale(sample.mean().view(1, 1, 1), sample.std().view(1, 1, 1))

    def read(self, split, index, keys=None):
        x, y = self.content(split)
        return x[index], y[index].long()

    def content(self, split):
        return (self.x_train, self.y_train) if split == "train" else (self.x_val, self.y_val)


def glyphs(data_dir=None, n_train=20_000, n_val=2_000, seed=0):
    """62 letters and digits, 28 x 28, binary, each with a random affine map and stroke width."""
    characters = string.digits + string.ascii_uppercase + string.ascii_lowercase
    # Draw each character once per stroke width, at four times the size; transform it per example.
    masters = [[draw_glyph(c, stroke) for stroke in (0, 2, 4, 6)] for c in characters]
    rng, n = np.random.default_rng(seed), n_train + n_val
    y, stroke = rng.integers(len(characters), size=n), rng.integers(4, size=n)
    angle, shear = rng.uniform(-0.3, 0.3, size=(2, n))
    scale = rng.uniform(0.85, 1.2, size=(2, n)) * 28 / 112
    shift = rng.uniform(-2.0, 2.0, size=(2, n))
    c, s = np.cos(angle), np.sin(angle)
    forward = np.array([[c, c * shear - s], [s, s * shear + c]]) * scale  # rotation @ shear @ scale
    back = np.linalg.inv(forward.transpose(2, 0, 1))  # Pillow maps output pixels to source pixels
    affine = np.concatenate([back, 56 - back @ (14 + shift.T)[..., None]], axis=2)  # (n, 2, 3)
    x = np.empty((n, 1, 28, 28), np.uint8)
    for i in range(n):
        options = (Image.Transform.AFFINE, affine[i].flatten(), Image.Resampling.BICUBIC)
        x[i, 0] = 255 * (np.array(masters[y[i]][stroke[i]].transform((28, 28), *options)) > 127)
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype(np.uint8))
    return ArrayDataset("glyphs", x[:n_train], y[:n_train], x[n_train:], y[n_train:])


def draw_glyph(character, stroke):
    """One character, white on black, centred on 112 x 112."""
    page, font = Image.new("L", (112, 112)), ImageFont.load_default(88)
    ImageDraw.Draw(page).text((56, 56), character, 255, font, anchor="mm", stroke_width=stroke)
    glyph = page.crop(page.getbbox())
    page = Image.new("L", (112, 112))
    page.paste(glyph, ((112 - glyph.width) // 2, (112 - glyph.height) // 2))
    # Shrinking by four samples one pixel in sixteen: blur first, so that all of them count.
    return page.filter(ImageFilter.BoxBlur(1.5))


MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MNIST_FILES = read_hashes("mnist", ".gz")
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FOLDER = "cifar-10-batches-bin"  # in the archive, or unpacked beside it
CIFAR10_FILES = read_hashes("cifar10")


def mnist(data_dir):
    """MNIST, binarised at > 127."""
    parts = []
    for name, sha256 in MNIST_FILES.items():
        body = fetch(os.path.join(data_dir, "mnist", f"{name}.gz"), MNIST_MIRRORS, sha256)
        parts.append(torch.frombuffer(bytearray(gzip.decompress(body)), dtype=torch.uint8))
    # IDX: a header of 16 bytes before images, 8 before labels.
    x_train, x_val = (images[16:].view(-1, 1, 28, 28).gt(127).byte() * 255 for images in parts[::2])
    return ArrayDataset("mnist", x_train, parts[1][8:], x_val, parts[3][8:])


def cifar10(data_dir):
    """CIFAR-10 from its binary files: unpacked, if all are there, or from the archive."""
    folder = os.path.join(data_dir, "cifar10")
    paths = [os.path.join(folder, CIFAR10_FOLDER, name) for name in CIFAR10_FILES]
    if all(map(os.path.exists, paths)):
        bodies = [fetch(path, (), CIFAR10_FILES[os.path.basename(path)]) for path in paths]
    else:
        archive = os.path.join(folder, "cifar-10-binary.tar.gz")
        fetch(archive, [CIFAR10_URL], CIFAR10_SHA256)
        with tarfile.open(archive) as tar:
            bodies = [tar.extractfile(f"{CIFAR10_FOLDER}/{name}").read() for name in CIFAR10_FILES]
    # Each record is a label, then red, green and blue.
    records = torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.uint8).view(-1, 3073)
    x, y = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].contiguous()
    n = len(records) * 5 // 6  # the last file is for validation
    scale = Scale(*colour_statistics(x[:n]))
    return ArrayDataset("cifar10", x[:n], y[:n], x[n:], y[n:], scale)


def colour_statistics(x):
    """Mean and standard deviation (3, 1, 1) of pixels in [0, 1], from uint8 images (n, 3, ...)."""
    # Counts do not depend on the order of a sum.
    counts = torch.stack([x[:, c].flatten().bincount(minlength=256) for c in range(3)])  # (3, 256)
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, square = (counts.double() @ levels**power / x[:, 0].numel() for power in (1, 2))
    std = (square - mean.square()).clamp_min(1e-6).sqrt()
    return mean.view(3, 1, 1), std.view(3, 1, 1)


# ---------------------------------------------------------------------------------------------
# ImageNet, or any folder of images

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
warnings.filterwarnings("ignore", module="PIL")  # odd metadata; we report broken files ourselves
Image.MAX_IMAGE_PIXELS = 1 << 26  # Pillow refuses twice as many: a tiny file could fill the memory


class ImageFolder(Dataset):
    """Images on disk, decoded on demand: random resized crops and flips for training, the centre
    crop for validation. They have labels if in folders by class, and training has every class."""

    name = "imagenet"
    slow_to_read = in_order = True  # ordered by folder, so by class

    def __init__(self, train_files, val_files, image_size):
        self.files = {"train": train_files, "val": val_files}
        self.shape = (3, image_size, image_size)
        self.n_train, self.n_val = len(train_files), len(val_files)
        train, val = ({f.split(os.sep)[-2] for f in files} for files in self.files.values())
        self.classes = sorted(train) if len(train) > 1 and val <= train else []
        self.n_labels = len(self.classes)
        self.scale = Scale(*cached(f"scale_{self.key('train')}.pt", self.measure))

    def read(self, split, index, keys=None):
        keys = keys or [None] * len(index)
        pairs = [self.read_one(split, i, key) for i, key in zip(index.tolist(), keys, strict=True)]
        images, labels = zip(*pairs, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def read_one(self, split, i, key):
        """Image i (3, size, size) uint8 and its label; those of the next file that can be decoded
        if it cannot. key: the seed of a random crop and flip."""
        files = self.files[split]
        for j in range(i, i + len(files)):
            path = files[j % len(files)]
            rng = np.random.default_rng(key) if key else None
            try:
                image = read_image(path, self.shape[1], rng)
            except Exception as error:  # Pillow does not document what damaged files raise
                warnings.warn(f"{path} is skipped ({error})", stacklevel=1)  # shown once
                continue
            return image, self.classes.index(path.split(os.sep)[-2]) if self.classes else 0
        raise UserError(f"{self.name}: none of {len(files)} files could be decoded")

    def measure(self):
        """Statistics of the centre crops of up to 2,000 evenly spaced training images."""
        n = min(2000, self.n_train)
        return colour_statistics(self.read("train", torch.arange(n) * self.n_train // n)[0])

    def content(self, split):
        """Names, sizes and times of the files: reading millions of them would take hours."""
        stats = [(f, *os.stat(f)[6:9:2]) for f in self.files[split] if os.path.exists(f)]
        return [repr([self.shape, stats]).encode()]


def read_image(path, size, rng=None):
    """An image as (3, size, size) uint8: the centre crop or, with rng, a random one, half of them
    mirrored. The format follows from a file's content, not its name. Some formats that Pillow knows
    are programs, which it would pass to an interpreter, so only FORMATS are opened."""
    with Image.open(path, formats=FORMATS) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"pixels of mode {image.mode}, not of 8 bits")
        if image.getexif().get(0x0112, 1) != 1:  # rotated or flipped
            image = ImageOps.exif_transpose(image)
        width, height = image.size
        left, top, right, bottom = crop_box(width, height, rng)
        # A JPEG decodes at 1/2, 1/4 or 1/8 of its size for a fraction of the work: take the
        # smallest that still covers the crop.
        shrink = max(1.0, min(right - left, bottom - top) / size)
        image.draft("RGB", (int(width / shrink), int(height / shrink)))
        sx, sy = image.width / width, image.height / height
        box = (left * sx, top * sy, right * sx, bottom * sy)
        image = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
        image = ImageOps.mirror(image) if rng and rng.random() < 0.5 else image
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def crop_box(width, height, rng=None):
    """Left, top, right, bottom of the largest square in the middle or, with rng, of a rectangle of
    8 to 100 % of the area with an aspect ratio of 3/4 to 4/3, if one in ten fits."""
    for _ in range(10 if rng else 0):
        area = rng.uniform(0.08, 1.0) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def find_images(folder):
    """All images under a folder, at any depth, sorted."""
    found = glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)
    return sorted(f for f in found if f.lower().endswith(SUFFIXES))


def imagenet(data_dir, image_size=256):
    """Folders train and val, or one folder, every twentieth image of which is for validation."""
    root = os.path.join(data_dir, "imagenet")
    root = root if os.path.isdir(root) else data_dir
    train, val = (find_images(os.path.join(root, split)) for split in ("train", "val"))
    if not train and not val:
        files = find_images(root)
        train, val = [f for i, f in enumerate(files) if i % 20], files[::20]
    if not train or not val:
        found = f"{len(train)} images for training and {len(val)} for validation in {root}"
        layout = "train/<class>/*.JPEG and val/<class>/*.JPEG, or with images at any depth"
        raise UserError(f"{found}; set --data_dir to a folder with {layout}")
    return ImageFolder(train, val, image_size)


# ---------------------------------------------------------------------------------------------
# LAFAN1

LAFAN_URL = "https://huggingface.co/datasets/lvhaidong/LAFAN1_Retargeting_Dataset/resolve/main/h1/"
LAFAN_FILES = read_hashes("lafan1", ".csv")


class MotionDataset(Dataset):
    """Segments of motion relative to their origins, (32, 26); half are mirrored in training.
    error_names: distance of joints, difference of joint angles."""

    name, error_names = "lafan", ("cm", "degrees")
    slow_to_read = in_order = True

    def __init__(self, clips):  # {split: frames of each file}
        self.segments = {"train": motion.Segments(clips["train"], stride=1)}
        self.segments["val"] = motion.Segments(clips["val"], stride=motion.FRAMES)
        self.n_train, self.n_val = (len(segments) for segments in self.segments.values())
        self.scale = motion.FeatureScale.measure(self.segments["train"])
        self.shape = tuple(self.scale.std.shape)

    def read(self, split, index, keys=None):
        x = self.segments[split][index].float()
        if keys:
            chosen = torch.tensor([np.random.default_rng(key).random() < 0.5 for key in keys])
            x[chosen] = motion.mirrored(x[chosen])
        return x, torch.zeros(len(index), dtype=torch.long)

    def errors(self, x, p):
        return motion.frame_errors(x.double().cpu(), p.mean)

    def content(self, split):
        return [self.segments[split].clips]


def lafan(data_dir):
    """The 40 files in data_dir/lafan1/h1."""
    clips = {"train": [], "val": []}
    for name, sha256 in LAFAN_FILES.items():
        path = os.path.join(data_dir, "lafan1", "h1", f"{name}.csv")
        fetch(path, [LAFAN_URL], sha256)
        clips["val" if name in motion.LAFAN_VAL else "train"].append(motion.read_motion(path))
    return MotionDataset(clips)


DATASETS = {loader.__name__: loader for loader in (glyphs, mnist, cifar10, imagenet, lafan)}
