"""LAFAN1 on the Unitree H1: kinematics against MuJoCo, round trips, splits, bad files, runs."""

import os
import time

import numpy as np
import pytest
import torch
from conftest import succeed
from PIL import Image

import data
from data import (
    FRAMES,
    H1,
    LAFAN_FILES,
    LAFAN_VAL,
    DataError,
    Motion,
    about,
    forward_kinematics,
    inverse_kinematics,
    joint_positions,
    lafan,
    motion_features,
    multiply,
    read_motion,
    rotate,
)
from eval import load

REAL = os.path.join(os.path.expanduser(data.DATA_DIR), "lafan1", "h1")
needs_lafan = pytest.mark.skipif(
    not os.path.isdir(REAL), reason="DAPS_DATA names no folder with LAFAN1"
)


def clip(n, seed=0):
    """Made-up frames (n, 26): a root that walks in a circle, joints that swing in their range."""
    rng, t = np.random.default_rng(seed), np.arange(n)[:, None] / 30
    yaw = 0.7 * t + rng.uniform(-3, 3)
    place = np.concatenate([3 * np.cos(yaw), 3 * np.sin(yaw), 1 + 0.05 * np.sin(9 * t)], axis=1)
    q = np.concatenate([0.05 * np.sin(t), 0 * t, np.sin(yaw / 2), np.cos(yaw / 2)], axis=1)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    middle = np.array([link[5] for link in H1])
    angles = middle + 0.4 * np.sin(rng.uniform(1, 5, 19) * t + rng.uniform(0, 6, 19))
    return np.concatenate([place, q, angles], axis=1)


def motion(n_train=3, n_val=4, n=100):
    clips = {
        "train": [motion_features(clip(n + i, seed=i)) for i in range(n_train)],
        "val": [motion_features(clip(n, seed=50 + i)) for i in range(n_val)],
    }
    return Motion(clips)


# kinematics


def test_quaternions_turn_vectors_as_matrices_do():
    v, angle = torch.randn(5, 3).double(), torch.rand(5).double() * 6 - 3
    c, s = angle.cos(), angle.sin()
    turned = torch.stack([c * v[:, 0] - s * v[:, 1], s * v[:, 0] + c * v[:, 1], v[:, 2]], dim=1)
    torch.testing.assert_close(rotate(about("z", angle), v), turned)
    a, b = about("x", angle), about("y", angle.flip(0))
    torch.testing.assert_close(rotate(multiply(a, b), v), rotate(a, rotate(b, v)))


@needs_lafan
def test_forward_kinematics_agrees_with_mujoco_on_a_thousand_real_frames():
    mujoco = pytest.importorskip("mujoco", reason="mujoco is not installed")
    model = mujoco.MjModel.from_xml_path(os.path.join(os.path.dirname(REAL), "h1.xml"))
    state = mujoco.MjData(model)
    names = (*LAFAN_VAL[:2], "fallAndGetUp1_subject1", "sprint1_subject2")
    frames = np.concatenate(
        [read_motion(os.path.join(REAL, f"{n}.csv"))[5::15][:250] for n in names]
    )
    assert len(frames) == 1000
    ours = joint_positions(torch.from_numpy(frames)).numpy()  # (1000, 20, 3)
    _, turns = forward_kinematics(torch.from_numpy(frames[:, 7:]))
    turns = multiply(torch.from_numpy(frames[:, None, [6, 3, 4, 5]]), turns).numpy()
    for frame, places, turn in zip(frames, ours, turns, strict=True):
        state.qpos[:] = np.concatenate([frame[:3], frame[[6, 3, 4, 5]], frame[7:]])  # w comes first
        mujoco.mj_kinematics(model, state)
        assert abs(state.xpos[1:] - places).max() < 1e-5
        assert (1 - abs((state.xquat[2:] * turn).sum(axis=1))).max() < 1e-6


