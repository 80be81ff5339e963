"""data.py: batches are pure functions, published files are checked, downloads survive bad servers.

Images are in test_images.py, motion in test_motion.py.
"""

import hashlib
import os

import numpy as np
import pytest
import torch
from conftest import Server, write_mnist

import data
from configurator import UserError
from data import fetch, glyphs, load_dataset, rank_slice, train_indices


@pytest.fixture(scope="module")
def letters():
    return glyphs(n_train=300, n_val=60)


def test_glyphs_are_binary_and_the_same_every_time(letters):
    again = glyphs(n_train=300, n_val=60)
    assert letters.shape == (1, 28, 28)
    assert torch.equal(letters.x_train, again.x_train) and torch.equal(letters.y_val, again.y_val)
    assert set(letters.x_train.unique().tolist()) == {0, 1}
    assert not torch.equal(letters.x_train, glyphs(n_train=300, n_val=60, seed=1).x_train)


def test_glyphs_all_show_ink_inside_the_frame(letters):
    ink = letters.x_train.float().mean(dim=(1, 2, 3))
    assert ink.min() > 0.01 and ink.max() < 0.6
    border = letters.x_train.float()
    border[:, :, 1:-1, 1:-1] = 0
    assert border.mean() < 0.005
    assert letters.y_train.max() == 61 and len(letters.y_train.unique()) > 55


def test_glyphs_of_one_letter_differ_and_letters_can_be_told_apart():
    x, y = (lambda d: (d.x_train.float().flatten(1), d.y_train))(glyphs(n_train=4000, n_val=1))
    a = x[y == 10]
    assert len(a.unique(dim=0)) == len(a)
    # The nearest of the other images, pixel by pixel, is mostly of the same letter.
    near = torch.cdist(x[:300], x[300:]).argmin(dim=1)
    assert (y[300:][near] == y[:300]).float().mean() > 0.4


# batches and noise


def test_an_epoch_shows_every_example_once_also_when_batches_straddle_epochs():
    n, batch_size = 10, 4
    shown = torch.cat([train_indices(n, 0, step, batch_size) for step in range(5)])
    assert sorted(shown[:10].tolist()) == list(range(10))
    assert sorted(shown[10:].tolist()) == list(range(10))
    assert shown[:10].tolist() != shown[10:].tolist()


def test_a_batch_larger_than_the_data_set_goes_round():
    assert sorted(train_indices(3, 0, 1, 6).tolist()) == [0, 0, 1, 1, 2, 2]


def test_batches_are_a_function_of_seed_and_step(letters):
    assert torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(1, 7, 32))
    assert not torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(1, 8, 32))
    assert not torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(2, 7, 32))
    three = letters.train_batches(1, 6, 9, 32, 0, 1, 0)
    for step, x in zip(range(6, 9), three, strict=True):
        assert torch.equal(x, letters.train_batch(1, step, 32))


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_slices_of_all_ranks_make_the_whole_batch(letters, world_size):
    ranks = range(world_size)
    parts = [letters.train_batch(0, 5, 24, rank, world_size) for rank in ranks]
    assert torch.equal(torch.cat(parts), letters.train_batch(0, 5, 24))
    parts = [x for rank in ranks for x, _ in letters.val_batches(7, rank, world_size)]
    assert torch.equal(torch.cat(parts), letters.x_val.float())
    numbers = list(range(7))
    assert numbers[rank_slice(7, 0, 2)] + numbers[rank_slice(7, 1, 2)] == numbers


def test_validation_batches_say_which_of_their_ranks_part_they_are(letters):
    """Those of noise that was drawn for the part."""
    index = torch.cat([index for _, index in letters.val_batches(7, 1, 2)])
    assert index.tolist() == list(range(30))
    x = torch.cat([x for x, _ in letters.val_batches(7, limit=10)])
    assert torch.equal(x, letters.x_val[:10].float())


def test_data_that_differ_have_another_summary_and_another_key(letters):
    same, other = glyphs(n_train=300, n_val=60), glyphs(n_train=300, n_val=60, seed=1)
    assert same.summary() == letters.summary() != other.summary()
    assert same.key() == letters.key() != other.key()


def test_an_unknown_data_set_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="minst.*glyphs, mnist"):
        load_dataset("minst")


@pytest.mark.parametrize("name", ("glyphs", "mnist", "cifar10", "imagenet", "lafan"))
def test_the_shape_of_an_example_is_known_without_its_files(name):
    known = {"cifar10": (3, 32, 32), "imagenet": (3, 64, 64), "lafan": (32, 121)}
    assert data.example_shape(name, 64) == known.get(name, (1, 28, 28))


# MNIST


def test_mnist_is_read_and_binarised_above_127(tmp_path, monkeypatch):
    arrays, hashes = write_mnist(tmp_path / "mnist")
    monkeypatch.setattr(data, "MNIST_FILES", hashes)
    found = load_dataset("mnist", str(tmp_path))
    images = arrays["train-images-idx3-ubyte"]
    assert np.array_equal(found.x_train[:, 0].numpy(), images > 127)
    assert np.array_equal(found.y_train.numpy(), arrays["train-labels-idx1-ubyte"])
    assert np.array_equal(found.y_val.numpy(), arrays["t10k-labels-idx1-ubyte"])
    assert found.shape == (1, 28, 28) and (found.n_train, found.n_val) == (20, 20)


REAL_MNIST = os.path.join(os.environ.get("DAPS_DATA", ""), "mnist", "t10k-images-idx3-ubyte.gz")


