"""run.py: files of a run are written whole, damaged files are refused, a log goes on."""

import json
import os
import pickle
import signal
import time

import pytest
import torch

from configurator import UserError
from run import Log, StopSignal, check_same_run, load_checkpoint, read_log, restore, save, write


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("fsync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("move"), replace(a, b)))
    write(str(tmp_path / "x"), "content")
    assert calls == ["fsync", "move"] and os.listdir(tmp_path) == ["x"]


def test_a_log_is_cut_back_to_where_a_run_continues_and_goes_on(tmp_path):
    path = str(tmp_path / "log.jsonl")
    assert read_log(path) == []
    log = Log(path, 0)
    rows = [{"step": step, "split": "train", "kl": None} for step in range(1, 6)]
    for row in rows:
        log.add(row)
    assert read_log(path) == rows
    Log(path, 3).add(rows[4])
    assert read_log(path) == [*rows[:3], rows[4]]


@pytest.mark.parametrize("damage", (b'{"step": 3, "spl', b"\xff\xfe\n"))
def test_a_log_is_read_up_to_what_is_damaged(tmp_path, damage):
    path, rows = tmp_path / "log.jsonl", [{"step": 1, "split": "val"}, {"step": 2, "split": "val"}]
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() + damage)
    assert read_log(str(path)) == rows
    Log(str(path), 1)
    assert path.read_text() == json.dumps(rows[0]) + "\n"


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


GOOD = {"config": {"lr": 1.0}, "step": 7, "model": {"weight": torch.ones(2, 2)}}


@pytest.mark.parametrize("kind", ("none", "empty", "text", "cut", "pickle", "bomb", "foreign"))
def test_what_is_no_checkpoint_is_refused_in_one_line_and_not_executed(tmp_path, kind):
    path, bomb = tmp_path / "last.pt", Bomb(tmp_path / "exploded")
    save(str(path), GOOD)
    assert torch.equal(load_checkpoint(str(path))["model"]["weight"], torch.ones(2, 2))
    wanted = {"none": "does not exist", "foreign": "is not a checkpoint of this version"}
    if kind == "none":
        path.unlink()
    elif kind in ("empty", "text", "cut"):
        path.write_bytes({"empty": b"", "text": b"text", "cut": path.read_bytes()[:900]}[kind])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=2))
    else:
        torch.save(GOOD | {"model": bomb} if kind == "bomb" else {"weights": torch.ones(3)}, path)
    wanted = wanted.get(kind, "is not a readable checkpoint")
    with pytest.raises(UserError, match=f"^[^\n]*/last.pt {wanted}[^\n]*$") as error:
        load_checkpoint(str(path))
    assert "weights_only" not in str(error.value) and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("state", ({"w": torch.ones(2, 2)}, {"weight": torch.ones(3)}, None))
def test_a_state_that_does_not_fit_is_refused_in_one_line(state):
    layer = torch.nn.Linear(2, 2, bias=False)
    reason = "does not fit this version: " if state else "has no model, so it cannot be continued"
    with pytest.raises(UserError, match=f"^last.pt {reason}[^\n]*$"):
        restore("last.pt", {"model": state} if state else {}, model=layer)
    restore("last.pt", GOOD, model=layer)
    assert torch.equal(layer.weight, torch.ones(2, 2))


def test_a_run_continues_only_as_itself():
    """The first difference in the order of the settings is named: the data set, not its sizes."""
    now = {"dataset": "mnist", "aligned": True, "out_dir": "b", "max_steps": 9}
    check_same_run("b", now, now | {"out_dir": "a", "old": 1}, {"out_dir"}, 9)
    with pytest.raises(UserError, match="^dataset is 'mnist', but b has 'glyphs'; it must"):
        check_same_run("b", now, now | {"aligned": False, "dataset": "glyphs"}, {"out_dir"}, 9)
    with pytest.raises(UserError, match="^aligned is True, but b has 'none'"):
        check_same_run("b", now, {"dataset": "mnist"}, {"out_dir"}, 9)
    with pytest.raises(UserError, match="b is at step 10, past max_steps = 9"):
        check_same_run("b", now, now, set(), 10)


def test_a_signal_that_is_repeated_ends_a_program_only_after_twenty_seconds(monkeypatch):
    stop, now = StopSignal(), time.monotonic()
    try:
        for number, later in ((signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGTERM, 19)):
            monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
            os.kill(os.getpid(), number)
            assert stop.number == signal.SIGTERM
        monkeypatch.setattr(time, "monotonic", lambda: now + 21)
        with pytest.raises(SystemExit) as end:
            stop.catch(signal.SIGINT, None)
        assert end.value.code == 130
    finally:
        stop.release()