def test_inverse_kinematics_undoes_forward_kinematics_over_the_whole_range():
    """Also of the shoulders' yaw, which goes past half a turn."""
    torch.manual_seed(0)
    middle = torch.tensor([link[5] for link in H1]).double()
    angles = middle + (torch.rand(500, 19).double() - 0.5) * 2 * 3.1
    _, turns = forward_kinematics(angles)
    flipped = turns * torch.where(turns[..., :1] < 0, -1.0, 1.0)
    torch.testing.assert_close(inverse_kinematics(flipped), angles, atol=1e-9, rtol=0)


# features


@needs_lafan
def test_real_frames_survive_the_round_trip_and_121_features_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path))
    started = time.perf_counter()
    found = lafan(data.DATA_DIR)
    seconds = time.perf_counter() - started
    print(f"features of all frames: {seconds:.1f} s")
    assert sum(len(part[0]) for part in found.parts.values()) == 264_705
    assert found.shape == (32, 121)
    assert found.keep[:133].sum() == 108 and found.keep[133:].all()
    files = [read_motion(os.path.join(REAL, f"{n}.csv")) for n in LAFAN_FILES if n in LAFAN_VAL]
    true = torch.from_numpy(np.concatenate(files))
    for index in torch.arange(found.n_val).split(100):
        x, _ = found.val_examples(index)
        ours = found.frames(x, found.true_origin(index))  # (n, 32, 26)
        theirs = true[found.starts["val"][index].unsqueeze(1) + torch.arange(FRAMES)]
        assert (ours[..., :3] - theirs[..., :3]).abs().max() < 1e-4  # metres
        assert (ours[..., 7:] - theirs[..., 7:]).abs().max() < 1e-4  # radians
        cosine = (ours[..., 3:7] * theirs[..., 3:7]).sum(dim=-1).abs()
        assert (cosine / theirs[..., 3:7].norm(dim=-1)).min() > 1 - 1e-9
    (kept,) = tmp_path.iterdir()
    again = lafan(data.DATA_DIR)
    assert torch.equal(again.mean, found.mean) and torch.equal(
        again.parts["val"][0], found.parts["val"][0]
    )
    kept.write_bytes(b"damaged")
    assert torch.equal(lafan(data.DATA_DIR).mean, found.mean)


def test_features_do_not_depend_on_where_and_which_way_a_segment_begins():
    frames = clip(FRAMES)
    moved = frames.copy()
    turn = about("z", torch.tensor(2.0).double())
    moved[:, :3] = rotate(turn, torch.from_numpy(frames[:, :3])).numpy() + [5, -7, 0]
    q = multiply(turn, torch.from_numpy(frames[:, [6, 3, 4, 5]])).numpy()
    moved[:, 3:7] = -q[:, [1, 2, 3, 0]]  # the other quaternion of the same rotation
    both = {
        "train": [motion_features(clip(200))],
        "val": [motion_features(f) for f in (frames, moved)],
    }
    found = Motion(both)
    x, _ = found.val_examples(torch.arange(2))
    torch.testing.assert_close(x[0], x[1], atol=1e-4, rtol=1e-4)
    raw = found.segments("val", found.starts["val"])
    torch.testing.assert_close(raw[:, 0, 133:135], torch.zeros(2, 2).double())  # starts at zero
    assert (raw[:, 0, 136] >= 0).all()


def test_velocities_are_those_of_the_root_in_its_own_frame():
    """A circle of radius 3 at 0.7 radians per second: 2.1 m/s, and 0.7 rad/s about the vertical."""
    _, _, q, velocity = motion_features(clip(100))
    speed = velocity[5:-5, :2].norm(dim=1)
    assert speed.mean().item() == pytest.approx(2.1, abs=0.02)
    up = rotate(q, velocity[:, 3:])[5:-5, 2]
    assert up.mean().item() == pytest.approx(0.7, abs=0.01)


def test_no_segment_crosses_from_one_file_into_the_next():
    found = motion(n=40)
    lengths = [40, 41, 42]
    ends = np.cumsum(lengths)
    for start in found.starts["train"].tolist():
        assert any(
            end - length <= start and start + FRAMES <= end
            for end, length in zip(ends, lengths, strict=True)
        )
    assert found.n_train == sum(length - FRAMES + 1 for length in lengths) and found.n_val == 4


