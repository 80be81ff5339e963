"""The Unitree H1 in MuJoCo, following a motion by planning with the weights of daps.py.

    pip install -r requirements-robot.txt
    python control.py out/lafan_daps/motion.csv --seconds=10
    python control.py ~/.cache/daps/lafan1/h1/walk1_subject1.csv --start=20
    MUJOCO_GL=egl python control.py out/lafan_daps/motion.csv  # solid figures; or MUJOCO_GL=osmesa

Every 20 ms, K plans for the next 0.6 s are drawn around the last one: targets of the joints'
controllers, which are those of the motion plus splines with Gaussian noise. Each is simulated and
rewarded for staying close to the motion. As in daps.py, the plans are weighted by their rewards, as
boldly as a target for the effective sample size allows, and the next plan is their weighted mean.
The first 20 ms of it are carried out. Nothing is trained. A motion is frames as in LAFAN1, (n, 26)
at 30 per second: a file of the data, motion.csv of a run, or command.csv of policy.py.

Letters: K plans, T steps of control in a plan, J = 19 joints.
"""

from configurator import UserError, configure  # isort: skip (first: it makes errors one line)

import copy
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

try:
    import mujoco
    from mujoco import rollout
except ModuleNotFoundError:
    raise
except Exception:  # of one kind or another, where it cannot draw
    found = os.environ.get("MUJOCO_GL")
    raise UserError(f"MUJOCO_GL={found} does not work here: leave it unset, or try egl") from None

from daps import ess_ratio, log_weights, solve_eta
from data import DATA_DIR, N_CORES
from motion import (
    BONES,
    INK,
    frame_errors,
    frames_to_csv,
    joint_positions,
    read_motion,
    side_by_side,
)
from report import save_picture
from run import setup_device, write

STEP, SUBSTEPS = 0.02, 4  # seconds of control, and steps of physics in each
FALLEN = 0.6  # metres: height of the pelvis below which the robot has fallen
SOLE, FOOT_X, FOOT_Y = 0.07, (-0.06, 0.16), (-0.035, 0.035)  # metres from the ankle
GAINS = {  # stiffness (N m / rad) and damping (N m s / rad) of the joints' controllers
    "hip": (300, 6),
    "knee": (400, 8),
    "ankle": (80, 4),
    "torso": (600, 8),
    "shoulder": (200, 4),
    "elbow": (200, 4),
}
# frames[..., QPOS] are MuJoCo's positions, whose quaternions begin with the real part; and back
QPOS, FRAME = [0, 1, 2, 6, 3, 4, 5, *range(7, 26)], [0, 1, 2, 4, 5, 6, 3, *range(7, 26)]
PHYSICS = mujoco.mjtState.mjSTATE_FULLPHYSICS  # time, positions (26), velocities (25)
STAGE = """<mujoco>
  <visual><headlight ambient="0.5 0.5 0.5" diffuse="0.3 0.3 0.3"/></visual>
  <asset>
    <texture type="skybox" builtin="flat" rgb1="1 1 1" width="8" height="48"/>
    <texture name="squares" type="2d" builtin="checker" rgb1="0.6 0.63 0.65" rgb2="0.66 0.68 0.7"
      width="64" height="64"/>
    <material name="floor" texture="squares" texuniform="true" texrepeat="0.5 0.5"/>
  </asset>
  <worldbody><geom type="plane" size="0 0 1" material="floor"/></worldbody>
</mujoco>"""
ENDS = {  # capsules that end a limb: from, to (metres), radius
    "ankle": [(-0.04, 0, -0.04, 0.14, 0, -0.04, 0.04)],
    "elbow": [(0, 0, 0, 0.25, 0, -0.03, 0.04)],
    "torso": [(0, 0, 0.05, 0, 0, 0.4, 0.08), (0, 0, 0.58, 0, 0, 0.63, 0.09)],  # and the head
}


@dataclass
class Plan:
    """How plans are made; found on training files, see docs/robot.md."""

    n_samples: int = 128  # K
    n_updates: int = 1  # times per step that plans are drawn and averaged
    horizon: int = 30  # T
    n_knots: int = 5  # of the splines
    noise: float = 0.2  # radians, at the first update of a step; half of it at the next
    ess_target: float = 0.1  # effective sample size of the K weights, as a share of K
    eta: float = 0.0  # a fixed temperature of the weights; 0: solved for ess_target
    substeps: int = 2  # of physics in a step of a plan: coarser than the SUBSTEPS of the robot


