"""LAFAN1 on the Unitree H1 robot: kinematics, features of motion and their inverse, stick figures.

The data are 40 CSV files of human motion retargeted to the robot, at 30 frames per second. A frame
is 26 numbers: position of the pelvis in metres (3), its orientation as a quaternion x y z w (4),
joint angles in radians (19). Networks see segments of 32 frames as features:

    read_motion         file                ->  frames (n, 26)
    motion_features     frames of one file  ->  a clip: what does not depend on the segment
    Segments            clips               ->  features (N, 32, 146)
    features_to_frames  features            ->  frames (N, 32, 26), relative to the segment's origin
    FeatureScale        frames or features  <-> what networks see, (N, 32, 121)

N segments, n frames, 19 links, one per joint. Quaternions have the real part first, except in
frames. This file imports nothing from this project: it can be copied alone.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

LAFAN_VAL = ("dance2_subject2", "fight1_subject2", "run2_subject1", "walk2_subject4")  # files
GROUND = torch.tensor([1, 1, 0])  # position * GROUND is the point on the ground below
FRAMES, FPS = 32, 30  # of a segment; per second
N_LINKS, N_ROOT = 19 * 7, 13  # columns of features: position and rotation of each link; the root

# The robot's links: name, parent (0 is the pelvis, 1 the first link, ...), offset from the parent
# in metres, axis of the joint, tilt of the joint about x in radians, middle of the joint's range.
TILT = 2 * math.atan2(0.216438, 0.976296)
H1 = (
    ("left hip yaw", 0, (0, 0.0875, -0.1742), "z", 0, 0),
    ("left hip roll", 1, (0.039468, 0, 0), "x", 0, 0),
    ("left hip pitch", 2, (0, 0.11536, 0), "y", 0, -0.305),
    ("left knee", 3, (0, 0, -0.4), "y", 0, 0.895),
    ("left ankle", 4, (0, 0, -0.4), "y", 0, -0.175),
    ("right hip yaw", 0, (0, -0.0875, -0.1742), "z", 0, 0),
    ("right hip roll", 6, (0.039468, 0, 0), "x", 0, 0),
    ("right hip pitch", 7, (0, -0.11536, 0), "y", 0, -0.305),
    ("right knee", 8, (0, 0, -0.4), "y", 0, 0.895),
    ("right ankle", 9, (0, 0, -0.4), "y", 0, -0.175),
    ("torso", 0, (0, 0, 0), "z", 0, 0),
    ("left shoulder pitch", 11, (0.0055, 0.15535, 0.42999), "y", TILT, 0),
    ("left shoulder roll", 12, (-0.0055, 0.0565, -0.0165), "x", -TILT, 1.385),
    ("left shoulder yaw", 13, (0, 0, -0.1343), "z", 0, 1.575),
    ("left elbow", 14, (0.0185, 0, -0.198), "y", 0, 0.68),
    ("right shoulder pitch", 11, (0.0055, -0.15535, 0.42999), "y", -TILT, 0),
    ("right shoulder roll", 16, (-0.0055, -0.0565, -0.0165), "x", TILT, -1.385),
    ("right shoulder yaw", 17, (0, 0, -0.1343), "z", 0, -1.575),
    ("right elbow", 18, (0.0185, 0, -0.198), "y", 0, 0.68),
)


def read_motion(file):
    """The frames of a file, given as a path or open file: (n, 26) float64."""
    return np.loadtxt(file, delimiter=",", ndmin=2)


def frames_to_csv(frames):
    """The inverse, as text: frames (..., 26) in the format of the files."""
    rows = frames.reshape(-1, frames.shape[-1]).tolist()
    return "".join(",".join(f"{value:.6f}" for value in row) + "\n" for row in rows)


# ---------------------------------------------------------------------------------------------
# kinematics


def quat_mul(a, b):
    """The rotation b, then the rotation a: (..., 4)."""
    (aw, av), (bw, bv) = ((q[..., :1], q[..., 1:]) for q in (a, b))
    real = aw * bw - (av * bv).sum(dim=-1, keepdim=True)
    cross = torch.linalg.cross(*torch.broadcast_tensors(av, bv))
    return torch.cat([real, aw * bv + bw * av + cross], dim=-1)


def quat_conj(q):
    """The inverse of a rotation."""
    return q * q.new_tensor([1, -1, -1, -1])


def quat_rotate(q, v):
    """Vectors v (..., 3) rotated by unit quaternions q (..., 4)."""
    w, (u, v) = q[..., :1], torch.broadcast_tensors(q[..., 1:], v)
    cross = 2 * torch.linalg.cross(u, v)
    return v + w * cross + torch.linalg.cross(u, cross)


def quat_from_axis_angle(axis, angle):
    """The rotation by angle (...) about an axis "x", "y" or "z": (..., 4)."""
    q = angle.new_zeros(*angle.shape, 4)
    q[..., 0], q[..., 1 + "xyz".index(axis)] = (angle / 2).cos(), (angle / 2).sin()
    return q


def nonnegative_real(q):
    """The one of a rotation's two quaternions that has w >= 0."""
    return q * torch.where(q[..., :1] < 0, -1.0, 1.0)


