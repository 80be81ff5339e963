"""LAFAN1 on the Unitree H1: kinematics against MuJoCo, round trips, splits, figures, a run."""

import ast
import io
import math
import os

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    motion_dataset,
    motion_frames,
    pretend_published,
    succeed,
    write_lafan,
)
from PIL import Image

import data
import motion
from configurator import UserError
from data import MotionDataset, lafan
from motion import (
    FRAMES,
    H1,
    LAFAN_FILES,
    LAFAN_VAL,
    film,
    forward_kinematics,
    frame_errors,
    frames_to_csv,
    inverse_kinematics,
    joint_positions,
    motion_features,
    quat_conj,
    quat_from_axis_angle,
    quat_mul,
    quat_rotate,
    read_motion,
    side_by_side,
)

REAL = os.path.join(os.path.expanduser(data.DATA_DIR), "lafan1", "h1")
needs_lafan = pytest.mark.skipif(
    not os.path.isdir(REAL), reason="DAPS_DATA names no folder with LAFAN1"
)


def test_motion_can_be_copied_alone():
    with open(os.path.join(ROOT, "motion.py"), encoding="utf-8") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules == {"math", "numpy", "torch", "PIL"}


# kinematics


def test_quaternions_rotate_vectors_as_matrices_do():
    torch.manual_seed(0)
    v, angle = torch.randn(5, 3).double(), torch.rand(5).double() * 6 - 3
    c, s = angle.cos(), angle.sin()
    rotated = torch.stack([c * v[:, 0] - s * v[:, 1], s * v[:, 0] + c * v[:, 1], v[:, 2]], dim=1)
    torch.testing.assert_close(quat_rotate(quat_from_axis_angle("z", angle), v), rotated)
    a, b = quat_from_axis_angle("x", angle), quat_from_axis_angle("y", angle.flip(0))
    torch.testing.assert_close(quat_rotate(quat_mul(a, b), v), quat_rotate(a, quat_rotate(b, v)))
    torch.testing.assert_close(quat_rotate(quat_conj(a), quat_rotate(a, v)), v)


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
    _, rotations = forward_kinematics(torch.from_numpy(frames[:, 7:]))
    rotations = quat_mul(torch.from_numpy(frames[:, None, [6, 3, 4, 5]]), rotations).numpy()
    for frame, positions, rotation in zip(frames, ours, rotations, strict=True):
        state.qpos[:] = np.concatenate([frame[:3], frame[[6, 3, 4, 5]], frame[7:]])  # w comes first
        mujoco.mj_kinematics(model, state)
        assert abs(state.xpos[1:] - positions).max() < 1e-5
        assert (1 - abs((state.xquat[2:] * rotation).sum(axis=1))).max() < 1e-6


def test_inverse_kinematics_undoes_forward_kinematics_over_the_whole_range():
    """Also of the shoulders' yaw, which goes past half a turn."""
    torch.manual_seed(0)
    middle = torch.tensor([link[5] for link in H1]).double()
    angles = middle + (torch.rand(500, 19).double() - 0.5) * 2 * 3.1
    _, rotations = forward_kinematics(angles)
    flipped = rotations * torch.where(rotations[..., :1] < 0, -1.0, 1.0)
    torch.testing.assert_close(inverse_kinematics(flipped), angles, atol=1e-9, rtol=0)


# features


@needs_lafan
def test_real_frames_survive_the_round_trip_and_121_features_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(data, "write", lambda path, content: None)  # 160 MB
    found = lafan(os.path.expanduser(data.DATA_DIR))
    assert sum(len(split.parts[0]) for split in (found.train, found.val)) == 264_705
    assert found.shape == (32, 121)
    assert found.keep[:133].sum() == 108 and found.keep[133:].all()
    files = [read_motion(os.path.join(REAL, f"{n}.csv")) for n in LAFAN_FILES if n in LAFAN_VAL]
    true = torch.from_numpy(np.concatenate(files))
    for index in torch.arange(found.n_val).split(100):
        x, _ = found.val_examples(index)
        ours = found.frames(found.standardise(x), found.val.origin(index))  # (n, 32, 26)
        theirs = true[found.val.starts[index].unsqueeze(1) + torch.arange(FRAMES)]
        assert (ours[..., :3] - theirs[..., :3]).abs().max() < 1e-4  # metres
        assert (ours[..., 7:] - theirs[..., 7:]).abs().max() < 1e-4  # radians
        cosine = (ours[..., 3:7] * theirs[..., 3:7]).sum(dim=-1).abs()
        assert (cosine / theirs[..., 3:7].norm(dim=-1)).min() > 1 - 1e-9