def read_model(path):
    """The published model of the H1, without its shapes: their meshes are files of their own."""
    try:
        spec = mujoco.MjSpec.from_file(path)
    except ValueError as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
    for part in (*spec.geoms, *spec.meshes):
        spec.delete(part)
    return spec


def load_robot(path):
    """The model with a floor, four round points under each foot, and position controllers within
    the motors' limits. Nothing but feet and floor can touch."""
    spec = read_model(path)
    spec.option.timestep = STEP / SUBSTEPS
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    plane, sphere = mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_SPHERE
    spec.worldbody.add_geom(type=plane, size=[0, 0, 1], contype=0, conaffinity=1)
    for body in (spec.body("left_ankle_link"), spec.body("right_ankle_link")):
        for x, y in ((x, y) for x in FOOT_X for y in FOOT_Y):
            position, size = [x, y, 0.02 - SOLE], [0.02, 0, 0]
            body.add_geom(type=sphere, size=size, pos=position, contype=1, conaffinity=0, mass=0)
    for motor in spec.actuators:
        limits = motor.ctrlrange.copy()
        stiffness, damping = next(g for part, g in GAINS.items() if part in motor.target)
        motor.set_to_position(kp=stiffness, kv=damping)
        motor.forcerange, motor.forcelimited, motor.ctrllimited = limits, True, False
    return spec.compile()


def resample(frames, rate=30, new_rate=50):
    """Frames (n, 26) at one rate per second -> at another; quaternions take the shorter way."""
    t = np.arange(int((len(frames) - 1) * new_rate / rate + 1e-9) + 1) * rate / new_rate
    i = np.minimum(t.astype(int), len(frames) - 2)
    a, b, share = frames[i], frames[i + 1].copy(), (t - i)[:, None]
    b[:, 3:7] *= np.where((a[:, 3:7] * b[:, 3:7]).sum(axis=1, keepdims=True) < 0, -1, 1)
    found = (1 - share) * a + share * b
    found[:, 3:7] /= np.linalg.norm(found[:, 3:7], axis=1, keepdims=True)
    return found


class Reference:
    """A motion at the rate of control: frames, velocities and positions of the joints."""

    def __init__(self, robot, frames):
        self.frames = resample(frames)  # (n, 26)
        self.qpos, self.velocity = self.frames[:, QPOS], np.zeros((len(self.frames), robot.nv))
        for t in range(len(self.frames) - 1):
            mujoco.mj_differentiatePos(robot, self.velocity[t], STEP, *self.qpos[t : t + 2])
        self.velocity[-1] = self.velocity[-2]
        self.joints = joint_positions(torch.from_numpy(self.frames)).float()  # (n, 20, 3)

    def reward(self, states, rows):
        """How close simulated states (K, T, d) stay to the motion at these rows (T,): (K,). Minus
        the mean square distance of joints in metres, of angles and of the pelvis's velocities. The
        end of a plan counts four times as much as its start, which can no longer be changed."""
        frames = torch.from_numpy(states[..., 1:27][..., FRAME]).float()  # (K, T, 26)
        velocity = torch.from_numpy(states[..., 27:33] - self.velocity[rows, :6]).float()
        angles = frames[..., 7:] - torch.from_numpy(self.frames[rows, 7:]).float()
        distance = (joint_positions(frames) - self.joints[rows]).square().sum(dim=-1)
        cost = distance.mean(dim=-1) + 0.2 * angles.square().mean(dim=-1)
        cost = cost + 0.02 * velocity.square().mean(dim=-1)  # (K, T)
        cost = cost @ torch.linspace(1, 4, cost.size(1))
        return -cost.nan_to_num(1e6, 1e6)  # of a simulation that blew up


