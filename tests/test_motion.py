"""LAFAN1 on the Unitree H1: kinematics against MuJoCo, round trips, splits, figures, a run."""

import io
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL, motion_dataset, motion_frames, train_here, write_lafan
from PIL import Image

import data
import motion
from configurator import UserError
from data import LAFAN_FILES, MotionDataset, lafan
from motion import FRAMES, LAFAN_VAL, quat_from_axis_angle, quat_mul, quat_rotate

REAL = os.path.join(os.path.expanduser(data.DATA_DIR), "lafan1", "h1")
ROBOT = os.path.join(os.path.dirname(REAL), "h1.xml")
needs_lafan = pytest.mark.skipif(not os.path.isdir(REAL), reason="DAPS_DATA has no LAFAN1")
needs_robot = pytest.mark.skipif(not os.path.exists(ROBOT), reason="DAPS_DATA has no h1.xml")


# kinematics


def test_quaternions_rotate_vectors_as_matrices_do():
    v, angle = torch.randn(5, 3).double(), torch.rand(5).double() * 6 - 3
    c, s = angle.cos(), angle.sin()
    rotated = torch.stack([c * v[:, 0] - s * v[:, 1], s * v[:, 0] + c * v[:, 1], v[:, 2]], dim=1)
    torch.testing.assert_close(quat_rotate(quat_from_axis_angle("z", angle), v), rotated)
    a, b = quat_from_axis_angle("x", angle), quat_from_axis_angle("y", angle.flip(0))
    torch.testing.assert_close(quat_rotate(quat_mul(a, b), v), quat_rotate(a, quat_rotate(b, v)))
    torch.testing.assert_close(quat_rotate(motion.quat_conj(a), quat_rotate(a, v)), v)


@needs_lafan
@needs_robot
def test_forward_kinematics_agrees_with_mujoco_on_a_thousand_real_frames():
    mujoco = pytest.importorskip("mujoco", reason="mujoco is not installed")
    model = mujoco.MjModel.from_xml_path(ROBOT)
    state = mujoco.MjData(model)
    names = (*LAFAN_VAL[:2], "fallAndGetUp1_subject1", "sprint1_subject2")
    files = [motion.read_motion(os.path.join(REAL, f"{name}.csv"))[5::15][:250] for name in names]
    frames = torch.from_numpy(np.concatenate(files))[:, [0, 1, 2, 6, 3, 4, 5, *range(7, 26)]]
    ours = motion.joint_positions(torch.from_numpy(np.concatenate(files))).numpy()  # (1000, 20, 3)
    _, rotations = motion.forward_kinematics(frames[:, 7:])
    rotations = quat_mul(frames[:, None, 3:7], rotations).numpy()
    for frame, positions, rotation in zip(frames, ours, rotations, strict=True):
        state.qpos[:] = frame  # the real part of the quaternion first
        mujoco.mj_kinematics(model, state)
        assert abs(state.xpos[1:] - positions).max() < 1e-5
        assert (1 - abs((state.xquat[2:] * rotation).sum(axis=1))).max() < 1e-6


def test_angles_that_are_a_turn_apart_are_equal():
    true = torch.from_numpy(motion_frames(3)).view(1, 3, 26)
    for off in (0.3, -0.3, 2 * math.pi + 0.3, -4 * math.pi - 0.3):
        _, degrees = motion.frame_errors(true, true + off * (torch.arange(26) > 6).double())
        assert degrees.item() == pytest.approx(math.degrees(0.3))


def test_a_mirrored_robot_is_its_mirror_image():
    frames = torch.from_numpy(motion_frames(50)).view(1, 50, 26)
    frames[..., 7:] += torch.randn(50, 19).double()  # bent in all directions
    other = [0, *range(6, 11), *range(1, 6), 11, *range(16, 20), *range(12, 16)]
    reflected = motion.joint_positions(frames)[..., other, :] * torch.tensor([1, -1, 1])
    ours, relative = motion.mirrored(frames), motion.relative_frames
    torch.testing.assert_close(motion.joint_positions(ours), reflected)
    torch.testing.assert_close(motion.mirrored(ours), frames)
    torch.testing.assert_close(relative(ours), motion.mirrored(relative(frames)))