def forward_kinematics(angles):
    """Joint angles (..., 19) -> positions (..., 19, 3) and rotations (..., 19, 4) of the links in
    the frame of the pelvis."""
    identity = angles.new_tensor([1.0, 0, 0, 0]).expand(*angles.shape[:-1], 4)
    positions, rotations = [angles.new_zeros(*angles.shape[:-1], 3)], [identity]  # of the pelvis
    for j, (_, parent, offset, axis, tilt, _) in enumerate(H1):
        offset = quat_rotate(rotations[parent], angles.new_tensor(offset))
        positions.append(positions[parent] + offset)
        tilted = quat_from_axis_angle("x", angles.new_tensor(tilt))
        joint = quat_mul(tilted, quat_from_axis_angle(axis, angles[..., j]))
        rotations.append(quat_mul(rotations[parent], joint))
    return torch.stack(positions[1:], dim=-2), torch.stack(rotations[1:], dim=-2)


def inverse_kinematics(rotations):
    """Joint angles (..., 19) from the links' rotations (..., 19, 4), which need not be exact: any
    rotation that a joint cannot make is dropped."""
    pelvis, angles = rotations.new_tensor([1.0, 0, 0, 0]), []
    for j, (_, parent, _, axis, tilt, middle) in enumerate(H1):
        above = rotations[..., parent - 1, :] if parent else pelvis
        joint = quat_mul(quat_conj(above), rotations[..., j, :])
        joint = quat_mul(quat_from_axis_angle("x", rotations.new_tensor(-tilt)), joint)
        angle = 2 * torch.atan2(joint[..., 1 + "xyz".index(axis)], joint[..., 0])
        # Angles are known up to whole turns: take the one nearest the middle of the joint's range.
        angles.append(torch.remainder(angle - middle + math.pi, 2 * math.pi) + middle - math.pi)
    return torch.stack(angles, dim=-1)


def joint_positions(frames):
    """Positions of the pelvis and the 19 links in the world: (..., 26) -> (..., 20, 3)."""
    positions, _ = forward_kinematics(frames[..., 7:])
    root, q = frames[..., None, :3], frames[..., None, [6, 3, 4, 5]]
    return torch.cat([root, quat_rotate(q, positions) + root], dim=-2)


def frame_errors(true, decoded):
    """Mean errors of frames (N, n, 26): of joints in cm (N,), of joint angles in degrees (N,)."""
    distance = (joint_positions(true) - joint_positions(decoded)).norm(dim=-1)  # (N, n, 20)
    angle = (true[..., 7:] - decoded[..., 7:]).abs()  # (N, n, 19)
    angle = torch.minimum(angle, 2 * math.pi - angle) * 180 / math.pi
    return 100 * distance.mean(dim=(1, 2)), angle.mean(dim=(1, 2))


# ---------------------------------------------------------------------------------------------
# features


def motion_features(frames):
    """Frames (..., n, 26) -> positions and rotations of the links in the pelvis frame (..., n, 133)
    float32; position (..., n, 3) and rotation (..., n, 4) of the root in the world; its linear and
    angular velocity in its own frame (..., n, 6), by central differences, one-sided at the ends."""
    frames = torch.as_tensor(frames, dtype=torch.float64)
    positions, rotations = forward_kinematics(frames[..., 7:])
    links = torch.cat([positions, nonnegative_real(rotations)], dim=-1).flatten(-2).float()
    root, q = frames[..., :3], nn.functional.normalize(frames[..., [6, 3, 4, 5]], dim=-1)
    t = torch.arange(frames.size(-2))
    earlier, later = (t - 1).clamp_min(0), (t + 1).clamp_max(len(t) - 1)
    seconds = (later - earlier).unsqueeze(1) / FPS  # (n, 1)
    linear = quat_rotate(quat_conj(q), root[..., later, :] - root[..., earlier, :]) / seconds
    change = nonnegative_real(quat_mul(quat_conj(q[..., earlier, :]), q[..., later, :]))
    sine = change[..., 1:].norm(dim=-1, keepdim=True)
    angle = 2 * torch.atan2(sine, change[..., :1])
    angular = change[..., 1:] / sine.clamp_min(1e-12) * angle / seconds
    return links, root, q, torch.cat([linear, angular], dim=-1)


