"""CIFAR-10 and folders of images: real formats, real mess, exact batches."""

import hashlib
import os
import tarfile
import warnings
import weakref

import numpy as np
import pytest
import torch
from conftest import photograph, write_hashed, write_pictures
from PIL import Image
from scipy import stats

import data
from configurator import UserError
from data import CIFAR10_FOLDER, cifar10, crop_box, imagenet, read_image

# CIFAR-10


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Made-up CIFAR-10, unpacked in the folder a and as an archive in b: records (6, 20, 3073)."""
    unpacked = tmp_path / "a" / "cifar10" / CIFAR10_FOLDER
    archive = tmp_path / "b" / "cifar10" / "cifar-10-binary.tar.gz"
    rng, hashes = np.random.default_rng(0), {}
    records = rng.integers(256, size=(6, 20, 3073), dtype=np.uint8)
    records[..., 0] %= 10
    for name, part in zip(data.CIFAR10_FILES, records, strict=True):
        hashes[name] = write_hashed(unpacked / name, part.tobytes())
    os.makedirs(archive.parent)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(unpacked, CIFAR10_FOLDER)
    monkeypatch.setattr(data, "CIFAR10_FILES", hashes)
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(data, "CIFAR10_URL", "http://127.0.0.1:9/")
    return records


def test_cifar10_is_read_as_it_is_written_unpacked_or_not(tmp_path, small_cifar):
    images = small_cifar[..., 1:].reshape(6, 20, 3, 32, 32)
    for found in (cifar10(str(tmp_path / "a")), cifar10(str(tmp_path / "b"))):
        assert found.shape == (3, 32, 32) and (found.n_train, found.n_val) == (100, 20)
        assert np.array_equal(found.x_train, images[:5].reshape(100, 3, 32, 32))
        assert np.array_equal(found.x_val, images[5])
        assert np.array_equal(found.y_train, small_cifar[:5, :, 0].flatten())
        assert np.array_equal(found.y_val, small_cifar[5, :, 0])
        mean, std = (f(images[:5] / 255, axis=(0, 1, 3, 4)) for f in (np.mean, np.std))
        np.testing.assert_allclose(found.scale.mean.flatten(), mean, rtol=1e-6)
        np.testing.assert_allclose(found.scale.std.flatten(), std, rtol=1e-6)


# folders of images


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_messy_folder_is_read_and_what_is_broken_is_named_once_and_replaced(tmp_path):
    root = tmp_path / "imagenet"
    for split in ("train", "val"):
        a, b = root / split / "a", root / split / "b" / "deep"
        write_pictures(a, 1)
        write_pictures(b, 1, size=(90, 400))
        photograph(300, 200).save(a / "wide.JPEG")
        photograph(120, 120, "L").save(a / "grey.JPEG")
        photograph(120, 100, "CMYK").save(a / "cmyk.jpg")
        photograph(64, 64).quantize(8).save(b / "palette.gif")
        photograph(64, 64, "RGBA").save(b / "clear.webp")
        (a / "broken.JPEG").write_bytes((a / "wide.JPEG").read_bytes()[:2000])
        (a / "notes.txt").write_text("not an image")
        (a / "._wide.JPEG").write_text("left by another system")
        os.symlink(root / "nowhere", a / "dangling.JPEG")
        deep = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64))
        deep.save(a / "sixteen_bits.png")
        photograph(20, 20).save(a / "program.png", "EPS")  # for an interpreter
        Image.new("1", (15_000, 10_000)).save(a / "bomb.png")  # 150 million black pixels
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as in any program
        warnings.filterwarnings("ignore", module="PIL")
        found = imagenet(str(tmp_path), image_size=32)
        assert found.shape == (3, 32, 32) and found.n_train == found.n_val == 12
        x = torch.cat([found.train_batch(0, step, 12)[0] for step in range(3)])
        assert x.shape == (36, 3, 32, 32) and x.dtype == torch.uint8
        found.read("val", torch.arange(12))
    messages = [str(warning.message) for warning in caught]
    reasons = {"broken.JPEG": "truncated", "dangling.JPEG": "No such file", "program.png": "cannot"}
    reasons |= {"sixteen_bits.png": "not of 8 bits", "bomb.png": "150000000 pixels"}
    for name, reason in reasons.items():  # once per split
        assert sum(f"/{name} is skipped (" in m and reason in m for m in messages) == 2, name
    assert len(messages) == 10


def test_the_label_of_a_broken_image_is_that_of_the_picture_shown(tmp_path):
    """The last file of class a is broken: the first of class b takes its place."""
    for split in ("train", "val"):
        write_pictures(tmp_path / split / "a", 2)
        write_pictures(tmp_path / split / "b", 2, size=(30, 20))
        (tmp_path / split / "a" / "01.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="a/01.png is skipped"):
        found = imagenet(str(tmp_path), image_size=16)
        for split in ("train", "val"):
            x, y = found.read(split, torch.arange(4))
            assert torch.equal(x[1], x[2]) and y.tolist() == [0, 1, 1, 1] and found.n_labels == 2
        os.rename(tmp_path / "val" / "b", tmp_path / "val" / "c")  # a class that is not in training
        assert imagenet(str(tmp_path), image_size=16).n_labels == 0


def test_images_stand_upright_and_keep_their_colours(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to stand upright
    photograph(640, 640).save(tmp_path / "lying.JPEG", exif=exif, quality=95)
    photograph(640, 640).save(tmp_path / "rgb.png")
    photograph(640, 640, "CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    names = ("rgb.png", "cmyk.jpg", "lying.JPEG")
    exact, cmyk, lying = (read_image(tmp_path / name, 64).float() for name in names)
    assert (exact - cmyk).abs().mean() < 4
    assert (exact.rot90(-1, dims=(1, 2)) - lying).abs().mean() < 4
    assert (exact - lying).abs().mean() > 20


def test_decoding_small_makes_the_same_picture_as_decoding_large(tmp_path, monkeypatch):
    """JPEG draft mode, against Pillow's own crop and resize of the whole image."""
    path = tmp_path / "large.JPEG"
    photograph(1200, 900).save(path, quality=95)
    resize, sizes = Image.Image.resize, []
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "resize", lambda i, *a: (sizes.append(i.size), resize(i, *a))[1])
        read_image(path, 64)
    assert sizes == [(150, 113)]  # an eighth
    for seed in range(8):
        ours = read_image(path, 64, np.random.default_rng(seed)).permute(1, 2, 0).numpy()
        box = crop_box(1200, 900, np.random.default_rng(seed))
        with Image.open(path) as image:
            whole = np.array(image.resize((64, 64), Image.Resampling.BILINEAR, box)).astype(float)
        assert min(abs(ours - whole).mean(), abs(ours - whole[:, ::-1]).mean()) < 2  # or mirrored


