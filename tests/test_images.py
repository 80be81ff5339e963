"""CIFAR-10 and folders of images: real formats, real mess, exact batches."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from conftest import ROOT, environment, photograph, write_cifar
from PIL import Image

import data
from configurator import UserError
from data import CIFAR10_FOLDER, cifar10, imagenet, random_crop, read_image

# CIFAR-10


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Made-up CIFAR-10, unpacked in the folder a and as an archive in b: records (6, 20, 3073)."""
    unpacked = tmp_path / "a" / "cifar10" / CIFAR10_FOLDER
    archive = tmp_path / "b" / "cifar10" / "cifar-10-binary.tar.gz"
    records, hashes = write_cifar(unpacked)
    os.makedirs(archive.parent)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(unpacked, CIFAR10_FOLDER)
    monkeypatch.setattr(data, "CIFAR10_FILES", hashes)
    monkeypatch.setattr(data, "CIFAR10_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(data, "CIFAR10_URL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    return records


def test_cifar10_is_read_as_it_is_written_unpacked_or_not(tmp_path, small_cifar):
    for found in (cifar10(str(tmp_path / "a")), cifar10(str(tmp_path / "b"))):
        assert found.shape == (3, 32, 32) and (found.n_train, found.n_val) == (100, 20)
        assert np.array_equal(found.y_train.numpy(), small_cifar[:5, :, 0].flatten())
        assert np.array_equal(found.y_val.numpy(), small_cifar[5, :, 0])
        pixels = small_cifar[5, :, 1:].reshape(20, 3, 32, 32)
        x, _ = found.val_examples(torch.arange(20))
        assert np.array_equal(x.numpy(), pixels)
        x = found.unit(found.standardise(x))
        torch.testing.assert_close(x, torch.from_numpy(pixels) / 255)


def test_colour_is_standardised_per_channel_by_the_training_set(tmp_path, small_cifar):
    found = cifar10(str(tmp_path / "a"))
    x = found.standardise(found.train_examples(torch.arange(100)))
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(data.DATA_DIR, "cifar10")),
    reason="DAPS_DATA names no folder with CIFAR-10",
)
def test_the_real_cifar10_is_what_it_should_be():
    found = cifar10(data.DATA_DIR)
    assert (found.n_train, found.n_val) == (50_000, 10_000)
    assert found.y_train[:5].tolist() == [6, 9, 9, 4, 1]
    known = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(found.mean.flatten(), known[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(found.std.flatten(), known[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ("data_batch_2.bin", "test_batch.bin", "cifar-10-binary.tar.gz"))
def test_damaged_cifar10_is_refused_in_one_line(tmp_path, small_cifar, name):
    (path,) = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"^\S*/{name} is not the published file[^\n]*$"):
        for folder in "ab":
            cifar10(str(tmp_path / folder))


def test_an_unpacked_folder_that_is_not_complete_gives_way_to_the_archive(tmp_path, small_cifar):
    shutil.copytree(tmp_path / "a" / "cifar10", tmp_path / "b" / "cifar10", dirs_exist_ok=True)
    for folder in "ab":
        os.remove(tmp_path / folder / "cifar10" / CIFAR10_FOLDER / "data_batch_3.bin")
    assert cifar10(str(tmp_path / "b")).n_train == 100
    with pytest.raises(UserError, match="cifar-10-binary.tar.gz is not in"):
        cifar10(str(tmp_path / "a"))


# folders of images


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_mess(root):
    """A realistic folder: all modes and sizes, rotation, damage, other files."""
    for split in ("train", "val"):
        for i, name in enumerate(("a", "b/deep")):
            os.makedirs(root / split / name)
            photograph(300, 200, seed=i).save(root / split / name / "wide.JPEG")
            photograph(90, 400, seed=i).save(root / split / name / "tall.jpg")
        a, b = root / split / "a", root / split / "b" / "deep"
        photograph(120, 120, "L").save(a / "grey.JPEG")
        photograph(120, 100, "CMYK").save(a / "cmyk.jpg")
        photograph(20, 16).save(a / "tiny.png")
        photograph(64, 64).quantize(8).save(b / "palette.gif")
        photograph(64, 64, "RGBA").save(b / "clear.webp")
        exif = Image.Exif()
        exif[0x0112] = 6  # turn clockwise to stand upright
        photograph(300, 200).save(b / "lying.JPEG", exif=exif)
        whole = (a / "wide.JPEG").read_bytes()
        (a / "broken.JPEG").write_bytes(whole[: len(whole) // 2])
        (a / "empty.JPEG").write_bytes(b"")
        (a / "notes.txt").write_text("not an image")
        (a / "._wide.JPEG").write_text("left by another system")
        os.symlink(root / "nowhere", a / "dangling.JPEG")
        deep = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64))
        deep.save(a / "sixteen_bits.png")
    os.symlink(root / "train", root / "train" / "b" / "loop")


def test_a_messy_folder_is_read_and_what_is_broken_is_named_counted_and_skipped(
    tmp_path, cache, capsys
):
    write_mess(tmp_path / "imagenet")
    found = imagenet(str(tmp_path), image_size=32)
    assert found.shape == (3, 32, 32) and found.n_train == found.n_val == 14
    x = torch.cat([found.train_batch(0, step, 7) for step in range(8)])
    assert x.shape == (56, 3, 32, 32) and x.dtype == torch.uint8
    assert found.standardise(x).isfinite().all()
    batches = list(found.val_batches(5))
    assert [len(index) for _, index in batches] == [len(x) for x, _ in batches]
    kept = torch.cat([index for _, index in batches])
    assert len(kept) == 10 and not found.broken["val"][kept].any()
    assert found.broken["train"].sum() == found.broken["val"].sum() == 4
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 8 and all("is skipped" in line for line in warnings)
    for name in ("broken", "empty", "dangling", "sixteen_bits"):  # each once per split
        assert sum(f"/{name}." in line for line in warnings) == 2


def test_images_stand_upright_and_keep_their_colours(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(300, 200).save(tmp_path / "lying.JPEG", exif=exif)
    lying = read_image(tmp_path / "lying.JPEG", lambda w, h: (0, 0, w, h), 64)
    assert lying[:32, 32:].mean() > lying[:32, :32].mean() + 40  # top left went to top right
    photograph(640, 640).save(tmp_path / "rgb.png")
    photograph(640, 640, "CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    photograph(640, 640).save(tmp_path / "rgb.jpg", quality=95)
    exact, *others = (
        read_image(tmp_path / name, lambda w, h: (0, 0, w, h), 64).astype(float)
        for name in ("rgb.png", "cmyk.jpg", "rgb.jpg")
    )
    for other in others:
        assert abs(exact - other).mean() < 4


def test_decoding_small_makes_the_same_picture_as_decoding_large(tmp_path, monkeypatch):
    """JPEG draft mode, against Pillow's own crop and resize of the whole image."""
    photograph(1200, 900).save(tmp_path / "large.JPEG", quality=95)
    sizes, resize = [], Image.Image.resize

    def recorded(image, *arguments):
        sizes.append(image.size)
        return resize(image, *arguments)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    read_image(tmp_path / "large.JPEG", lambda w, h: (0, 0, w, h), 64)
    assert sizes == [(150, 113)]  # an eighth
    rng = np.random.default_rng(0)
    for _ in range(5):
        box = random_crop(rng, 1200, 900)
        ours = read_image(tmp_path / "large.JPEG", lambda w, h, box=box: box, 64).astype(float)
        with Image.open(tmp_path / "large.JPEG") as image:
            whole = np.array(image.resize((64, 64), Image.Resampling.BILINEAR, box)).astype(float)
        assert abs(ours - whole).mean() < 2


def test_only_formats_of_pictures_are_opened_and_only_of_a_likely_size(tmp_path, cache, capsys):
    """Whatever a file is called. The second one claims 150 million black pixels."""
    os.makedirs(tmp_path / "pictures")
    for i in range(4):
        photograph(20, 20).save(tmp_path / "pictures" / f"{i}.png")
    photograph(20, 20).save(tmp_path / "pictures" / "4.png", "EPS")  # a program
    Image.new("1", (15_000, 10_000)).save(tmp_path / "pictures" / "5.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    assert found.broken["train"].tolist() == [False, False, False, True, True]
    one, other = capsys.readouterr().err.splitlines()
    assert "4.png is skipped (cannot identify" in one
    assert "5.png is skipped (15000 x 10000 pixels" in other


def test_a_folder_of_which_nothing_can_be_decoded_any_more_ends_in_one_line(tmp_path, cache):
    """Also when a worker finds out: its error is raised here, and its last line counts."""
    os.makedirs(tmp_path / "pictures")
    for i in range(4):
        photograph(20, 20).save(tmp_path / "pictures" / f"{i}.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    for path in found.files["train"]:
        os.remove(path)
    for n_workers in (0, 1):
        with pytest.raises(UserError, match="imagenet: none of 3 files could be decoded\n?$"):
            next(found.train_batches(0, 0, 1, 2, 0, 1, n_workers))


def test_random_crops_have_the_areas_and_aspects_they_should():
    rng = np.random.default_rng(0)
    for width, height in ((500, 375), (100, 1000), (256, 256)):
        boxes = np.array([random_crop(rng, width, height) for _ in range(2000)])
        w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        assert boxes.min() >= 0 and boxes[:, 2].max() <= width and boxes[:, 3].max() <= height
        assert (w / h).min() > 0.74 and (w / h).max() < 1.34
        area = w * h / (width * height)
        assert area.min() >= 0.0799 and (area > 0.5).mean() > (0.3 if width > 100 else -1)


def test_batches_of_a_folder_are_functions_of_seed_and_step_whoever_reads_them(tmp_path, cache):
    write_mess(tmp_path / "imagenet")
    found = imagenet(str(tmp_path), image_size=16)
    plain = [found.train_batch(3, step, 6) for step in range(2, 6)]
    assert not torch.equal(plain[0], plain[1])
    assert not torch.equal(plain[0], found.train_batch(4, 2, 6))
    for n_workers in (0, 1, 2):
        read = found.train_batches(3, 2, 6, 6, 0, 1, n_workers)
        assert all(torch.equal(a, b) for a, b in zip(read, plain, strict=True))
    halves = [found.train_batch(3, 2, 6, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(halves), plain[0])
    ours = [x for x, _ in found.val_batches(4, n_workers=2)]
    assert torch.equal(torch.cat(ours), torch.cat([x for x, _ in found.val_batches(3)]))


def test_a_crop_is_flipped_half_of_the_time_and_never_the_same_twice(tmp_path, cache):
    os.makedirs(tmp_path / "pictures")
    for i in range(2):
        photograph(64, 64).save(tmp_path / "pictures" / f"{i}.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    x = torch.cat([found.train_batch(0, step, 10) for step in range(40)])
    x = found.standardise(x)  # red grows to the right
    slope = (x[:, 0, :, 8:] - x[:, 0, :, :8]).mean(dim=(1, 2))
    assert len(x.flatten(1).unique(dim=0)) == 400
    blue = x[:, 2].mean(dim=(1, 2))
    assert blue.std() > 0  # crops differ
    assert 0.3 < (slope > 0).float().mean() < 0.7


def test_any_folder_of_images_will_do(tmp_path, cache):
    os.makedirs(tmp_path / "holiday" / "beach")
    for i in range(41):
        photograph(40, 30, seed=i).save(tmp_path / "holiday" / "beach" / f"{i:02}.png")
    found = imagenet(str(tmp_path / "holiday"), image_size=16)
    assert (found.n_train, found.n_val) == (38, 3)
    assert not set(found.files["train"]) & set(found.files["val"])


def test_statistics_are_those_of_the_images_and_are_kept_until_the_files_change(
    tmp_path, cache, monkeypatch
):
    os.makedirs(tmp_path / "pictures")
    for i in range(6):
        photograph(32, 32, seed=i).save(tmp_path / "pictures" / f"{i}.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=32)
    pixels = np.stack([np.array(Image.open(path)) for path in found.files["train"]]) / 255
    np.testing.assert_allclose(found.mean.flatten(), pixels.mean(axis=(0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(found.std.flatten(), pixels.std(axis=(0, 1, 2)), atol=1e-5)
    (kept,) = cache.iterdir()
    torch.save((torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.ones(3, 1, 1)), kept)
    again = imagenet(str(tmp_path / "pictures"), image_size=32)
    assert again.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    for damage in ("damaged", ""):
        kept.write_text(damage)
        assert torch.equal(imagenet(str(tmp_path / "pictures"), image_size=32).mean, found.mean)
    photograph(32, 32, seed=9).save(tmp_path / "pictures" / "1.png")
    assert not torch.equal(imagenet(str(tmp_path / "pictures"), image_size=32).mean, found.mean)


def folder(tmp_path, kind):
    root = tmp_path / "imagenet"
    if kind == "nothing":
        return tmp_path / "none"
    os.makedirs(root / "train" / "a")
    if kind != "no val":
        os.makedirs(root / "val" / "a")
    if kind != "no images":
        photograph(20, 20).save(root / "train" / "a" / "x.png")
    if kind == "all broken":
        (root / "train" / "a" / "x.png").write_bytes(b"no image")
        photograph(20, 20).save(root / "val" / "a" / "x.png")
    return tmp_path


LAYOUTS = {
    "nothing": "no such folder; set --data_dir",
    "no val": "val: no such folder",
    "no images": "train: no images in it",
    "all broken": "none of 1 training files could be decoded",
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_folder_with_the_wrong_layout_is_refused_in_one_line(tmp_path, cache, kind):
    with pytest.raises(UserError, match=LAYOUTS[kind]) as caught:
        imagenet(str(folder(tmp_path, kind)))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(data.DATA_DIR, "imagenet")),
    reason="DAPS_DATA names no folder with ImageNet photographs",
)
def test_real_photographs_are_read(cache, capsys):
    found = imagenet(data.DATA_DIR)
    x = found.standardise(found.train_batch(0, 0, 8))
    assert x.shape == (8, 3, 256, 256) and 0.5 < x.std() < 2
    assert found.mean.min() > 0.3 and found.mean.max() < 0.6  # as photographs are
    assert not any(flags.any() for flags in found.broken.values())


@pytest.mark.parametrize("number", ("SIGINT", "SIGTERM"))
def test_signals_to_all_processes_do_not_end_the_workers(tmp_path, cache, number):
    """They continue until their parent is done: Ctrl-C, torchrun and schedulers signal all."""
    os.makedirs(tmp_path / "pictures")
    for i in range(4):
        photograph(20, 20, seed=i).save(tmp_path / "pictures" / f"{i}.png")
    script = (
        "import os, signal, sys, time; from data import imagenet\n"
        "found = imagenet(sys.argv[1], image_size=16)\n"
        f"signal.signal(signal.{number}, lambda *caught: None)\n"
        "batches = found.train_batches(0, 0, 100, 2, 0, 1, 2)\n"
        f"os.killpg(0, signal.{number})\n"  # while they start, and when they are at work
        "next(batches)\n"
        f"os.killpg(0, signal.{number})\n"
        "print(sum(len(x) for x in batches))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pictures")],
        cwd=ROOT,
        env=environment(DAPS_CACHE=str(cache)),
        start_new_session=True,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.strip() == "198", done.stderr


def test_folders_of_classes_give_labels_and_other_layouts_none(tmp_path, cache):
    for split, names in (("train", "ab"), ("val", "b")):
        for name in names:
            os.makedirs(tmp_path / split / name)
            photograph(40, 32, seed=1).save(tmp_path / split / name / "0.png")
    data = imagenet(str(tmp_path), image_size=16)
    assert data.y_train.tolist() == [0, 1] and data.y_val.tolist() == [1]
    os.rename(tmp_path / "val" / "b", tmp_path / "val" / "c")  # a class that is not in training
    assert not hasattr(imagenet(str(tmp_path), image_size=16), "y_train")