def follow(robot, frames, plan=None, seed=0, n_threads=1, progress=False):
    """Follow frames (n, 26) from their first state until the robot falls or they end. Returns the
    robot's frames at 50 per second (m, 26), those of the motion (m, 26), and the ESS ratio of every
    update. The result does not depend on the number of threads."""
    p, reference = plan or Plan(), Reference(robot, frames)
    rng, last = np.random.default_rng(seed), len(reference.frames) - 1
    joints = [robot.actuator(robot.joint(j).name).id for j in range(1, robot.njnt)]
    knots = np.linspace(0, p.horizon - 1, p.n_knots)

    def spline(t):  # linear between knots: its value at times t is spline(t) @ its knots
        return np.maximum(0, 1 - np.abs(t[:, None] - knots) / knots[1])

    basis = spline(np.arange(p.horizon))  # (T, n_knots)
    later = spline(np.minimum(knots + 1, p.horizon - 1))  # moves knots by a step
    body, threads = mujoco.MjData(robot), [mujoco.MjData(robot) for _ in range(n_threads)]
    body.qpos[:], body.qvel[:] = reference.qpos[0], reference.velocity[0]
    mujoco.mj_forward(robot, body)
    state, imagined = np.zeros(mujoco.mj_stateSize(robot, PHYSICS)), copy.copy(robot)
    imagined.opt.timestep = STEP / p.substeps
    mean, done, ess = np.zeros((p.n_knots, 19)), [body.qpos.copy()], []
    for t in tqdm(range(last), disable=None if progress else True):
        rows = np.minimum(t + 1 + np.arange(p.horizon), last)  # (T,)
        mujoco.mj_getState(robot, body, state, PHYSICS)
        for update in range(p.n_updates):
            extra = rng.standard_normal((p.n_samples, *mean.shape)) * p.noise / 2**update
            extra[0] = 0  # the last plan itself
            targets = reference.frames[rows, 7:] + basis @ (mean + extra)  # (K, T, J)
            controls = np.zeros((p.n_samples, p.horizon * p.substeps, 19))
            controls[..., joints] = targets.repeat(p.substeps, axis=1)
            start = np.tile(state, (p.n_samples, 1))
            states, _ = rollout.rollout(imagined, threads, start, controls)
            reward = reference.reward(states[:, p.substeps - 1 :: p.substeps], rows).unsqueeze(0)
            log_q = torch.zeros_like(reward)  # the noise is Gaussian for all: only rewards count
            eta = p.eta or solve_eta(reward, log_q, 0.0, p.ess_target)
            log_w = log_weights(reward, log_q, eta, 0.0)  # (1, K)
            ess.append(ess_ratio(log_w).item())
            mean = mean + np.tensordot(log_w[0].exp().double().numpy(), extra, axes=1)
        body.ctrl[joints] = reference.frames[t + 1, 7:] + basis[0] @ mean
        for _ in range(SUBSTEPS):
            mujoco.mj_step(robot, body)
        mean = later @ mean  # the plan, 20 ms later
        done.append(body.qpos.copy())
        if body.qpos[2] < FALLEN:
            break
    return np.array(done)[:, FRAME], reference.frames[: len(done)], np.array(ess)


def read_checked(path, robot):
    """The frames of a file, which must be a motion of this robot."""
    try:
        frames = read_motion(path)
    except ValueError as error:
        raise UserError(f"{path} is not a table of numbers ({error})") from None
    except OSError:
        raise UserError(f"{path} cannot be read: is it there?") from None
    found = f"{path} has {frames.shape[0]} rows of {frames.shape[1]} numbers"
    if frames.shape[1] != 26 or len(frames) < 2 or not np.isfinite(frames).all():
        raise UserError(f"{found}; must be two or more rows of 26, all finite, as in LAFAN1")
    if not frames[:, 3:7].any(axis=1).all():
        raise UserError(f"{found}; 4 to 7 must be a quaternion, not all zero")
    beyond = np.abs(frames[:, 7:] - frames[:, 7:].clip(*robot.jnt_range[1:].T)).max(axis=0)
    if beyond.max() > 0.5:  # LAFAN1 itself exceeds them by up to 0.2
        name = robot.joint(1 + int(beyond.argmax())).name
        raise UserError(f"{path}: {name} is up to {beyond.max():.2f} radians beyond its range")
    return frames


def score(done, wanted):
    """Seconds upright, and mean errors of joints in cm and of joint angles in degrees."""
    cm, degrees = frame_errors(*(torch.from_numpy(f).unsqueeze(0) for f in (wanted, done)))
    return (len(done) - 1) * STEP, cm.item(), degrees.item()