# files and segments


@needs_lafan
def test_real_frames_survive_the_round_trip_and_384_components_lose_little():
    found = lafan(os.path.expanduser(data.DATA_DIR))
    assert sum(len(s.clips) for s in found.segments.values()) == 264_705
    val, index = found.segments["val"], torch.arange(found.n_val)
    theirs, relative = val.frames(index), val[index]
    ours, numbers = val.to_world(relative, index), [0, 1, 2, *range(7, 26)]
    torch.testing.assert_close(ours[..., numbers], theirs[..., numbers])
    cosine = (ours[..., 3:7] * theirs[..., 3:7]).sum(dim=-1).abs()
    assert (cosine / theirs[..., 3:7].norm(dim=-1)).min() > 1 - 1e-9
    cm, degrees = motion.frame_errors(relative, found.scale.inverse(found.scale(theirs)))
    assert found.shape == (64, 6) and cm.mean() < 0.3 and degrees.mean() < 0.2


def test_all_components_together_are_an_exact_change_of_basis(monkeypatch):
    """It also preserves distances: log p(x|z) is that of frames times WEIGHTS."""
    monkeypatch.setattr(motion, "COLUMNS", 13)  # 64 * 13 = 832
    found = motion_dataset()
    x, scale = found.segments["val"][torch.arange(found.n_val)], found.scale
    with torch.autocast("cpu", torch.bfloat16):  # x stays in float32
        seen = scale(x)
    torch.testing.assert_close(scale.inverse(seen), x, atol=1e-5, rtol=0)
    ours = ((scale(x[::2]) - scale(x[1::2])) * scale.std).flatten(1).norm(dim=1)
    distance = ((x[::2] - x[1::2]) * motion.WEIGHTS).flatten(1).norm(dim=1).float()
    torch.testing.assert_close(ours, distance)


def test_a_file_that_is_missing_or_not_the_published_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LAFAN_FILES", write_lafan(tmp_path, n=40))
    monkeypatch.setattr(data, "LAFAN_URL", "http://127.0.0.1:9/")
    assert lafan(str(tmp_path)).n_val == 4
    path = tmp_path / "lafan1" / "h1" / "run1_subject2.csv"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(UserError, match=r"^\S*/run1_subject2.csv is not the published file[^\n]*$"):
        lafan(str(tmp_path))
    os.remove(path)
    with pytest.raises(UserError, match=r"^\S*/run1_subject2.csv is missing[^\n]*$"):
        lafan(str(tmp_path))


def test_segments_do_not_depend_on_where_and_which_way_they_begin():
    frames = motion_frames(FRAMES)
    moved = frames.copy()
    turn = quat_from_axis_angle("z", torch.tensor(2.0).double())
    moved[:, :3] = quat_rotate(turn, torch.from_numpy(frames[:, :3])).numpy() + [5, -7, 0]
    q = quat_mul(turn, torch.from_numpy(frames[:, [6, 3, 4, 5]])).numpy()
    moved[:, 3:7] = -q[:, [1, 2, 3, 0]]  # the other quaternion of the same rotation
    found = MotionDataset({"train": [motion_frames(200)], "val": [frames, moved]})
    x, _ = found.read("val", torch.arange(2))
    torch.testing.assert_close(x[0], x[1], atol=1e-4, rtol=1e-4)
    assert (x[:, 0, :2].abs() < 1e-6).all() and (x[:, 0, 6] >= 0).all()  # starts at zero
    from_world = found.scale(torch.from_numpy(np.stack([frames, moved])))
    torch.testing.assert_close(from_world, found.scale(x), atol=1e-4, rtol=1e-4)


