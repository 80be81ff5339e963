"""data.py: batches are pure functions, files from outside are checked."""

import gzip
import hashlib
import http.server
import os
import struct
import threading
import time

import numpy as np
import pytest
import torch

import data
from data import DataError, glyphs, load_dataset, read_idx, share, train_indices, uniform_noise


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


def test_an_epoch_shows_every_example_once_also_when_batches_straddle_epochs():
    n, batch_size = 10, 4
    seen = torch.cat([train_indices(n, 0, step, batch_size) for step in range(5)])
    assert sorted(seen[:10].tolist()) == list(range(10))
    assert sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_a_batch_larger_than_the_data_set_goes_round():
    assert sorted(train_indices(3, 0, 1, 6).tolist()) == [0, 0, 1, 1, 2, 2]


def test_batches_are_a_function_of_seed_and_step(letters):
    assert torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(1, 7, 32))
    assert not torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(1, 8, 32))
    assert not torch.equal(letters.train_batch(1, 7, 32), letters.train_batch(2, 7, 32))


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_shares_of_all_ranks_make_the_whole_batch(letters, world_size):
    ranks = range(world_size)
    parts = [letters.train_batch(0, 5, 24, rank, world_size) for rank in ranks]
    assert torch.equal(torch.cat(parts), letters.train_batch(0, 5, 24))
    noise = [uniform_noise(1, 0, 5, 24, (8, 8), rank, world_size) for rank in ranks]
    assert torch.equal(torch.cat(noise), uniform_noise(1, 0, 5, 24, (8, 8)))
    parts = [x for rank in ranks for _, x in letters.val_batches(7, rank, world_size)]
    assert torch.equal(torch.cat(parts), letters.x_val.float())
    assert [*range(7)][share(7, 0, 2)] + [*range(7)][share(7, 1, 2)] == [*range(7)]


def test_noise_is_uniform_and_differs_between_streams_seeds_and_steps():
    u = uniform_noise(1, 0, 0, 100, (8, 8))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not torch.equal(u, uniform_noise(*other, 100, (8, 8)))


# files in the IDX format


def idx_bytes(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder, n=20):
    """The four files, with random images."""
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix in ("train", "t10k"):
        arrays[f"{prefix}-images-idx3-ubyte.gz"] = rng.integers(256, size=(n, 28, 28))
        arrays[f"{prefix}-labels-idx1-ubyte.gz"] = rng.integers(10, size=n)
    for name, array in arrays.items():
        with gzip.open(os.path.join(folder, name), "wb") as file:
            file.write(idx_bytes(array))
    return arrays


def test_mnist_is_read_and_binarised_above_127(tmp_path):
    arrays = write_mnist(tmp_path / "mnist")
    found = load_dataset("mnist", str(tmp_path))
    images = arrays["train-images-idx3-ubyte.gz"]
    assert np.array_equal(found.x_train[:, 0].numpy(), images > 127)
    assert np.array_equal(found.y_val.numpy(), arrays["t10k-labels-idx1-ubyte.gz"])
    assert found.shape == (1, 28, 28)


REAL_MNIST = os.path.join(os.environ.get("DAPS_DATA", ""), "mnist", "t10k-images-idx3-ubyte.gz")


@pytest.mark.skipif(not os.path.exists(REAL_MNIST), reason="DAPS_DATA names no folder with MNIST")
def test_the_real_mnist_is_read_and_is_what_the_hashes_say():
    folder = os.path.join(os.environ["DAPS_DATA"], "mnist")
    for name, sha256 in data.MNIST_FILES.items():
        with open(os.path.join(folder, f"{name}.gz"), "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == sha256
    found = load_dataset("mnist", os.environ["DAPS_DATA"])
    assert found.x_train.shape == (60_000, 1, 28, 28) and found.x_val.shape == (10_000, 1, 28, 28)
    assert found.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    assert 0.12 < found.x_train.float().mean() < 0.14


def damaged(kind):
    whole = gzip.compress(idx_bytes(np.zeros((20, 28, 28))))
    if kind == "cut short":
        return whole[: len(whole) // 2]
    if kind == "bit flipped":
        return whole[:30] + bytes([whole[30] ^ 4]) + whole[31:]
    if kind == "not gzip":
        return b"<html>not found</html>"
    if kind == "empty":
        return b""
    if kind == "empty inside":
        return gzip.compress(b"")
    if kind == "too few bytes":
        return gzip.compress(idx_bytes(np.zeros((20, 28, 28)))[:-5])
    if kind == "too many bytes":
        return gzip.compress(idx_bytes(np.zeros((20, 28, 28))) + b"more")
    if kind == "wrong magic":
        return gzip.compress(b"\x00\x01" + idx_bytes(np.zeros((20, 28, 28)))[2:])
    if kind == "promises terabytes":
        return gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31) + b"x")


DAMAGE = ("cut short", "bit flipped", "not gzip", "empty", "empty inside", "too few bytes")
DAMAGE += ("too many bytes", "wrong magic", "promises terabytes")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_in_one_line_and_left_alone(tmp_path, kind):
    path = tmp_path / "x.gz"
    path.write_bytes(damaged(kind))
    with pytest.raises(DataError, match=r"^.*x\.gz: .*delete the file[^\n]*$"):
        read_idx(str(path))
    assert path.read_bytes() == damaged(kind)


