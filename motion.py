"""LAFAN1 on the Unitree H1 robot: kinematics, segments and what networks see of them, figures.

The data are 40 CSV files of human motion retargeted to the robot, at 30 frames per second. A frame
is 26 numbers: position of the pelvis in metres (3), its orientation as a quaternion x y z w (4),
joint angles in radians (19). Networks see segments of 32 frames:

    read_motion      file            ->  frames (n, 26) in the world
    Segments         frames of files ->  segments (N, 32, 26), each relative to its own origin
    relative_frames  the same for any frames (N, 32, 26); Segments.to_world is the inverse
    FeatureScale     segments        <-> what networks see, (N, 64, 6): principal components

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
FRAMES, ROWS, COLUMNS = 32, 64, 6  # of a segment in time; of what networks see
# What an error counts, in radians of a joint: a metre of the root 2, its quaternion as its angle.
WEIGHTS = torch.tensor([2.0] * 7 + [1.0] * 19)

# The robot's links: name, parent (0 is the pelvis, 1 the first link, ...), offset from the parent
# in metres, axis of the joint, tilt of the joint about x in radians.
TILT = 2 * math.atan2(0.216438, 0.976296)
H1 = (
    ("left hip yaw", 0, (0, 0.0875, -0.1742), "z", 0),
    ("left hip roll", 1, (0.039468, 0, 0), "x", 0),
    ("left hip pitch", 2, (0, 0.11536, 0), "y", 0),
    ("left knee", 3, (0, 0, -0.4), "y", 0),
    ("left ankle", 4, (0, 0, -0.4), "y", 0),
    ("right hip yaw", 0, (0, -0.0875, -0.1742), "z", 0),
    ("right hip roll", 6, (0.039468, 0, 0), "x", 0),
    ("right hip pitch", 7, (0, -0.11536, 0), "y", 0),
    ("right knee", 8, (0, 0, -0.4), "y", 0),
    ("right ankle", 9, (0, 0, -0.4), "y", 0),
    ("torso", 0, (0, 0, 0), "z", 0),
    ("left shoulder pitch", 11, (0.0055, 0.15535, 0.42999), "y", TILT),
    ("left shoulder roll", 12, (-0.0055, 0.0565, -0.0165), "x", -TILT),
    ("left shoulder yaw", 13, (0, 0, -0.1343), "z", 0),
    ("left elbow", 14, (0.0185, 0, -0.198), "y", 0),
    ("right shoulder pitch", 11, (0.0055, -0.15535, 0.42999), "y", -TILT),
    ("right shoulder roll", 16, (-0.0055, -0.0565, -0.0165), "x", TILT),
    ("right shoulder yaw", 17, (0, 0, -0.1343), "z", 0),
    ("right elbow", 18, (0.0185, 0, -0.198), "y", 0),
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
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


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


def forward_kinematics(angles):
    """Angles (..., 19) -> positions (..., 19, 3), rotations (..., 19, 4) seen from the pelvis."""
    identity = angles.new_tensor([1.0, 0, 0, 0]).expand(*angles.shape[:-1], 4)
    positions, rotations = [angles.new_zeros(*angles.shape[:-1], 3)], [identity]  # of the pelvis
    for j, (_, parent, offset, axis, tilt) in enumerate(H1):
        offset = quat_rotate(rotations[parent], angles.new_tensor(offset))
        positions.append(positions[parent] + offset)
        tilted = quat_from_axis_angle("x", angles.new_tensor(tilt))
        joint = quat_mul(tilted, quat_from_axis_angle(axis, angles[..., j]))
        rotations.append(quat_mul(rotations[parent], joint))
    return torch.stack(positions[1:], dim=-2), torch.stack(rotations[1:], dim=-2)


def joint_positions(frames):
    """Positions of the pelvis and the 19 links in the world: (..., 26) -> (..., 20, 3)."""
    positions, _ = forward_kinematics(frames[..., 7:])
    root, q = frames[..., None, :3], frames[..., None, [6, 3, 4, 5]]
    return torch.cat([root, quat_rotate(q, positions) + root], dim=-2)


def frame_errors(true, decoded):
    """Mean errors of frames (N, n, 26): of joints in cm (N,), of joint angles in degrees (N,)."""
    distance = (joint_positions(true) - joint_positions(decoded)).norm(dim=-1)  # (N, n, 20)
    turn = (true - decoded)[..., 7:] + math.pi  # (N, n, 19)
    angle = (turn.remainder(2 * math.pi) - math.pi).abs() * 180 / math.pi
    return 100 * distance.mean(dim=(1, 2)), angle.mean(dim=(1, 2))


# ---------------------------------------------------------------------------------------------
# segments


def ground_frame(frames):
    """The origin of segments (..., 32, 26): the point on the ground below the first root, (..., 1,
    3), and the rotation about z that turns x to where it faces, (..., 1, 4)."""
    point, (x, y, z, w) = frames[..., :1, :3].clone(), frames[..., :1, 3:7].unbind(dim=-1)
    point[..., 2] = 0
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return point, quat_from_axis_angle("z", yaw)


def placed(frames, point, heading):
    """Frames (..., 26) seen from a point on the ground and a heading there -> in the world."""
    root = quat_rotate(heading, frames[..., :3]) + point
    q = quat_mul(heading, frames[..., 3:7].roll(1, -1)).roll(-1, -1)
    return torch.cat([root, q, frames[..., 7:]], dim=-1)


def relative_frames(frames):
    """Frames (..., 32, 26) relative to their own origin; those that are already stay the same."""
    (point, heading), angles = ground_frame(frames), frames[..., 7:]
    back = quat_conj(heading)
    q = nn.functional.normalize(frames[..., 3:7], dim=-1).roll(1, -1)  # w first
    root, q = quat_rotate(back, frames[..., :3] - point), quat_mul(back, q)
    # A rotation has two quaternions: w >= 0 in the first frame, then no jumps.
    steps = (q[..., 1:, :] * q[..., :-1, :]).sum(dim=-1, keepdim=True)
    signs = torch.where(torch.cat([q[..., :1, :1], steps], dim=-2) < 0, -1.0, 1.0)
    q = q * signs.to(q).cumprod(dim=-2)
    return torch.cat([root, q.roll(-1, -1), angles], dim=-1)


def mirrored(frames):
    """Frames (..., 26) with left and right exchanged: y and turns about x and z change sign."""
    names, other = [name for name, *_ in H1], {"left": "right", "right": "left"}
    pairs = [" ".join(other.get(word, word) for word in name.split()) for name in names]
    order = [*range(7), *(7 + names.index(name) for name in pairs)]
    signs = [1, -1, 1, -1, 1, -1, 1, *(1 if axis == "y" else -1 for *_, axis, _ in H1)]
    return frames[..., order] * frames.new_tensor(signs)


class Segments:
    """Segments of 32 frames that start every `stride` frames of each clip; none spans two clips.
    segments[index] are relative to their origins, (N, 32, 26) float64."""

    def __init__(self, clips, stride, length=FRAMES):  # clips: the frames of each file
        self.clips = torch.cat([torch.as_tensor(clip) for clip in clips])  # (n, 26)
        starts, n = [], 0
        for clip in clips:
            starts.append(torch.arange(n, n + len(clip) - length + 1, stride))
            n += len(clip)
        self.starts = torch.cat(starts)  # the first frame of each segment
        self.by_clip = torch.arange(len(self.starts)).split([len(part) for part in starts])

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        return relative_frames(self.frames(index))

    def frames(self, index):
        """The frames of these segments in the world: (N, 32, 26)."""
        return self.clips[self.starts[index].unsqueeze(1) + torch.arange(FRAMES)]

    def to_world(self, frames, index):
        """Frames (N, 32, 26) relative to the origins of these segments, in world coordinates."""
        return placed(frames, *ground_frame(self.frames(index)))


class FeatureScale(nn.Module):
    """A change of basis: segments (..., 32, 26), in any coordinates -> (..., 64, 6), a row for each
    token. These are the principal components of whole segments in training, times WEIGHTS, so that
    neighbouring frames, and joints that move together, share numbers. Of 832, the 384 largest are
    kept, all but 5e-5 of the variance; each row has large and small ones. Those well above 0.3
    radians are standardised, smaller ones stay small. span: the range of each of the 26 numbers."""

    def __init__(self, mean, basis, std, span):
        super().__init__()
        for name, value in (("mean", mean), ("basis", basis), ("std", std), ("span", span)):
            self.register_buffer(name, value.float())
        self.register_buffer("weights", WEIGHTS.clone(), persistent=False)

    @classmethod
    def blank(cls, rows, columns):
        """To be filled from a checkpoint."""
        mean, std, span = torch.zeros(FRAMES, 26), torch.ones(rows, columns), torch.ones(26)
        return cls(mean, torch.zeros(mean.numel(), std.numel()), std, span)

    @classmethod
    def measure(cls, segments, floor=0.1):
        """From every 32nd training segment and its mirror image. floor: added to variances."""
        x = segments[torch.arange(0, len(segments), FRAMES)]
        x = torch.cat([x, mirrored(x)])
        mean, (low, high) = x.mean(dim=0), x.flatten(0, 1).aminmax(dim=0)
        weighted = ((x - mean) * WEIGHTS).flatten(1)
        var, basis = torch.linalg.eigh(weighted.T @ weighted / len(x))  # ascending
        basis = basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()  # of two
        # The largest go to rows 0 to 63, the next to 63 to 0, ...: all rows are worth as many bits.
        order = (len(var) - 1 - torch.arange(ROWS * COLUMNS)).view(COLUMNS, ROWS)
        order[1::2] = order[1::2].flip(1)
        order = order.T.flatten()
        std = (var[order].clamp_min(0) + floor).sqrt().view(ROWS, COLUMNS)
        return cls(mean, basis[:, order], std, high - low)

    def forward(self, x):
        x = (relative_frames(x).float() - self.mean) * self.weights
        with torch.autocast(x.device.type, enabled=False):
            return (x.flatten(-2) @ self.basis).unflatten(-1, self.std.shape) / self.std

    def to_frames(self, x):
        """The inverse: frames (..., 32, 26), relative to the segment's origin."""
        x = ((x * self.std).flatten(-2) @ self.basis.T).unflatten(-1, self.mean.shape)
        root, q, angles = (x / self.weights + self.mean).split((3, 4, 19), dim=-1)
        return torch.cat([root, nn.functional.normalize(q, dim=-1), angles], dim=-1)

    def inverse(self, x):
        """The same as float64 on the CPU."""
        return self.to_frames(x).double().cpu()