def test_half_of_the_training_crops_are_mirrored_left_to_right_and_none_upside_down(
    tmp_path, monkeypatch
):
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(2, 16, 16, 3), dtype=np.uint8)  # no symmetry at all
    os.makedirs(tmp_path / "pictures")
    for i in range(2):
        Image.fromarray(pixels[i]).save(tmp_path / "pictures" / f"{i}.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=16)  # 0 is for validation
    assert np.array_equal(found.read("val", torch.arange(1))[0][0].permute(1, 2, 0), pixels[0])
    monkeypatch.setattr(data, "crop_box", lambda width, height, rng: (0, 0, width, height))
    x, _ = found.train_batch(0, 0, 400)
    x = x.permute(0, 2, 3, 1).numpy()
    plain = (x == pixels[1]).all(axis=(1, 2, 3))
    mirrored = (x == pixels[1][:, ::-1]).all(axis=(1, 2, 3))
    assert (plain ^ mirrored).all() and 150 < mirrored.sum() < 250  # five standard deviations


@pytest.mark.parametrize("width, height", ((500, 375), (100, 1000), (256, 256)))
def test_random_crops_have_any_area_aspect_and_place_that_they_should(width, height):
    rng = np.random.default_rng(0)
    left, top, right, bottom = np.array([crop_box(width, height, rng) for _ in range(2000)]).T
    w, h = right - left, bottom - top
    assert min(left.min(), top.min()) >= 0 and right.max() <= width and bottom.max() <= height
    assert (w / h).min() > 0.74 and (w / h).max() < 1.34
    area = w * h / (width * height)
    assert area.min() >= 0.0799 and (width == 100 or (area > 0.5).mean() > 0.3)
    if width != 100:  # where almost all fit: uniform over the places that are left
        for place in (left / (width - w), top / (height - h)):
            assert stats.kstest(place[(w < width) & (h < height)], "uniform").pvalue > 1e-6
    assert crop_box(100, 60) == (20, 0, 80, 60) and crop_box(60, 100) == (0, 20, 60, 80)


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_a_folder_of_which_nothing_can_be_decoded_ends_in_one_line(tmp_path):
    """Also when a worker finds out: its error is raised here, and its last line counts."""
    write_pictures(tmp_path / "pictures", 4)
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    for path in found.files["train"]:
        os.remove(path)
    for n_workers in (0, 1):
        with pytest.raises(UserError, match="imagenet: none of 3 files could be decoded\n?$"):
            next(found.train_batches(0, range(1), 2, n_workers=n_workers))


def test_batches_of_a_folder_are_functions_of_seed_and_step_whoever_reads_them(tmp_path):
    write_pictures(tmp_path / "pictures", 12)
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    plain = [found.train_batch(3, step, 6)[0] for step in range(2, 6)]
    assert not torch.equal(plain[0], found.train_batch(4, 2, 6)[0])
    assert len(torch.cat(plain).unique(dim=0)) == 24  # no crop twice
    for n_workers in (0, 2):
        read = found.train_batches(3, range(2, 6), 6, n_workers=n_workers)
        assert all(torch.equal(a, b) for (a, _), b in zip(read, plain, strict=True))
    read = weakref.ref(found.train_batches(3, range(2), 6, n_workers=2))
    assert read() is None  # readers that nobody uses end, and close their files
    halves = [found.train_batch(3, 2, 6, part)[0] for part in (slice(0, 3), slice(3, 6))]
    assert torch.equal(torch.cat(halves), plain[0])


def test_any_folder_of_images_will_do_and_others_are_refused_in_one_line(tmp_path):
    write_pictures(tmp_path / "holiday" / "beach", 41)
    found = imagenet(str(tmp_path / "holiday"), image_size=16)
    assert (found.n_train, found.n_val) == (38, 3)
    assert not set(found.files["train"]) & set(found.files["val"])
    assert found.val_index(2).tolist() == [0, 1]  # evenly spaced
    write_pictures(tmp_path / "half" / "train" / "a", 2)
    for name, counts in (("none", "0 images"), ("half", "2 images for training and 0 for")):
        with pytest.raises(UserError, match=f"^{counts}[^\n]*/{name}; set --data_dir[^\n]*$"):
            imagenet(str(tmp_path / name))


def test_statistics_are_those_of_the_images_and_are_kept_until_the_files_change(tmp_path, cache):
    write_pictures(tmp_path / "pictures", 6, size=(32, 32))
    found = imagenet(str(tmp_path / "pictures"), image_size=32)
    pixels = np.stack([np.array(Image.open(path)) for path in found.files["train"]]) / 255
    mean, std = found.scale.mean.flatten(), found.scale.std.flatten()
    np.testing.assert_allclose(mean, pixels.mean(axis=(0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(std, pixels.std(axis=(0, 1, 2)), atol=1e-5)
    (kept,), before = cache.iterdir(), (found.key("train"), found.key("val"))
    torch.save((torch.full((3, 1, 1), 0.1), torch.ones(3, 1, 1)), kept)
    again = imagenet(str(tmp_path / "pictures"), image_size=32)
    assert again.scale.mean.flatten().tolist() == pytest.approx([0.1, 0.1, 0.1])
    photograph(40, 32, seed=9).save(tmp_path / "pictures" / "01.png")
    changed = imagenet(str(tmp_path / "pictures"), image_size=32)
    assert changed.key("train") != before[0] and changed.key("val") == before[1]
    assert changed.scale.mean.max() > 0.2