def test_features_are_kept_for_next_time_and_computed_again_if_they_are_damaged(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(motion, "LAFAN_FILES", write_lafan(tmp_path, n=40))
    found = lafan(str(tmp_path))
    (kept,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(motion, "motion_features", None)  # must not be called
        again = lafan(str(tmp_path))
    for damage in (b"damaged", b"", kept.read_bytes()[:-1000]):
        kept.write_bytes(damage)
        for other in (again, lafan(str(tmp_path))):
            assert torch.equal(other.mean, found.mean)
            assert torch.equal(other.val.parts[0], found.val.parts[0])


def test_a_file_that_is_missing_or_not_the_published_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(motion, "LAFAN_FILES", write_lafan(tmp_path, n=40))
    monkeypatch.setattr(motion, "LAFAN_URL", "http://127.0.0.1:9/")
    lafan(str(tmp_path))  # a cache does not hide a changed file
    path = tmp_path / "lafan1" / "h1" / "run1_subject2.csv"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(UserError, match=r"^\S*/run1_subject2.csv is not the published file[^\n]*$"):
        lafan(str(tmp_path))
    os.remove(path)
    with pytest.raises(UserError, match="^run1_subject2.csv is not in [^\n]*$"):
        lafan(str(tmp_path))


def test_features_do_not_depend_on_where_and_which_way_a_segment_begins():
    frames = motion_frames(FRAMES)
    moved = frames.copy()
    turn = quat_from_axis_angle("z", torch.tensor(2.0).double())
    moved[:, :3] = quat_rotate(turn, torch.from_numpy(frames[:, :3])).numpy() + [5, -7, 0]
    q = quat_mul(turn, torch.from_numpy(frames[:, [6, 3, 4, 5]])).numpy()
    moved[:, 3:7] = -q[:, [1, 2, 3, 0]]  # the other quaternion of the same rotation
    both = [motion_features(f) for f in (frames, moved)]
    found = MotionDataset({"train": [motion_features(motion_frames(200))], "val": both})
    x = found.standardise(found.val_examples(torch.arange(2))[0])
    torch.testing.assert_close(x[0], x[1], atol=1e-4, rtol=1e-4)
    raw = found.val[torch.arange(2)]
    torch.testing.assert_close(raw[:, 0, 133:135], torch.zeros(2, 2).double())  # starts at zero
    assert (raw[:, 0, 136] >= 0).all()


def test_velocities_are_those_of_the_root_in_its_own_frame():
    """A circle of radius 3 at 0.7 radians per second: 2.1 m/s, and 0.7 rad/s about the vertical."""
    _, _, q, velocity = motion_features(motion_frames(100))
    speed = velocity[5:-5, :2].norm(dim=1)
    assert speed.mean().item() == pytest.approx(2.1, abs=0.02)
    up = quat_rotate(q, velocity[:, 3:])[5:-5, 2]
    assert up.mean().item() == pytest.approx(0.7, abs=0.01)


def test_no_segment_spans_two_files_and_all_segments_of_a_file_are_listed():
    found = motion_dataset(n=40)
    lengths = [40, 41, 42]
    ends = np.cumsum(lengths)
    for start in found.train.starts.tolist():
        assert any(
            end - length <= start and start + FRAMES <= end
            for end, length in zip(ends, lengths, strict=True)
        )
    assert found.n_train == sum(length - FRAMES + 1 for length in lengths) and found.n_val == 4
    assert [segments.tolist() for segments in found.val.by_clip] == [[0], [1], [2], [3]]
    assert [len(segments) for segments in motion_dataset(n=100).val.by_clip] == [3, 3, 3, 3]


def test_validation_files_never_train_and_statistics_are_of_training_alone():
    assert set(LAFAN_VAL) < set(LAFAN_FILES) and len(LAFAN_FILES) == 40
    one, other = motion_dataset(), motion_dataset(n_val=1)
    assert torch.equal(one.mean, other.mean) and torch.equal(one.range, other.range)
    x = one.standardise(torch.cat([one.train_batch(0, step, 64) for step in range(20)]))
    assert x.mean(dim=(0, 1)).abs().max() < 0.5 and x.std(dim=(0, 1)).max() < 1.5


def test_batches_of_motion_are_functions_of_seed_and_step():
    found = motion_dataset()
    halves = [found.train_batch(3, 2, 6, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(halves), found.train_batch(3, 2, 6))
    assert not torch.equal(found.train_batch(3, 2, 6), found.train_batch(3, 3, 6))
    assert found.val_index(4).tolist() == [0, 3, 6, 9]  # one of each file
    content = "the content of the data"
    assert motion_dataset().summary()[content] == found.summary()[content]
    assert motion_dataset().key() == found.key() != motion_dataset(n_val=1).key()


def test_errors_are_measured_in_centimetres_and_degrees():
    found = motion_dataset()
    x = found.standardise(found.val_examples(torch.arange(2))[0])
    cm, degrees = found.errors(x, x)
    assert cm.max() < 1e-3 and degrees.max() < 1e-3
    shifted = x.clone()
    column = int(found.keep[:133].sum())  # the root's x
    shifted[..., column] += 0.1 / found.std[column]  # ten centimetres
    cm, degrees = found.errors(x, shifted)
    torch.testing.assert_close(cm, torch.full((2,), 10.0).double(), atol=1e-3, rtol=0)
    assert degrees.max() < 1e-3
    frames = found.frames(x)
    for angle, expected in ((0.1, 0.1), (2 * math.pi - 0.1, 0.1)):  # whole turns do not count
        turned = torch.cat([frames[..., :7], frames[..., 7:] + angle], dim=-1)
        _, degrees = frame_errors(frames, turned)
        assert degrees.tolist() == pytest.approx([math.degrees(expected)] * 2)


def test_each_feature_has_a_range_of_one_unit_in_training():
    found = motion_dataset()
    x = found.standardise(found.train_examples(torch.arange(found.n_train)))
    low, high = found.unit(x).flatten(0, 1).aminmax(dim=0)
    assert (high - low).min() > 0.99 and (high - low).max() < 1.1 and x.shape[1:] == found.shape


# figures and files


def test_frames_are_written_as_they_are_read():
    frames = torch.from_numpy(motion_frames(70))
    text = frames_to_csv(frames.view(2, 35, 26))
    torch.testing.assert_close(
        torch.from_numpy(read_motion(io.StringIO(text))), frames, atol=1e-6, rtol=0
    )
    assert text.count("\n") == 70 and text.endswith("\n")


def colours(page, box=None):
    return {colour for _, colour in page.convert("RGB").crop(box or page.getbbox()).getcolors(9999)}


def test_figures_stand_in_rows_over_time_and_side_by_side():
    frames = torch.from_numpy(motion_frames(FRAMES))
    joints = joint_positions(frames)
    page = film([("one", joints), ("two\nlines", joints + 5)], range(0, FRAMES, 8), size=100)
    assert page.size == (110 + 4 * 100, 200)
    for column in range(4):  # sides have their colours; where a figure stands does not matter
        box = (110 + column * 100, 0, 210 + column * 100, 100)
        assert {motion.LEFT, motion.RIGHT, motion.INK} < colours(page, box)
    same, *_ = side_by_side(frames, frames, size=100)
    apart = side_by_side(frames, frames + 0.3 * torch.eye(26)[0].double(), size=100)
    assert len(apart) == FRAMES and same.size == (200, 100)
    left, right = (np.array(same.convert("L"))[25:, i : i + 100] for i in (0, 100))
    assert np.array_equal(left, right)  # below the labels
    left, right = (np.array(apart[0].convert("L"))[25:, i : i + 100] for i in (0, 100))
    assert not np.array_equal(left, right)  # thirty centimetres off


# a run


def test_a_run_on_motion_leaves_figures_a_film_and_a_file_that_robots_read(tmp_path):
    published = pretend_published(tmp_path / "site", LAFAN_FILES=write_lafan(tmp_path))
    settings = ("--dataset=lafan", f"--data_dir={tmp_path}", "--n_tokens=64", "--vocab_size=16")
    settings += ("--width=16", "--n_heads=2", "--n_samples=3", "--batch_size=4", "--max_steps=3")
    settings += ("--eval_interval=3", f"--out_dir={tmp_path / 'run'}", "--decoder_layers=1")
    output = succeed("train.py", *settings, DAPS_CACHE=str(tmp_path / "cache"), **published)
    assert "cm" in output and "degrees" in output and "FID" not in output
    decoded = read_motion(tmp_path / "run" / "motion.csv")
    assert decoded.shape == (2 * FRAMES, 26)
    np.testing.assert_allclose(np.linalg.norm(decoded[:, 3:7], axis=1), 1, atol=1e-5)
    assert Image.open(tmp_path / "run" / "motion.gif").n_frames == 2 * FRAMES
    figures = Image.open(tmp_path / "run" / "reconstructions.png").convert("L")
    assert figures.getextrema() == (pytest.approx(40, abs=30), 255)