# ---------------------------------------------------------------------------------------------
# stick figures

INK, PAPER, LEFT, RIGHT = (40, 40, 40), (255, 255, 255), (31, 90, 180), (214, 84, 32)
FONT = ImageFont.load_default(13)
BONES = [{"left": LEFT, "right": RIGHT}.get(name.split()[0], INK) for name, *_ in H1]


def draw_figure(pen, joints, left, top, size):
    """One figure in a square of the page that spans 2.1 m: joints (20, 3) in metres around a point
    on the ground, seen from ahead and to the side."""
    neck = joints[[12, 16]].mean(dim=0)  # between the shoulders, which are drawn attached to it
    head = neck + 0.15 * (neck - joints[0]) / (neck - joints[0]).norm().clamp_min(1e-6)
    x, y, z = torch.cat([joints, neck[None], head[None]]).unbind(dim=-1)  # (22,) each
    across = left + size * (0.5 + (y - x) / 2**0.5 / 2.1)
    down = top + size * (0.95 - (z + 0.12 * (x + y)) / 2.1)
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


def side_by_side(true, decoded, labels=("true", "decoded"), size=300):
    """The images of an animation, one for each of n frames (n, 26): the true figure on the left,
    the decoded one on the right, both centred on the true pelvis, so that drift shows."""
    true, decoded = joint_positions(true), joint_positions(decoded)  # (n, 20, 3)
    root, pages = true[:, :1] * GROUND, []
    for pair in zip(true - root, decoded - root, strict=True):
        page = Image.new("RGB", (2 * size, size), PAPER)
        pen = ImageDraw.Draw(page)
        for i, (label, joints) in enumerate(zip(labels, pair, strict=True)):
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