@pytest.mark.skipif(not os.path.exists(REAL_MNIST), reason="DAPS_DATA names no folder with MNIST")
def test_the_real_mnist_is_what_the_hashes_say():
    found = load_dataset("mnist", os.environ["DAPS_DATA"])
    assert found.x_train.shape == (60_000, 1, 28, 28) and found.x_val.shape == (10_000, 1, 28, 28)
    assert found.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    assert 0.12 < found.x_train.float().mean() < 0.14


def test_mnist_with_other_images_in_it_is_refused(tmp_path):
    write_mnist(tmp_path / "mnist")
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz is not the published file"):
        data.mnist(str(tmp_path))


# published files, here or from a server on this machine

BODY = b"good" * 1000
GOOD = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server():
    server = Server({"/good.gz": BODY, "/bad.gz": b"<html>moved</html>"})
    yield server
    server.stop()


def test_a_file_that_is_there_is_used_and_nobody_is_asked(tmp_path, server):
    (tmp_path / "good.gz").write_bytes(BODY)
    assert fetch(str(tmp_path / "good.gz"), [f"{server.url}/good.gz"], GOOD) == BODY
    assert server.asked == []


DAMAGE = {
    "cut short": BODY[:-1],
    "too long": BODY + b"g",
    "bit flipped": b"gooe" + BODY[4:],
    "a page": b"<html>not found</html>",
    "empty": b"",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_not_the_published_one_is_named_in_one_line_and_left_alone(
    tmp_path, server, kind
):
    path = tmp_path / "good.gz"
    path.write_bytes(DAMAGE[kind])
    with pytest.raises(UserError, match=r"^[^\n]*/good\.gz is not the published[^\n]*delete it"):
        fetch(str(path), [f"{server.url}/good.gz"], GOOD)
    assert path.read_bytes() == DAMAGE[kind] and server.asked == []


def test_a_download_moves_on_from_bad_mirrors_and_arrives_whole(tmp_path, server):
    path = tmp_path / "new" / "good.gz"
    urls = [f"{server.url}{p}" for p in ("/none.gz", "/bad.gz", "/half/good.gz", "/good.gz")]
    assert fetch(str(path), urls, GOOD) == BODY == path.read_bytes()
    assert os.listdir(path.parent) == ["good.gz"]


def test_a_download_that_fails_everywhere_leaves_nothing_and_says_what_to_do(tmp_path, server):
    urls = [f"{server.url}/bad.gz", f"{server.url}/half/good.gz", "http://127.0.0.1:9/good.gz"]
    with pytest.raises(UserError, match="^[^\n]*wrong content[^\n]*put the file there[^\n]*$"):
        fetch(str(tmp_path / "good.gz"), urls, GOOD)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ("half", "stall", "silent", "moved", "loop", "missing"))
def test_a_server_that_fails_is_asked_again_then_named_and_nothing_is_left(
    tmp_path, server, fault, monkeypatch
):
    monkeypatch.setattr(data, "TIMEOUT", 1)
    name = "none.gz" if fault == "missing" else "good.gz"
    with pytest.raises(UserError, match=f"^good.gz is not in [^\n]*/{fault}/{name}: [^\n]*$"):
        fetch(str(tmp_path / "good.gz"), [f"{server.url}/{fault}/{name}"], GOOD)
    assert server.asked.count(f"/{fault}/{name}") >= 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ("half", "stall", "silent", "moved", "loop"))
def test_a_server_that_fails_gives_way_to_the_next(tmp_path, server, fault, monkeypatch):
    monkeypatch.setattr(data, "TIMEOUT", 1)
    urls = [f"{server.url}/{fault}/good.gz", f"{server.url}/good.gz"]
    assert fetch(str(tmp_path / "good.gz"), urls, GOOD) == BODY
    assert os.listdir(tmp_path) == ["good.gz"]


@pytest.mark.parametrize("fault", ("flaky", "length"))
def test_a_server_that_fails_once_or_does_not_know_the_size_will_do(tmp_path, server, fault):
    assert fetch(str(tmp_path / "good.gz"), [f"{server.url}/{fault}/good.gz"], GOOD) == BODY
    assert (tmp_path / "good.gz").read_bytes() == BODY


def test_a_file_that_another_download_has_begun_is_never_used(tmp_path, monkeypatch, server):
    """A killed process leaves only a file with a temporary name."""
    os.makedirs(tmp_path / "mnist")
    for name in data.MNIST_FILES:
        (tmp_path / "mnist" / f"{name}.gz.123.part").write_bytes(b"half")
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{server.url}/half/",))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz is not in"):
        data.mnist(str(tmp_path))


def test_a_data_dir_that_cannot_be_written_is_named_before_anything_is_downloaded(tmp_path, server):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "mnist" / "good.gz")
    with pytest.raises(UserError, match="file/mnist/good.gz: [^\n]*--data_dir$"):
        fetch(path, [f"{server.url}/good.gz"], GOOD)
    assert server.asked == []


def test_a_cached_value_is_computed_once_and_again_if_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "new"))
    calls = []

    def compute():
        calls.append(1)
        return torch.ones(3), {"n": len(calls)}

    for _ in range(2):
        ones, rest = data.cached("x.pt", compute)
        assert torch.equal(ones, torch.ones(3)) and rest == {"n": 1}
    (tmp_path / "new" / "x.pt").write_bytes(b"half of a file")
    assert data.cached("x.pt", compute)[1] == {"n": 2}
    assert data.cached("x.pt", compute)[1] == {"n": 2}


def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "file"))
    assert data.cached("x.pt", lambda: [1, 2]) == [1, 2]