def test_validation_files_never_train_and_statistics_are_of_training_alone():
    assert set(LAFAN_VAL) < set(LAFAN_FILES) and len(LAFAN_FILES) == 40
    one, other = motion(), motion(n_val=1)
    assert torch.equal(one.mean, other.mean) and torch.equal(one.range, other.range)
    x = torch.cat([one.train_batch(0, step, 64) for step in range(20)])
    assert x.mean(dim=(0, 1)).abs().max() < 0.5 and x.std(dim=(0, 1)).max() < 1.5


def test_errors_are_measured_in_centimetres_and_degrees():
    found = motion()
    x, _ = found.val_examples(torch.arange(2))
    cm, degrees = found.errors(x, x)
    assert cm.max() < 1e-3 and degrees.max() < 1e-3
    shifted = x.clone()
    column = int(found.keep[:133].sum())  # the root's x
    shifted[..., column] += 0.1 / found.std[column]  # ten centimetres
    cm, degrees = found.errors(x, shifted)
    torch.testing.assert_close(cm, torch.full((2,), 10.0).double(), atol=1e-3, rtol=0)
    assert degrees.max() < 1e-3
    assert found.unit(x).shape == x.shape
    train = found.segments("train", found.starts["train"])[..., found.keep]
    spread = found.unit(found.standardised(found.segments("train", found.starts["train"])))
    spread = spread.flatten(0, 1)
    assert (spread.amax(dim=0) - spread.amin(dim=0)).max() < 1.1 and train.shape[-1] == x.shape[-1]


# bad files


def write_lafan(folder, n=70):
    os.makedirs(folder / "lafan1" / "h1")
    for i, name in enumerate(LAFAN_FILES):
        np.savetxt(folder / "lafan1" / "h1" / f"{name}.csv", clip(n, i), delimiter=",", fmt="%.6f")


BAD = {
    "columns": (lambda f: f[:, :25], "has 25 columns, must have 26"),
    "not finite": (
        lambda f: np.where(np.arange(len(f))[:, None] == 3, np.nan, f),
        "line 4: a number",
    ),
    "quaternion": (lambda f: f * np.where(np.arange(26) == 3, 9, 1), "no unit quaternion"),
    "short": (lambda f: f[:31], "has 31 frames, must have at least 32"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused_in_one_line(tmp_path, fault):
    damage, message = BAD[fault]
    np.savetxt(tmp_path / "bad.csv", damage(clip(40)), delimiter=",")
    with pytest.raises(DataError, match=message) as caught:
        read_motion(tmp_path / "bad.csv")
    assert "bad.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_numbers_or_not_there_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "page.csv").write_text("<html>\nmoved\n")
    with pytest.raises(DataError, match="page.csv: cannot be read"):
        read_motion(tmp_path / "page.csv")
    write_lafan(tmp_path)
    os.remove(tmp_path / "lafan1" / "h1" / "run1_subject2.csv")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="run1_subject2.csv is not in"):
        lafan(str(tmp_path))


# a run


def test_a_run_on_motion_leaves_figures_a_film_and_a_file_that_robots_read(tmp_path):
    write_lafan(tmp_path)
    settings = ("--dataset=lafan", f"--data_dir={tmp_path}", "--n_tokens=64", "--vocab_size=16")
    settings += ("--width=16", "--n_heads=2", "--n_samples=3", "--batch_size=4", "--max_steps=3")
    settings += ("--eval_interval=3", f"--out_dir={tmp_path / 'run'}", "--decoder_layers=1")
    output = succeed("train.py", *settings, DAPS_CACHE=str(tmp_path / "cache"))
    header = output.splitlines()[-3]
    assert "cm" in header and "degrees" in header and "FID" not in header
    decoded = read_motion(tmp_path / "run" / "motion.csv")  # its columns, quaternions and all
    assert decoded.shape == (2 * FRAMES, 26)
    film = Image.open(tmp_path / "run" / "motion.gif")
    assert film.n_frames == 2 * FRAMES
    figures = Image.open(tmp_path / "run" / "reconstructions.png").convert("L")
    assert figures.getextrema() == (pytest.approx(40, abs=30), 255)
    assert load(tmp_path / "run").encoder.n_tokens == 64
