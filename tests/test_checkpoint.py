"""checkpoint.py: files of a run are written whole, and damaged files are refused."""

import json
import os
import pickle

import pytest
import torch
from conftest import assert_one_line

import checkpoint
from checkpoint import Log, as_bytes, claim, load_checkpoint, read_log, restore, write
from configurator import UserError

# writing


def test_text_and_bytes_are_written_and_replace_what_was_there(tmp_path):
    for content, found in (("ä\n", "ä\n".encode()), (b"\0\xff", b"\0\xff"), ("", b"")):
        write(str(tmp_path / "x"), content)
        assert (tmp_path / "x").read_bytes() == found
    assert os.listdir(tmp_path) == ["x"]
    assert torch.load(write_tensor(tmp_path / "t"), weights_only=True).tolist() == [1, 2]


def write_tensor(path):
    write(str(path), as_bytes(torch.save, torch.tensor([1, 2])))
    return path


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("fsync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("move"), replace(a, b)))
    write(str(tmp_path / "x"), "content")
    assert calls == ["fsync", "move"]


@pytest.mark.parametrize("fault", (OSError(28, "No space left on device"), SystemExit(143)))
def test_a_write_that_fails_or_is_stopped_leaves_what_was_there(tmp_path, monkeypatch, fault):
    write(str(tmp_path / "x"), "before")

    def fail(part, path):
        assert os.path.exists(part)
        raise fault

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((UserError, SystemExit)) as end:
        write(str(tmp_path / "x"), "after")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "before"
    if isinstance(fault, OSError):
        assert str(end.value).startswith(f"{tmp_path}/x could not be written (No space left")
        assert "\n" not in str(end.value) and "--resume=True" in str(end.value)


# the log


def test_a_log_is_cut_back_to_where_a_run_continues_and_goes_on(tmp_path):
    path = str(tmp_path / "log.jsonl")
    log = Log(path, 0)
    rows = [{"step": step, "split": "train", "loss": -1.5 * step} for step in range(1, 6)]
    for row in rows:
        log.add(row)
    assert read_log(path) == rows
    log = Log(path, 3)
    assert read_log(path) == rows[:3]
    log.add(rows[4])
    assert read_log(path) == [*rows[:3], rows[4]]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    path, row = tmp_path / "log.jsonl", {"step": 1, "split": "val", "kl": None}
    assert read_log(path) == []
    path.write_text(json.dumps(row) + '\n{"step": 2, "spl')
    assert read_log(path) == [row]
    Log(str(path), 1)
    assert path.read_text() == json.dumps(row) + "\n"


# reading


@pytest.fixture
def good(tmp_path):
    """The content of a checkpoint, in last.pt."""
    content = {"config": {"lr": 1.0}, "step": 7, "model": {"weight": torch.ones(2, 2)}}
    torch.save(content, tmp_path / "last.pt")
    return content


def test_a_checkpoint_is_read_as_it_was_written(tmp_path, good):
    found = load_checkpoint(tmp_path / "last.pt")
    assert found["config"] == good["config"] and torch.equal(
        found["model"]["weight"], torch.ones(2, 2)
    )


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ("none", "empty", "text", "cut", "pickle", "bomb", "foreign"))
def test_what_is_no_checkpoint_is_refused_in_one_line_and_not_executed(tmp_path, good, kind):
    path, bomb = tmp_path / "last.pt", Bomb(tmp_path / "exploded")
    wanted = "is not a readable checkpoint"
    if kind == "none":
        path.unlink()
        wanted = "does not exist"
    elif kind in ("empty", "text", "cut"):
        path.write_bytes({"empty": b"", "text": b"text", "cut": path.read_bytes()[:900]}[kind])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=2))
    elif kind == "bomb":
        torch.save(good | {"model": {"weight": bomb}}, path)
    else:
        torch.save({"weights": torch.zeros(3)}, path)
        wanted = "is not a checkpoint of this version"
    with pytest.raises(UserError, match=f"^[^\n]*/last.pt {wanted}[^\n]*$"):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("kind", ("key", "shape", "missing"))
def test_a_state_that_does_not_fit_is_refused_in_one_line(tmp_path, good, kind):
    other = {"key": {"w": torch.ones(2, 2)}, "shape": {"weight": torch.ones(3)}}
    saved = {"model": other[kind]} if kind in other else {}
    with pytest.raises(UserError, match="^last.pt does not fit this version: [^\n]*$"):
        restore("last.pt", saved, model=torch.nn.Linear(2, 2, bias=False))
    layer = torch.nn.Linear(2, 2, bias=False)
    restore("last.pt", good, model=layer)
    assert torch.equal(layer.weight, torch.ones(2, 2))


# the folder

CLAIM = "import sys\nfrom checkpoint import claim\nlock = claim(sys.argv[1], [], True, False)\n"


def test_a_folder_is_made_and_locked_and_rid_of_what_a_killed_process_left(forker, tmp_path):
    folder, script = tmp_path / "a" / "run[1]", tmp_path / "claim.py"
    script.write_text(CLAIM)
    lock = claim(str(folder), [], False, False)
    (folder / "last.pt.0a1b.part").write_text("half")
    (done,) = forker.run(((script, folder), "", {}))
    assert_one_line(done, "is in use: another process trains there")
    lock.close()
    (done,) = forker.run(((script, folder), "", {}))
    assert done.code == 0 and os.listdir(folder) == [".lock"]


def test_a_folder_that_holds_a_run_is_claimed_only_to_resume_or_to_overwrite(tmp_path):
    paths = [str(tmp_path / "last.pt"), str(tmp_path / "log.jsonl")]
    claim(str(tmp_path), paths, False, False).close()
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(UserError, match="holds a run: add --resume=True or --overwrite=True"):
        claim(str(tmp_path), paths, False, False)
    for choice in ((True, False), (False, True)):
        claim(str(tmp_path), paths, *choice).close()
    assert (tmp_path / "log.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be written"):
        claim(str(tmp_path / "file" / "run"), [], False, False)


# settings that must not change


def test_a_run_continues_only_as_itself():
    now = {"lr": 1.0, "seed": 0, "out_dir": "b"}
    checkpoint.check_same_run("b", now, now | {"out_dir": "a", "old": 1}, {"out_dir"})
    with pytest.raises(UserError, match="^resume: lr is 1.0, but the run in b has 2.0; it must"):
        checkpoint.check_same_run("b", now, now | {"lr": 2.0}, {"out_dir"})
    with pytest.raises(UserError, match="^resume: seed is 0, but the run in b has 'none'"):
        checkpoint.check_same_run("b", now, {"lr": 1.0}, {"out_dir"})


@pytest.mark.parametrize("device", ("cuba", "meta"))
def test_a_device_that_cannot_be_used_is_refused_in_one_line(device):
    with pytest.raises(
        UserError, match=f"^device is '{device}', which cannot be used here [^\n]*$"
    ):
        checkpoint.setup_device(device)