def test_half_of_training_is_mirrored_and_none_of_validation():
    found, index = motion_dataset(), torch.arange(200)
    x, _ = found.read("train", index)
    drawn, _ = found.read("train", index, [(0, 3, 5, i) for i in range(200)])
    same, turned = ((drawn == y).all(dim=(1, 2)) for y in (x, motion.mirrored(x)))
    assert (same ^ turned).all() and 70 < same.sum() < 130
    ((_, val, _),) = found.val_batches(found.val_index(), 99)
    assert torch.equal(val, found.segments["val"][found.val_index()].float())
    again = torch.cat([found.train_batch(0, 7, 8, part)[0] for part in (slice(3), slice(3, 8))])
    assert torch.equal(again, found.train_batch(0, 7, 8)[0])  # whatever the number of processes


def test_no_segment_spans_two_files_and_all_segments_of_a_file_are_listed():
    found = motion_dataset(n=40)  # training files of 40, 41 and 42 frames
    starts = [*range(0, 9), *range(40, 50), *range(81, 92)]
    assert found.segments["train"].starts.tolist() == starts and found.n_train == len(starts)
    assert [part.tolist() for part in found.segments["val"].by_clip] == [[0], [1], [2], [3]]
    assert [len(part) for part in motion_dataset().segments["val"].by_clip] == [3, 3, 3, 3]
    assert motion_dataset().val_index(4).tolist() == [0, 3, 6, 9]  # one of each file


def test_validation_files_never_train_and_the_scale_is_that_of_training():
    assert set(LAFAN_VAL) < set(LAFAN_FILES) and len(LAFAN_FILES) == 40
    one, other = motion_dataset(), motion_dataset(n_val=1)
    assert one.key("train") == other.key("train") and one.key("val") != other.key("val")
    assert all(map(torch.equal, one.scale.buffers(), other.scale.buffers()))
    x, _ = one.read("train", torch.arange(0, one.n_train, FRAMES))
    x = torch.cat([x, motion.mirrored(x)])
    torch.testing.assert_close(one.scale.span, x.amax(dim=(0, 1)) - x.amin(dim=(0, 1)))
    x = one.scale(x)
    assert x.shape[1:] == one.shape
    assert x.mean(dim=0).abs().max() < 1e-4 and x.std(dim=0).max() < 1.1


def test_errors_are_measured_in_centimetres_and_degrees():
    found = motion_dataset()
    x, _ = found.read("val", torch.arange(2))
    frames, offset = x.double(), torch.zeros(26).double()
    offset[0] = 0.1  # ten centimetres ahead
    cm, degrees = found.errors(x, SimpleNamespace(mean=frames + offset))
    assert cm.tolist() == pytest.approx([10, 10], abs=1e-3) and degrees.max() < 1e-3


# figures and files


def test_frames_are_written_as_they_are_read():
    frames = torch.from_numpy(motion_frames(70))
    file = io.StringIO(motion.frames_to_csv(frames.view(2, 35, 26)))
    np.testing.assert_allclose(motion.read_motion(file), frames, atol=1e-6)


def test_a_run_on_motion_leaves_figures_a_film_and_a_file_that_robots_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LAFAN_FILES", write_lafan(tmp_path))
    settings = ("--dataset=lafan", f"--data_dir={tmp_path}", "--n_tokens=64", "--max_steps=3")
    output = train_here(*SMALL, *settings, f"--out_dir={tmp_path / 'run'}")
    assert "cm" in output and "degrees" in output and "FID" not in output
    decoded = motion.read_motion(tmp_path / "run" / "motion.csv")
    assert decoded.shape == (2 * FRAMES, 26)
    np.testing.assert_allclose(np.linalg.norm(decoded[:, 3:7], axis=1), 1, atol=1e-5)
    assert Image.open(tmp_path / "run" / "motion.gif").n_frames == 2 * FRAMES
    figures = Image.open(tmp_path / "run" / "reconstructions.png").convert("L")
    assert figures.getextrema() == (pytest.approx(40, abs=30), 255)