def segment_features(links, root, q, velocity):
    """motion_features of segments, (..., 32, d) each -> features (..., 32, 146) float64, with
    position and rotation of the root relative to the segment's origin."""
    point, heading = ground_frame(root[..., :1, :], q[..., :1, :])  # (..., 1, d)
    back = quat_conj(heading)
    root, q = quat_rotate(back, root - point), quat_mul(back, q)
    # A rotation has two quaternions: w >= 0 in the first frame, then no jumps.
    flips = (q[..., 1:, :] * q[..., :-1, :]).sum(dim=-1, keepdim=True).sign()
    first = torch.where(q[..., :1, :1] < 0, -1.0, 1.0).to(q)
    q = q * torch.cat([first, flips], dim=-2).cumprod(dim=-2)
    return torch.cat([links, root, q, velocity], dim=-1)


def ground_frame(root, q):
    """The origin of a segment that starts with the root at root (..., 3) and rotation q (..., 4):
    the point on the ground below, and the rotation about z that turns x ahead."""
    w, x, y, z = q.unbind(dim=-1)
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return root * GROUND.to(root), quat_from_axis_angle("z", yaw)


def features_to_frames(features):
    """Features (..., 32, 146), exact or not -> frames (..., 32, 26) relative to the origin."""
    links, root, q, _ = features.split((N_LINKS, 3, 4, 6), dim=-1)
    rotations = nn.functional.normalize(links.unflatten(-1, (19, 7))[..., 3:], dim=-1)
    q = nn.functional.normalize(q, dim=-1)[..., [1, 2, 3, 0]]
    return torch.cat([root, q, inverse_kinematics(rotations)], dim=-1)


class Segments:
    """Segments of 32 frames that start every `stride` frames of each clip; none spans two clips.
    segments[index] are their features (N, 32, 146) float64."""

    def __init__(self, clips, stride):  # clips: motion_features of each file
        self.parts = [torch.cat(part) for part in zip(*clips, strict=True)]
        starts, n = [], 0
        for links, *_ in clips:
            starts.append(torch.arange(n, n + len(links) - FRAMES + 1, stride))
            n += len(links)
        self.starts = torch.cat(starts)  # the first frame of each segment
        self.by_clip = torch.arange(len(self.starts)).split([len(part) for part in starts])

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        index = self.starts[index].unsqueeze(1) + torch.arange(FRAMES)  # (N, 32)
        return segment_features(*(part[index] for part in self.parts))

    def to_world(self, frames, index):
        """Frames (N, 32, 26) relative to the origins of these segments, in world coordinates."""
        start = self.starts[index].unsqueeze(1)  # (N, 1)
        point, heading = ground_frame(self.parts[1][start], self.parts[2][start])
        root = quat_rotate(heading, frames[..., :3]) + point
        q = quat_mul(heading, frames[..., [6, 3, 4, 5]])
        return torch.cat([root, q[..., [1, 2, 3, 0]], frames[..., 7:]], dim=-1)

    def frames(self, index):
        """The frames of these segments in the world: (N, 32, 26)."""
        return self.to_world(features_to_frames(self[index]), index)