def figure(path, opacity):
    """The robot with visible limbs: capsules from joint to joint, left blue, right orange."""
    spec = read_model(path)
    for body, color in zip(spec.bodies[1:], (INK, *BONES), strict=True):
        limbs = [(0, 0, 0, *child.pos, 0.045) for child in body.bodies if child.pos.any()]
        limbs += [limb for part, ends in ENDS.items() if part in body.name for limb in ends]
        for *ends, radius in limbs:
            geom = body.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, fromto=ends)
            geom.size, geom.rgba = [radius, 0, 0], [*np.divide(color, 255), opacity]
    return spec


def rendered(path, done, wanted, size=256):
    """The images of an animation: the robot's frames (n, 26) and, translucent, the motion's."""
    stage, camera = mujoco.MjSpec.from_string(STAGE), mujoco.MjvCamera()
    for name, opacity in (("robot ", 1.0), ("motion ", 0.3)):
        stage.attach(figure(path, opacity), prefix=name, frame=stage.worldbody.add_frame())
    light = stage.body("robot pelvis").add_light(pos=[0, 0, 4], dir=[0, 0, -1])
    light.mode = mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
    light.type = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    camera.distance, camera.azimuth, camera.elevation = 3.0, 135, -12
    stage, pages = stage.compile(), []
    bodies = mujoco.MjData(stage)
    with mujoco.Renderer(stage, size, size) as renderer:
        for pair in zip(done[:, QPOS], wanted[:, QPOS], strict=True):
            bodies.qpos[:] = np.concatenate(pair)
            mujoco.mj_forward(stage, bodies)
            camera.lookat[:] = *pair[0][:2], 0.85
            renderer.update_scene(bodies, camera)
            page = Image.fromarray(renderer.render())
            palette = pages[0] if pages else page.quantize(48)  # one for all: nothing flickers
            pages.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
    return pages


if __name__ == "__main__":
    seconds = 10.0  # how much of the motion to follow
    start = 0.0  # second of the motion at which to start
    n_samples = 128  # K, plans per update
    n_updates = 1  # times per step that plans are drawn and averaged
    seed = 0  # of the noise
    n_threads = N_CORES  # that simulate
    model = os.path.join(DATA_DIR, "lafan1", "h1.xml")  # of the robot, see docs/robot.md
    out_dir = ""  # where robot.gif and robot.csv go; empty: beside the motion

    settings, paths = configure(globals(), sys.argv[1:])
    if len(paths) != 1:
        raise UserError("name one motion: python control.py out/lafan_daps/motion.csv")
    if n_samples < 2:
        raise UserError("n_samples is 1, must be at least 2: plans are compared")
    setup_device("cpu")
    if not os.path.exists(model := os.path.expanduser(model)):
        raise UserError(f"{model} is missing: docs/robot.md says where to get it; or set --model")
    robot = load_robot(model)
    if renderer := os.environ.get("MUJOCO_GL"):
        try:
            mujoco.Renderer(robot, 8, 8).close()
        except Exception:
            raise UserError(f"MUJOCO_GL={renderer} cannot draw here: leave it unset") from None
    frames = read_checked(paths[0], robot)[round(30 * start) :][: max(1, round(30 * seconds)) + 1]
    if len(frames) < 2:
        raise UserError(f"start is {start}, must be before the end of {paths[0]}")
    plan = Plan(n_samples, n_updates)
    done, wanted, ess = follow(robot, frames, plan, seed, n_threads, progress=True)
    upright, cm, degrees = score(done, wanted)
    end = "fell" if done[-1, 2] < FALLEN else "still up"
    print(f"{upright:.1f} s, {end}; {cm:.1f} cm, {degrees:.1f} degrees from the motion")
    out_dir = out_dir or os.path.dirname(paths[0]) or "."
    done, wanted = (resample(frames, 50, 30) for frames in (done, wanted))
    write(os.path.join(out_dir, "robot.csv"), frames_to_csv(done))
    if renderer:
        pages = rendered(model, done, wanted)
    else:
        figures = torch.from_numpy(wanted), torch.from_numpy(done)
        pages = side_by_side(*figures, labels=("motion", "robot"))
    save_picture(os.path.join(out_dir, "robot.gif"), pages)
    print(f"in {out_dir}: robot.gif, robot.csv")
