"""The robot of control.py is that of motion.py, stands, and follows by the weights of daps.py."""

import os

import numpy as np
import pytest
import torch
from conftest import assert_one_line, motion_frames, run, run_here
from PIL import Image

from data import DATA_DIR
from motion import frames_to_csv, joint_positions, read_motion

mujoco = pytest.importorskip("mujoco", reason="mujoco is not installed (requirements-robot.txt)")
import control  # noqa: E402

MODEL = os.path.join(os.path.expanduser(DATA_DIR), "lafan1", "h1.xml")
if not os.path.exists(MODEL):
    pytest.skip("DAPS_DATA names no folder with lafan1/h1.xml", allow_module_level=True)


@pytest.fixture(scope="module")
def robot():
    return control.load_robot(MODEL)


def standing(n):
    """Frames (n, 26) of a robot that stands with bent knees, its soles on the ground."""
    frame = np.zeros(26)
    frame[6] = 1
    frame[[9, 14]], frame[[10, 15]], frame[[11, 16]] = -0.4, 0.8, -0.4  # hips, knees, ankles
    ankle = joint_positions(torch.from_numpy(frame))[5, 2].item()
    frame[2] = control.SOLE - ankle
    return np.tile(frame, (n, 1))


def test_the_robot_s_links_are_where_motion_py_has_them(robot):
    body = mujoco.MjData(robot)
    for frame in motion_frames(40)[::13]:
        body.qpos[:] = frame[control.QPOS]
        mujoco.mj_kinematics(robot, body)
        expected = joint_positions(torch.from_numpy(frame)).numpy()
        np.testing.assert_allclose(body.xpos[1:], expected, atol=1e-4)
        np.testing.assert_allclose(body.qpos[control.FRAME], frame, atol=1e-12)


def test_a_robot_in_a_standing_pose_stands_for_five_seconds(robot):
    done, wanted, _ = control.follow(robot, standing(151), control.Plan(n_samples=48))
    seconds, cm, degrees = control.score(done, wanted)
    assert seconds == pytest.approx(5.0) and cm < 40 and degrees < 20


def test_the_published_file_needs_none_of_its_meshes(robot, tmp_path):
    with open(MODEL, encoding="utf-8") as file:
        text = file.read().replace("<asset>", '<asset><mesh file="pelvis.STL"/>')
    shape = '<freejoint/><geom class="visual" mesh="pelvis"/>'
    (tmp_path / "h1.xml").write_text(text.replace("<freejoint/>", shape))
    published = control.load_robot(str(tmp_path / "h1.xml"))
    assert published.ngeom == robot.ngeom == 9 and published.nmesh == 0
    np.testing.assert_array_equal(published.body_mass, robot.body_mass)


def test_a_reward_is_minus_its_three_terms_and_ends_count_four_times_starts(robot):
    reference, rows = control.Reference(robot, standing(4)), np.arange(1, 4)
    still = np.zeros((1, 3, mujoco.mj_stateSize(robot, control.PHYSICS)))
    still[..., 1:27] = reference.qpos[rows]
    assert reference.reward(still, rows).item() == pytest.approx(0, abs=1e-9)

    def cost(column, value, t):
        states = still.copy()
        states[0, t, column] += value
        return -reference.reward(states, rows).item()

    elbow = 0.2 * 0.1**2 / 19  # of the angle alone: no link hangs on it
    assert cost(26, 0.1, 0) == pytest.approx(elbow, rel=1e-4)
    assert cost(26, 0.1, 2) == pytest.approx(4 * elbow, rel=1e-4)
    assert cost(1, 0.1, 1) == pytest.approx(2.5 * 0.1**2, rel=1e-4)  # all links move by 10 cm
    assert cost(27, 0.1, 0) == pytest.approx(0.02 * 0.1**2 / 6, rel=1e-4)  # velocity


def test_weights_meet_the_target_unless_eta_is_given_and_threads_change_nothing(robot):
    frames, plan = standing(7), control.Plan(n_samples=8, horizon=20, ess_target=0.6)
    done, _, ess = control.follow(robot, frames, plan, seed=3)
    again, _, _ = control.follow(robot, frames, plan, seed=3, n_threads=2)
    other, _, _ = control.follow(robot, frames, plan, seed=4)
    assert np.array_equal(done, again) and not np.array_equal(done, other)
    np.testing.assert_allclose(ess, 0.6, atol=1e-3)
    plan = control.Plan(n_samples=8, horizon=20, eta=1e9)
    np.testing.assert_allclose(control.follow(robot, frames, plan)[2], 1.0, atol=1e-6)


def test_frames_at_another_rate_are_those_of_the_motion_between_them():
    frames = motion_frames(61)
    found = control.resample(frames)
    assert found.shape == (101, 26)
    np.testing.assert_allclose(found[::5], frames[::3], atol=1e-9)
    np.testing.assert_allclose(control.resample(found, 50, 30), frames, atol=0.02)


def test_it_writes_what_the_robot_did_and_refuses_what_is_no_motion(tmp_path):
    path, options = tmp_path / "motion.csv", (f"--model={MODEL}", "--n_threads=1", "--n_samples=4")
    path.write_text(frames_to_csv(torch.from_numpy(standing(10))))
    done = run_here("control.py", path, *options, "--seconds=0.1")
    assert done.code == 0 and "0.1 s, still up" in done.output
    assert read_motion(tmp_path / "robot.csv").shape == (4, 26)
    assert (tmp_path / "robot.gif").exists()
    bad = {"1,2\n3,4\n": "2 rows of 2 numbers", "a,b\n": "not a table of numbers"}
    frames = standing(3)
    frames[1, 5] = np.nan
    bad[frames_to_csv(torch.from_numpy(frames))] = "all finite"
    frames = standing(3)
    frames[2, 10] = 3.0
    bad[frames_to_csv(torch.from_numpy(frames))] = "left_knee_joint is up to 0.95 radians beyond"
    for text, message in bad.items():
        path.write_text(text)
        assert_one_line(run_here("control.py", path, *options), message)
    assert_one_line(run_here("control.py", path, "--model=none.xml"), "none.xml is missing")
    assert_one_line(run_here("control.py", path, f"--model={path}"), f"{path}: ")
    assert_one_line(run_here("control.py", tmp_path / "none.csv", *options), "is it there?")
    assert_one_line(run_here("control.py", path, *options, "--seed=-1"), "seed is -1, must be zero")
    assert_one_line(run_here("control.py"), "name one motion")


def test_a_film_is_rendered_where_mujoco_can_draw(tmp_path):
    path = tmp_path / "motion.csv"
    path.write_text(frames_to_csv(torch.from_numpy(standing(10))))
    command = ("control.py", path, f"--model={MODEL}", "--n_samples=4", "--seconds=0.1")
    for renderer, message in (("pencil", "does not work here"), ("disable", "cannot draw here")):
        found = run(*command, MUJOCO_GL=renderer).stderr
        assert found.startswith(f"error: MUJOCO_GL={renderer} {message}") and found.count("\n") == 1
    done = run(*command, MUJOCO_GL="egl")
    if "MUJOCO_GL=egl" in done.stderr:
        pytest.skip("EGL does not work here")
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "robot.gif") as film:
        assert film.n_frames == 4
        page = np.asarray(film.convert("RGB"), dtype=int)
    red, _, blue = page.reshape(-1, 3).T
    assert page.shape == (256, 256, 3) and 0.01 < (blue - red > 60).mean() < 0.1  # left limbs
    assert 0.01 < (red - blue > 60).mean() < 0.1  # right limbs
