"""CIFAR-10 and folders of images: real formats, real mess, exact batches."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, TORCHRUN, environment, run, succeed
from PIL import Image
from test_train import assert_same_run, log_rows, refuse

import data
from data import CIFAR10_RECORD, DataError, cifar10, imagenet, random_crop, read_image
from eval import draw_reconstructions, load_checkpoint

# CIFAR-10


def write_cifar(folder, n=20, seed=0):
    """Six files in the official format, n records each; returns them all: (6, n, 3073)."""
    rng = np.random.default_rng(seed)
    records = rng.integers(256, size=(6, n, CIFAR10_RECORD), dtype=np.uint8)
    records[..., 0] %= 10
    os.makedirs(folder, exist_ok=True)
    for i, part in enumerate(records, 1):
        name = "test_batch.bin" if i == 6 else f"data_batch_{i}.bin"
        with open(os.path.join(folder, name), "wb") as file:
            file.write(part.tobytes())
    return records


def archive(folder, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-bin")


def test_cifar10_is_read_as_it_is_written_unpacked_or_not(tmp_path):
    records = write_cifar(tmp_path / "a" / "cifar10" / "cifar-10-batches-bin")
    archive(
        tmp_path / "a" / "cifar10" / "cifar-10-batches-bin",
        tmp_path / "b" / "cifar10" / "cifar-10-binary.tar.gz",
    )
    for found in (cifar10(str(tmp_path / "a")), cifar10(str(tmp_path / "b"))):
        assert found.shape == (3, 32, 32) and (found.n_train, found.n_val) == (100, 20)
        assert np.array_equal(found.y_train.numpy(), records[:5, :, 0].flatten())
        pixels = records[5, :, 1:].reshape(20, 3, 32, 32)
        x, _ = found.val_examples(torch.arange(20))
        torch.testing.assert_close(found.unit(x), torch.from_numpy(pixels) / 255)


def test_colour_is_standardised_per_channel_by_the_training_set(tmp_path):
    write_cifar(tmp_path / "cifar10" / "cifar-10-batches-bin", n=50)
    found = cifar10(str(tmp_path))
    x = found.standardised(found.x_train)
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


def bad_cifar(tmp_path, fault):
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    target = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    write_cifar(folder)
    if fault == "missing":
        os.remove(folder / "data_batch_3.bin")
    elif fault == "cut short":
        (folder / "data_batch_2.bin").write_bytes((folder / "data_batch_2.bin").read_bytes()[:-1])
    elif fault == "label":
        (folder / "test_batch.bin").write_bytes(b"\x0b" + bytes(CIFAR10_RECORD - 1))
    else:
        archive(folder, target)
        if fault == "truncated archive":
            target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
        elif fault == "not an archive":
            target.write_bytes(b"<html>moved</html>")
        elif fault in ("link", "folder"):
            with tarfile.open(target, "w:gz") as tar:
                for name in (*data.CIFAR10_TRAIN, "test_batch.bin"):
                    member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                    member.type = tarfile.SYMTYPE if fault == "link" else tarfile.DIRTYPE
                    member.linkname = "/etc/passwd"
                    tar.addfile(member)
        subprocess.run(["rm", "-r", folder], check=True)


FAULTS = {
    "missing": "data_batch_3.bin: cannot be read",
    "cut short": "data_batch_2.bin: has 61,459 bytes, must have up to 10,000 records",
    "label": "test_batch.bin: has a label 11",
    "truncated archive": "tar.gz: cannot be read",
    "not an archive": "tar.gz: cannot be read",
    "link": "tar.gz: cannot be read",
    "folder": "tar.gz: cannot be read",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_cifar10_is_refused_in_one_line(tmp_path, fault):
    bad_cifar(tmp_path, fault)
    with pytest.raises(DataError, match=FAULTS[fault]) as caught:
        cifar10(str(tmp_path))
    assert "\n" not in str(caught.value) and "delete" in str(caught.value)


def test_members_of_an_archive_that_nobody_asked_for_are_never_written(tmp_path):
    write_cifar(tmp_path / "made")
    target = tmp_path / "data" / "cifar10" / "cifar-10-binary.tar.gz"
    archive(tmp_path / "made", target)
    with tarfile.open(tmp_path / "evil.tar", "w:gz") as tar:
        for name in ("../../escaped", "/tmp/escaped", "cifar-10-batches-bin/../../escaped"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        tar.add(tmp_path / "made", "cifar-10-batches-bin")
    os.replace(tmp_path / "evil.tar", target)
    before = sorted(tmp_path.rglob("*"))
    assert cifar10(str(tmp_path / "data")).n_train == 100
    assert sorted(tmp_path.rglob("*")) == before


# folders of images


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def photograph(width, height, mode="RGB", seed=0):
    """A smooth picture with a bright top left quarter."""
    y, x = np.mgrid[0:height, 0:width]
    rng = np.random.default_rng(seed)
    page = np.stack([x * 255 / width, y * 255 / height, rng.integers(60) + 0 * x], axis=2) / 2
    page[: height // 2, : width // 2] += 120
    return Image.fromarray(page.astype(np.uint8)).convert(mode)


def write_mess(root):
    """What real folders hold: all modes and sizes, rotation, damage, other files."""
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
    assert x.shape == (56, 3, 32, 32) and x.isfinite().all()
    batches = list(found.val_batches(5))
    assert [len(rows) for rows, _ in batches] == [len(x) for _, x in batches]
    assert sum(len(x) for _, x in batches) == 10
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
    ours = [x for _, x in found.val_batches(4, n_workers=2)]
    assert torch.equal(torch.cat(ours), torch.cat([x for _, x in found.val_batches(3)]))


def test_a_crop_is_flipped_half_of_the_time_and_never_the_same_twice(tmp_path, cache):
    os.makedirs(tmp_path / "pictures")
    for i in range(2):
        photograph(64, 64).save(tmp_path / "pictures" / f"{i}.png")
    found = imagenet(str(tmp_path / "pictures"), image_size=16)
    x = torch.cat([found.train_batch(0, step, 10) for step in range(40)])  # red grows to the right
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
    kept.write_text(json.dumps([[0.1, 0.2, 0.3], [1, 1, 1]]))
    again = imagenet(str(tmp_path / "pictures"), image_size=32)
    assert again.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    for damage in ("[damaged", "[[0.1], [1]]", "[[0, 0, 0], [0, 0, 0]]", "7"):
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
    with pytest.raises(DataError, match=LAYOUTS[kind]) as caught:
        imagenet(str(folder(tmp_path, kind)))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(data.DATA_DIR, "imagenet")),
    reason="DAPS_DATA names no folder with ImageNet photographs",
)
def test_real_photographs_are_read(cache, capsys):
    found = imagenet(data.DATA_DIR)
    x = found.train_batch(0, 0, 8)
    assert x.shape == (8, 3, 256, 256) and 0.5 < x.std() < 2
    assert found.mean.min() > 0.3 and found.mean.max() < 0.6  # as photographs are
    assert not any(flags.any() for flags in found.broken.values())


@pytest.mark.parametrize("number", ("SIGINT", "SIGTERM"))
def test_signals_to_all_processes_do_not_end_the_workers(tmp_path, cache, number):
    """They go on until their parent is done: Ctrl-C, torchrun and schedulers signal everyone."""
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


# training


SMALL = ("--n_tokens=16", "--vocab_size=16", "--width=16", "--n_heads=2", "--n_layers=1")
SMALL += ("--n_samples=3", "--warmup_steps=0", "--log_interval=1", "--lr=1e-3", "--mc_samples=2")
SMALL += ("--fsq_levels=4 4", "--batch_size=8", "--max_steps=6", "--eval_interval=3")


@pytest.fixture(scope="module")
def small_cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    write_cifar(folder / "cifar10" / "cifar-10-batches-bin", n=12)
    return f"--data_dir={folder}", "--dataset=cifar10"


@pytest.mark.parametrize("choice", ("--method=daps", "--method=fsq --resnet_encoder=True"))
def test_two_processes_train_a_resnet_as_one_does(tmp_path, small_cifar, choice):
    settings = (*SMALL, *small_cifar, *choice.split())
    succeed("train.py", *settings, f"--out_dir={tmp_path / 'one'}")
    succeed(*TORCHRUN, "train.py", *settings, f"--out_dir={tmp_path / 'two'}")
    for a, b in zip(*(log_rows(tmp_path / d) for d in ("one", "two")), strict=True):
        a, b = ({k: row[k] for k in ("reward", "log_px") if k in row} for row in (a, b))
        assert a == pytest.approx(b, rel=1e-3) and a


NORMALISE = """
import sys, torch, torch.distributed as dist
from models import BatchNorm
torch.manual_seed(0)
x, weights = 3 + 2 * torch.randn(8, 5, 4, 4), torch.randn(8, 5, 4, 4)
norm = BatchNorm(5)
torch.nn.init.normal_(norm.weight)
if "RANK" in __import__("os").environ:
    dist.init_process_group("gloo")
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    x, weights = x[part], weights[part]
x.requires_grad_()
y = norm(x)
(y * weights).sum().backward()
gradients = [norm.weight.grad, norm.bias.grad]
if dist.is_initialized():
    for g in gradients:
        dist.all_reduce(g)
    rank = dist.get_rank()