def test_images_and_labels_of_different_lengths_are_refused(tmp_path):
    write_mnist(tmp_path / "mnist")
    with gzip.open(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", "wb") as file:
        file.write(idx_bytes(np.zeros(3)))
    with pytest.raises(DataError, match="do not match"):
        load_dataset("mnist", str(tmp_path))


def test_an_unknown_data_set_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match="minst.*glyphs, mnist"):
        load_dataset("minst")


# downloads, from a server on this machine


class Server:
    """Serves {path: bytes} on loopback. A path may begin with what goes wrong: /half breaks off in
    the middle, /flaky the first time alone, /stall falls silent there, /silent from the start,
    /moved redirects to a page, /loop to itself, /length gives none that makes sense."""

    def __init__(self, files):
        self.asked = asked = []
        self.closing = closing = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                fault, name = self.path.rsplit("/", 1)
                body = files.get(f"/{name}")
                half = fault in ("/half", "/stall") or fault == "/flaky" and self.path not in asked
                asked.append(self.path)
                if fault == "/silent":
                    return closing.wait(30)
                if fault in ("/moved", "/loop"):
                    self.send_response(302)
                    self.send_header("location", "/bad.gz" if fault == "/moved" else self.path)
                    return self.end_headers()
                self.send_response(404 if body is None else 200)
                length = "many" if fault == "/length" else str(len(body or b""))
                self.send_header("content-length", length)
                self.end_headers()
                body = body or b""
                self.wfile.write(body[: len(body) // 2] if half else body)
                if fault == "/stall":
                    closing.wait(30)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.closing.set()
        self.server.shutdown()


@pytest.fixture
def served():
    server = Server({"/good.gz": b"good" * 1000, "/bad.gz": b"<html>moved</html>"})
    yield server
    server.stop()


@pytest.fixture
def server(served):
    return served.url


GOOD = hashlib.sha256(b"good" * 1000).hexdigest()


def test_a_download_moves_on_from_bad_mirrors_and_arrives_whole(tmp_path, server):
    path = tmp_path / "new" / "good.gz"
    urls = [
        f"{server}/missing.gz",
        f"{server}/bad.gz",
        f"{server}/half/good.gz",
        f"{server}/good.gz",
    ]
    data.download(urls, str(path), GOOD)
    assert path.read_bytes() == b"good" * 1000
    assert os.listdir(path.parent) == ["good.gz"]


def test_a_download_that_fails_everywhere_leaves_nothing_and_says_what_to_do(tmp_path, server):
    path = tmp_path / "good.gz"
    urls = [f"{server}/bad.gz", f"{server}/half/good.gz", "http://127.0.0.1:9/good.gz"]
    with pytest.raises(DataError, match="^[^\n]*wrong content[^\n]*put the file there[^\n]*$"):
        data.download(urls, str(path), GOOD)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ("half", "stall", "silent", "moved", "loop", "missing"))
def test_a_server_that_fails_is_asked_again_then_named_and_nothing_is_left(
    tmp_path, served, fault, monkeypatch
):
    monkeypatch.setattr(data, "TIMEOUT", 0.2)
    name = "none.gz" if fault == "missing" else "good.gz"
    began = time.perf_counter()
    with pytest.raises(DataError, match=f"^good.gz is not in [^\n]*/{fault}/{name}: [^\n]*$"):
        data.download([f"{served.url}/{fault}/{name}"], str(tmp_path / "good.gz"), GOOD)
    assert time.perf_counter() - began < 5
    assert served.asked.count(f"/{fault}/{name}") >= 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ("half", "stall", "silent", "moved", "loop"))
def test_a_server_that_fails_gives_way_to_the_next(tmp_path, served, fault, monkeypatch):
    monkeypatch.setattr(data, "TIMEOUT", 0.2)
    urls = [f"{served.url}/{fault}/good.gz", f"{served.url}/good.gz"]
    data.download(urls, str(tmp_path / "good.gz"), GOOD)
    assert (tmp_path / "good.gz").read_bytes() == b"good" * 1000
    assert os.listdir(tmp_path) == ["good.gz"]


@pytest.mark.parametrize("fault", ("flaky", "length"))
def test_a_server_that_fails_once_or_does_not_know_the_size_will_do(tmp_path, served, fault):
    data.download([f"{served.url}/{fault}/good.gz"], str(tmp_path / "good.gz"), GOOD)
    assert (tmp_path / "good.gz").read_bytes() == b"good" * 1000


def test_a_file_that_another_download_has_begun_is_never_used(tmp_path, monkeypatch, served):
    """What a killed process leaves behind has another name."""
    os.makedirs(tmp_path / "mnist")
    for name in data.MNIST_FILES:
        (tmp_path / "mnist" / f"{name}.gz.123.part").write_bytes(b"half")
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"{served.url}/half/",))
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz is not in"):
        data.mnist(str(tmp_path))


def test_a_data_dir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/mnist/x.gz: cannot be written"):
        data.download(["http://127.0.0.1:9/x"], str(tmp_path / "file" / "mnist" / "x.gz"), GOOD)