class FeatureScale(nn.Module):
    """Standardises motion: frames (..., 32, 26) or features (..., 32, 146) -> (..., 32, 121): what
    hardly varies in training is dropped. unit: a step of 1 as a share of the range in training."""

    def __init__(self, mean, std, unit, kept):  # mean (146,) of all, std and unit of those kept
        super().__init__()
        for name, value in (("mean", mean), ("std", std), ("unit", unit), ("kept", kept)):
            self.register_buffer(name, value)

    @classmethod
    def blank(cls, n_features):
        """To be filled from a checkpoint."""
        ones = torch.ones(n_features)
        return cls(torch.zeros(N_LINKS + N_ROOT), ones, ones, ones.long())

    @classmethod
    def measure(cls, segments):
        """From training segments: of links over all frames, of the root over every sixteenth."""
        links = segments.parts[0]
        root = segments[torch.arange(0, len(segments), FRAMES // 2)][..., -N_ROOT:].flatten(0, 1)
        functions = (torch.mean, torch.var, torch.amin, torch.amax)
        mean, var, low, high = (torch.cat([f(links, 0), f(root, 0)]) for f in functions)
        kept = (var >= 1e-5).nonzero().squeeze(1)
        std, span = var.sqrt().float()[kept], (high - low).float()[kept]
        return cls(mean.float(), std, std / span, kept)

    def forward(self, x):
        if x.size(-1) == 26:
            x = segment_features(*motion_features(x.cpu())).float().to(x.device)
        return (x[..., self.kept] - self.mean[self.kept]) / self.std

    def inverse(self, x):
        """Frames (..., 32, 26) float64 on the CPU."""
        features = self.mean.double().cpu().expand(*x.shape[:-1], -1).clone()
        features[..., self.kept.cpu()] = (x * self.std + self.mean[self.kept]).double().cpu()
        return features_to_frames(features)


# ---------------------------------------------------------------------------------------------
# stick figures

INK, PAPER, LEFT, RIGHT = (40, 40, 40), (255, 255, 255), (31, 90, 180), (214, 84, 32)
FONT = ImageFont.load_default(13)
BONES = [{"left": LEFT, "right": RIGHT}.get(name.split()[0], INK) for name, *_ in H1]


def draw_figure(pen, joints, left, top, size):
    """One figure in a square of the page that spans 1.8 m: joints (20, 3) in metres around a point
    on the ground, seen from ahead and to the side."""
    neck = joints[[12, 16]].mean(dim=0)  # between the shoulders, which are drawn attached to it
    head = neck + 0.15 * (neck - joints[0]) / (neck - joints[0]).norm().clamp_min(1e-6)
    x, y, z = torch.cat([joints, neck[None], head[None]]).unbind(dim=-1)  # (22,) each
    across = left + size * (0.5 + (y - x) / 2**0.5 / 1.8)
    down = top + size * (0.95 - (z + 0.12 * (x + y)) / 1.8)
    points = list(zip(across.tolist(), down.tolist(), strict=True))
    thickness = max(2, size // 40)
    pen.line([points[0], points[20]], INK, thickness)
    for j, (_, parent, *_) in enumerate(H1):
        pen.line([points[20 if parent == 11 else parent], points[j + 1]], BONES[j], thickness)
    pen.circle(points[21], size // 20, INK)


def film(rows, frame_numbers, size=120):
    """One picture: a row for each (label, joints (n, 20, 3)), a column for each frame number."""
    page = Image.new("RGB", (110 + len(frame_numbers) * size, len(rows) * size), PAPER)
    pen = ImageDraw.Draw(page)
    for i, (label, joints) in enumerate(rows):
        joints = joints - joints[:, :1] * GROUND
        pen.text((6, (i + 0.5) * size), label, INK, FONT, anchor="lm")
        for column, t in enumerate(frame_numbers):
            draw_figure(pen, joints[t], 110 + column * size, i * size, size)
    return page


def side_by_side(true, decoded, size=300):
    """The images of an animation, one for each of n frames (n, 26): the true figure on the left,
    the decoded one on the right, both centred on the true pelvis, so that drift shows."""
    true, decoded = joint_positions(true), joint_positions(decoded)  # (n, 20, 3)
    root, pages = true[:, :1] * GROUND, []
    for pair in zip(true - root, decoded - root, strict=True):
        page = Image.new("RGB", (2 * size, size), PAPER)
        pen = ImageDraw.Draw(page)
        for i, (label, joints) in enumerate(zip(("true", "decoded"), pair, strict=True)):
            draw_figure(pen, joints, i * size, 0, size)
            pen.text((i * size + 8, 8), label, INK, FONT)
        pages.append(page.quantize(32))
    return pages


def motion_pictures(segments, reconstruct, samples):
    """Pictures by file name: validation segments above reconstruct(index)[1], (N, 32, 26); samples;
    and the first file, decoded segment by segment, all of it as CSV and its start as GIF."""

    def in_the_world(index):
        return segments.frames(index), segments.to_world(reconstruct(index)[1], index)

    files, rows = segments.by_clip, []  # the segments of each file
    middles = torch.stack([index[len(index) // 2] for index in files])
    for name, true, ours in zip(LAFAN_VAL, *in_the_world(middles), strict=True):
        rows.append((name.replace("_subject", "\nsubject "), joint_positions(true)))
        rows.append(("decoded", joint_positions(ours)))
    drawn = [(f"sample {i + 1}", joint_positions(frames)) for i, frames in enumerate(samples)]
    true, ours = (frames.flatten(0, 1) for frames in in_the_world(files[0]))
    return {
        "reconstructions.png": film(rows, range(0, FRAMES, 4)),
        "samples.png": film(drawn, range(0, FRAMES, 4)),
        "motion.csv": frames_to_csv(ours),
        "motion.gif": side_by_side(true[:224], ours[:224]),
    }