else:
    rank = "alone"
torch.save([y, x.grad, *gradients, norm.running_mean, norm.running_var], f"{sys.argv[1]}/{rank}.pt")
"""


def test_batchnorm_over_two_processes_is_that_of_torch_over_one(tmp_path):
    (tmp_path / "normalise.py").write_text(NORMALISE)
    path = {"PYTHONPATH": ROOT}
    succeed(tmp_path / "normalise.py", tmp_path, **path)
    succeed(*TORCHRUN, tmp_path / "normalise.py", tmp_path, **path)
    alone, *parts = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", 0, 1))
    for i in (0, 1):  # output and gradient of the input: each process has its half
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), alone[i])
    for part in parts:  # gradients of the parameters, running moments: both have the whole
        for ours, theirs in zip(part[2:], alone[2:], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_run_on_a_folder_resumes_exactly_whatever_the_number_of_workers(tmp_path):
    write_mess(tmp_path / "imagenet")
    settings = (*SMALL, f"--data_dir={tmp_path}", "--dataset=imagenet", "--image_size=32")
    settings += ("--method=daps_na",)
    cache = {"DAPS_CACHE": str(tmp_path / "cache")}
    output = succeed(
        "train.py", *settings, f"--out_dir={tmp_path / 'whole'}", "--n_workers=0", **cache
    )
    assert "FID: needs --fid_weights" in output
    command = ("train.py", *settings, f"--out_dir={tmp_path / 'parts'}")
    stopped = run("-c", STOP_AFTER_4, *command, "--n_workers=1", **cache)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    succeed(*command, "--n_workers=2", "--resume=True", **cache)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    picture = Image.open(tmp_path / "whole" / "reconstructions.png")
    assert picture.mode == "RGB"


STOP_AFTER_4 = """
import os, runpy, signal, sys, torch
step, calls = torch.optim.AdamW.step, []
def stop(*arguments, **options):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*arguments, **options)
torch.optim.AdamW.step = stop
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_broken_image_among_those_shown_leaves_the_pairs_together(tmp_path, cache):
    os.makedirs(tmp_path / "val")
    os.makedirs(tmp_path / "train")
    for i in range(40):
        photograph(64, 64, seed=i).save(tmp_path / "train" / f"{i:02}.png")
        photograph(64, 64, seed=i).save(tmp_path / "val" / f"{i:02}.png")
    (tmp_path / "val" / "03.png").write_bytes(b"no image")
    found = imagenet(str(tmp_path), image_size=64)
    same = types.SimpleNamespace(encoder=types.SimpleNamespace(n_tokens=1))
    same.encode, same.decode = lambda x, noise: x, lambda x: types.SimpleNamespace(mean=x)
    page = np.array(draw_reconstructions(same, found, "cpu"))
    rows = [page[4 + i * 68 : 68 + i * 68] for i in range(len(page) // 68)]
    assert len(rows) >= 4
    for above, below in zip(rows[::2], rows[1::2], strict=True):
        assert np.array_equal(above, below)


def test_a_folder_without_a_readable_validation_image_is_refused(tmp_path):
    write_mess(tmp_path / "imagenet")
    for path in (tmp_path / "imagenet" / "val").rglob("*.*"):
        if not path.is_dir():
            path.unlink()
    (tmp_path / "imagenet" / "val" / "a" / "x.png").write_bytes(b"no image")
    settings = (*SMALL, f"--data_dir={tmp_path}", "--dataset=imagenet", "--image_size=32")
    settings += ("--method=daps_na", f"--out_dir={tmp_path / 'run'}")
    done = run("train.py", *settings, DAPS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2
    assert "no validation example could be read" in done.stderr.splitlines()[-1]


POISON = """
import runpy, sys, torch
from models import ResNetDecoder
log_prob, calls = ResNetDecoder.log_prob, []
def poisoned(self, x, z):
    calls.append(1)
    if len(calls) == 3:
        x = x * float("inf")
        good = self.net[0].weight.data
        self.net[0].weight.data = good * float("inf")
    result = log_prob(self, x, z)
    if len(calls) == 3:
        self.net[0].weight.data = good
    return result
ResNetDecoder.log_prob = poisoned
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_step_that_is_not_finite_leaves_no_trace_in_running_moments(tmp_path, small_cifar):
    out_dir = tmp_path / "run"
    arguments = (*SMALL, *small_cifar, "--method=daps_na", f"--out_dir={out_dir}")
    done = run("-c", POISON, "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = log_rows(out_dir)
    assert rows[-2]["skipped"] == 1 and rows[-1]["log_px"] is not None
    model = load_checkpoint(out_dir / "last.pt")["model"]
    assert all(t.isfinite().all() for t in model.values())


def test_a_resume_with_other_data_is_refused(tmp_path, small_cifar):
    write_cifar(tmp_path / "cifar10" / "cifar-10-batches-bin", n=12, seed=1)
    out_dir = f"--out_dir={tmp_path / 'run'}"
    succeed("train.py", *SMALL, *small_cifar, out_dir)
    more = (f"--data_dir={tmp_path}", "--resume=True", "--max_steps=8")
    refuse(*SMALL, *small_cifar, out_dir, *more, match=("resume", "another mean or scale"))


def test_accumulation_changes_nothing_where_examples_do_not_meet(tmp_path):
    """RLOO on glyphs: no BatchNorm, no eta of the batch."""
    settings = (*TINY, "--method=rloo", "--max_steps=4", "--eval_interval=4", "--lr=1e-3")
    for parts in (1, 2, 4):
        out_dir = f"--out_dir={tmp_path / str(parts)}"
        succeed("train.py", *settings, f"--accumulate={parts}", out_dir)
    accumulated = (*settings, "--accumulate=2", f"--out_dir={tmp_path / 'processes'}")
    succeed(*TORCHRUN, "train.py", *accumulated)
    one, *others = (
        load_checkpoint(tmp_path / d / "last.pt")["model"] for d in ("1", "2", "4", "processes")
    )
    for other in others:
        for name, p in one.items():
            torch.testing.assert_close(other[name], p, atol=1e-5, rtol=0, msg=name)


def test_recomputing_trains_the_same_parameters(tmp_path, small_cifar):
    for pieces in (0, 3):
        out_dir = f"--out_dir={tmp_path / str(pieces)}"
        succeed("train.py", *SMALL, *small_cifar, f"--recompute={pieces}", out_dir)
    one, other = (load_checkpoint(tmp_path / d / "last.pt")["model"] for d in ("0", "3"))
    for name, p in one.items():
        torch.testing.assert_close(other[name], p, atol=1e-5, rtol=1e-4, msg=name)


def test_compiled_training_on_images_is_eager_training(tmp_path, small_cifar):
    """On the CPU, of the first step; what follows magnifies rounding."""
    settings = (*SMALL, *small_cifar, "--max_steps=2", "--eval_interval=2")
    for compiled in (False, True):
        out_dir = f"--out_dir={tmp_path / str(compiled)}"
        succeed("train.py", *settings, f"--use_compile={compiled}", out_dir)
    rows = zip(*(log_rows(tmp_path / d)[:2] for d in ("True", "False")), strict=True)
    for a, b in rows:
        assert a.pop("split") == b.pop("split")
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (("--n_tokens=12",), ("n_tokens is 12", "square")),
        (("--n_tokens=36",), ("n_tokens is 36", "square")),
        (("--method=daps_na", "--recompute=2"), ("recompute", "daps_na")),
        (("--method=gumbel", "--recompute=2"), ("recompute", "gumbel")),
        (("--method=ppo", "--accumulate=2"), ("accumulate", "ppo")),
        (("--accumulate=3",), ("batch_size", "accumulate = 3")),
        (("--method=daps", "--resnet_encoder=True"), ("resnet_encoder", "daps")),
        (("--lr_final=1.0",), ("lr_final", "between zero and lr")),
        (("--eval_examples=-1",), ("eval_examples", "zero (all) or more")),
        (("--dataset=imagenet", "--data_dir=/nowhere"), ("/nowhere", "no such folder")),
        (("--dataset=imagenet", "--image_size=4"), ("image_size", "at least 8")),
    ],
)
def test_settings_that_do_not_fit_images_are_refused_in_one_line(
    tmp_path, small_cifar, arguments, match
):
    refuse(*SMALL, *small_cifar, *arguments, f"--out_dir={tmp_path / 'run'}", match=match)
