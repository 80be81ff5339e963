"""LAFAN1 on the Unitree H1 robot: kinematics, features of motion and their inverse, stick figures.

The data are 40 CSV files of human motion retargeted to the robot, at 30 frames per second. A frame
is one line of 26 numbers: position of the pelvis in metres (3), its orientation as a quaternion
x y z w (4), joint angles in radians (19). Networks see segments of 32 frames as features:

    read_motion         file                ->  frames (n, 26)
    motion_features     frames of one file  ->  a clip: what does not depend on the segment
    Segments            clips               ->  features (N, 32, 146)
    features_to_frames  features            ->  frames (N, 32, 26)

N segments, n frames, 19 links, one per joint. Quaternions are (..., 4), real part first, except in
frames. No gradient is needed anywhere. This file imports nothing from this project: it can be
copied alone.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

LAFAN_URL = "https://huggingface.co/datasets/lvhaidong/LAFAN1_Retargeting_Dataset/resolve/main/h1/"
LAFAN_VAL = ("dance2_subject2", "fight1_subject2", "run2_subject1", "walk2_subject4")
LAFAN_FILES = {  # sha256 of each file, named without .csv
    "dance1_subject1": "741ffc4541e0b235528b662cc5d48444e51eb1f583a644104d0f77eb74aaa33a",
    "dance1_subject2": "879a41e51dff423a6f38ecd1c46e2200a3a0b49378295baae9b90bf45a3d0cc2",
    "dance1_subject3": "345f832292cd679d4ad0df4e8d470fbe2a59021665e05147557445d71710ec43",
    "dance2_subject1": "dd0bb1d670e10e922088039cfed0ffe6d92cfc679a5c5c4b7c67fa9d2dab484f",
    "dance2_subject2": "3d85b8805ee7dd60ae642fda7bcbc16f50cd51729b009310c57275776f48c4d5",
    "dance2_subject3": "7f923152099c51b5c991f4fbd15c306938107a3831ed07e0918cfb963cc868ab",
    "dance2_subject4": "cc9cc0b09833a9c76f1fa80fa011155401d2578c8f51214510c351e63f159ded",
    "dance2_subject5": "79131f6c85a47d940a34a9c80fc100e85d26bec0f94e19b911eb7289867112e3",
    "fallAndGetUp1_subject1": "3f3ce6dae557824cf8c403612fbe5cb638016a09b2e7e76afd5410a97b971eed",
    "fallAndGetUp1_subject4": "47b93bf42490ff86c4ac4165f8485ede096e0dcd663e688793587cebf3067663",
    "fallAndGetUp1_subject5": "304bf9f677023ee264090cfbc33692168c8e1218291c3e953c4d17dfe84fbf51",
    "fallAndGetUp2_subject2": "40d66b9518d87f4546111f08c7d3af47d8bff5fefeb5938c717bcf590a8e4911",
    "fallAndGetUp2_subject3": "0122a6356b49504608a4a5b3c69e89f01b56ecb4ff9d3ee252259b49baeb8c95",
    "fallAndGetUp3_subject1": "a13f9979f6198e2357fb75047dbeeac1de38f4b1332f40605f1a834d63bac03b",
    "fight1_subject2": "43cb12bcd690b99c3ad6c4d81131e386b3feb6c5eb667d5521c5d05f6d9b6e9e",
    "fight1_subject3": "3f3b02b77d22cc5d0fd1b8347e27847f951f6bbb8b35e32115a0331c2eaf2bab",
    "fight1_subject5": "1fdc44087a23300bd2a3998738b539f8074e0be7b7c8a4d0a3f82b604b714a32",
    "fightAndSports1_subject1": "79aeb659913b754fb69356a3e2d24fc08106791a80df4b131c144a87e908f86f",
    "fightAndSports1_subject4": "dc9225f5fdf0015d23f6e3db3f5d4047278b1c67eb3b18a461c13cc3ec6da6cf",
    "jumps1_subject1": "277ce96fb63f00732df09bc8372f1d09b7e955896528a87c88afd728464fa24a",
    "jumps1_subject2": "7ad7683dd2d5289fb37e5ee1b10c53a45f152f94e1f1236edd219cdca05d21f3",
    "jumps1_subject5": "6ed9772cdabbfb39f831b0fbe93bcc5f1876562ef8865370a24516a5d3742949",
    "run1_subject2": "f04071a7c590f7368ee2ea2d055ce259993c75cbf11dd041c257414e1f095f63",
    "run1_subject5": "a7b911995e0aded12dffe1bf49a104efadc7fd14aaf1b796053ce50f69f9df21",
    "run2_subject1": "579d6091313657390d1d74d478ba62fe39e07da1de2c627c4f524f95e5245f5b",
    "run2_subject4": "6221913b21e2f065cba8f7efc0d9b2fa19fffdaa470d497e97fe21927ec628c0",
    "sprint1_subject2": "8fa0d2d6ff808fde3bf735f09d96e803ecca879a86129696df162552bf1e22da",
    "sprint1_subject4": "6f3196c818c7114299b0cfdd3d4e3091f2f19243f8bfc709ca2d9f1534a73522",
    "walk1_subject1": "38ef42249a9e8a4c658a46ad00aaf00a61e28992b5da5a97ab3f032a935280bf",
    "walk1_subject2": "c290ee82e1493c8db8fe36a777d803ceb495d753f10569df334ef555941c07f6",
    "walk1_subject5": "a1a1ba3d66454a526dc60923738142099a534c6d946eb8090051e22bda70aec5",
    "walk2_subject1": "5abc173b40fd615df1f453d0ea4358abffd143cb5d817c3b2aaee4c9584ec4de",
    "walk2_subject3": "e61d392146b015e17696288d06a3a960e81b8b0f0b4eda92568f36232dab8e66",
    "walk2_subject4": "e9486c7c1884e76544dbd3b60c2e979a695e34031021fcc5433e89c7664f969a",
    "walk3_subject1": "97365395f9992b66e68ff906837821f7477ce19bbbcfe25c18cf01c78d6b0e0c",
    "walk3_subject2": "04bf99cad408b70c99ed64d0cf33bf1e595a4d6026be76a2bcfdb35ecc742a3c",
    "walk3_subject3": "ea6f3af5b9b7cfc8092e7ec6e4e13e83387318c6bd1b7fc8cc42e522e0540d89",
    "walk3_subject4": "6736207f56c5806b1e1fb0552fbefe8bc27170d5b7d7f20f561182797becee73",
    "walk3_subject5": "7a001fb33ac10037c5fd6bd340086fc9c796793cedb0bb1a58e48b1f432fcaeb",
    "walk4_subject1": "de335cb7a81988a43545be8e7bbe21ba066d9c1bc793f5e6372e44ff2870b559",
}
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
# quaternions


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
    w, u = q[..., :1], q[..., 1:]
    u, v = torch.broadcast_tensors(u, v)
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


# ---------------------------------------------------------------------------------------------
# kinematics


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
    angles = []
    for j, (_, parent, _, axis, tilt, middle) in enumerate(H1):
        pelvis = rotations.new_tensor([1.0, 0, 0, 0])
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
    """Errors of decoded frames (N, n, 26), means over n and joints: distance of joints in cm (N,),
    difference of joint angles in degrees (N,)."""
    distance = (joint_positions(true) - joint_positions(decoded)).norm(dim=-1)  # (N, n, 20)
    angle = (true[..., 7:] - decoded[..., 7:]).abs()  # (N, n, 19)
    angle = torch.minimum(angle, 2 * math.pi - angle) * 180 / math.pi
    return 100 * distance.mean(dim=(1, 2)), angle.mean(dim=(1, 2))


# ---------------------------------------------------------------------------------------------
# features


def motion_features(frames):
    """The features of a file that do not depend on the segment. Frames (n, 26) float64 -> positions
    and rotations of the links in the pelvis frame (n, 133) float32; position (n, 3) and rotation
    (n, 4) of the root in the world; its linear and angular velocity in its own frame (n, 6)."""
    frames = torch.from_numpy(frames)
    positions, rotations = forward_kinematics(frames[:, 7:])
    links = torch.cat([positions, nonnegative_real(rotations)], dim=-1).flatten(1).float()
    root, q = frames[:, :3], frames[:, [6, 3, 4, 5]]
    q = q / q.norm(dim=1, keepdim=True)
    later = torch.arange(len(q)).add(1).clamp_max(len(q) - 1)
    earlier = torch.arange(len(q)).sub(1).clamp_min(0)
    seconds = (later - earlier).unsqueeze(1) / FPS  # (n, 1)
    linear = quat_rotate(quat_conj(q), root[later] - root[earlier]) / seconds
    change = nonnegative_real(quat_mul(quat_conj(q[earlier]), q[later]))
    sine = change[:, 1:].norm(dim=1, keepdim=True)
    angle = 2 * torch.atan2(sine, change[:, :1])
    angular = change[:, 1:] / sine.clamp_min(1e-12) * angle / seconds
    return links, root, q, torch.cat([linear, angular], dim=1)


def ground_frame(root, q):
    """The origin of a segment that starts with the root at root (N, 3) and rotation q (N, 4): the
    point on the ground below (N, 3), and the rotation about z that turns x ahead (N, 4)."""
    w, x, y, z = q.unbind(dim=-1)
    yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    return root * root.new_tensor([1, 1, 0]), quat_from_axis_angle("z", yaw)


class Segments:
    """Segments of 32 frames that start every `stride` frames of each clip; none spans two clips.

    segments[index] are features (N, 32, 146) float64. Links (133): position and rotation of each of
    19 in the frame of the pelvis. Root (13): position and rotation relative to the segment's origin
    (ground_frame of its first frame), linear and angular velocity in its own frame.
    """

    def __init__(self, clips, stride):
        """clips: motion_features of each file."""
        self.parts = [torch.cat(part) for part in zip(*clips, strict=True)]
        ends = np.cumsum([len(links) for links, *_ in clips])
        begins = [0, *ends[:-1]]
        starts = [
            torch.arange(a, b - FRAMES + 1, stride) for a, b in zip(begins, ends, strict=True)
        ]
        self.starts = torch.cat(starts)  # the first frame of each segment
        self.by_clip = torch.arange(len(self.starts)).split([len(part) for part in starts])

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        index = self.starts[index].unsqueeze(1) + torch.arange(FRAMES)  # (N, 32)
        links, root, q, velocity = (part[index] for part in self.parts)
        point, heading = ground_frame(root[:, 0], q[:, 0])
        back = quat_conj(heading).unsqueeze(1)  # (N, 1, 4)
        root, q = quat_rotate(back, root - point.unsqueeze(1)), quat_mul(back, q)
        # A rotation has two quaternions: w >= 0 in the first frame, then no jumps.
        flips = (q[:, 1:] * q[:, :-1]).sum(dim=-1, keepdim=True).sign()
        first = torch.where(q[:, :1, :1] < 0, -1.0, 1.0).to(q)
        q = q * torch.cat([first, flips], dim=1).cumprod(dim=1)
        return torch.cat([links, root, q, velocity], dim=-1)

    def origin(self, index):
        """The origins of segments in the world: ground_frame of their first frames."""
        start = self.starts[index]
        return ground_frame(self.parts[1][start], self.parts[2][start])

    def statistics(self):
        """Mean, variance and range (largest minus smallest value) of the features, (146,) each: of
        links over all frames, of the root over every sixteenth segment."""
        links = self.parts[0]
        root = self[torch.arange(0, len(self), FRAMES // 2)][..., -N_ROOT:].flatten(0, 1)
        mean, var, low, high = (
            torch.cat([f(links, 0), f(root, 0)])
            for f in (torch.mean, torch.var, torch.amin, torch.amax)
        )
        return mean, var, high - low


def features_to_frames(features, origin=None):
    """Features (N, 32, 146) float64, which need not be exact -> frames (N, 32, 26): relative to
    each segment's origin or, if origin (point, heading) is given, in the world."""
    rotations = features[..., :N_LINKS].unflatten(-1, (19, 7))[..., 3:]
    rotations = rotations / rotations.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    root, q = features[..., N_LINKS : N_LINKS + 3], features[..., N_LINKS + 3 : N_LINKS + 7]
    q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    if origin is not None:
        point, heading = (part.unsqueeze(1) for part in origin)
        root, q = quat_rotate(heading, root) + point, quat_mul(heading, q)
    return torch.cat([root, q[..., [1, 2, 3, 0]], inverse_kinematics(rotations)], dim=-1)


# ---------------------------------------------------------------------------------------------
# stick figures

INK, PAPER, LEFT, RIGHT = (40, 40, 40), (255, 255, 255), (31, 90, 180), (214, 84, 32)
BONES = [{"left": LEFT, "right": RIGHT}.get(name.split()[0], INK) for name, *_ in H1]


def draw_figure(pen, joints, left, top, size):
    """One figure in a square of the page that spans 1.8 m: joints (20, 3) in metres around a point
    on the ground, seen from ahead and to the side."""
    neck = joints[[12, 16]].mean(dim=0)  # between the shoulders, which are drawn attached to it
    head = neck + 0.15 * (neck - joints[0]) / (neck - joints[0]).norm().clamp_min(1e-6)
    x, y, z = torch.cat([joints, neck[None], head[None]]).unbind(dim=-1)  # (22,) each
    across, up = (y - x) / 2**0.5, z + 0.12 * (x + y)
    points = [
        (left + size * (0.5 + a / 1.8), top + size * (0.95 - b / 1.8))
        for a, b in zip(across.tolist(), up.tolist(), strict=True)
    ]
    thickness = max(2, size // 40)
    pen.line([points[0], points[20]], INK, thickness)
    for j, (_, parent, *_) in enumerate(H1):
        pen.line([points[20 if parent == 11 else parent], points[j + 1]], BONES[j], thickness)
    pen.circle(points[21], size // 20, INK)


def on_the_spot(joints, root):
    """Joints (n, 20, 3), shifted so that the pelvis root (n, 1, 3) stays above one point."""
    return joints - root * root.new_tensor([1, 1, 0])


def film(rows, frame_numbers, size=120):
    """One picture: a row for each (label, joints (n, 20, 3)), a column for each frame number."""
    page = Image.new("RGB", (110 + len(frame_numbers) * size, len(rows) * size), PAPER)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for i, (label, joints) in enumerate(rows):
        joints = on_the_spot(joints, joints[:, :1])
        pen.text((6, (i + 0.5) * size), label, INK, font, anchor="lm")
        for column, t in enumerate(frame_numbers):
            draw_figure(pen, joints[t], 110 + column * size, i * size, size)
    return page


def side_by_side(true, decoded, size=300):
    """The images of an animation, one for each of n frames (n, 26): the true figure on the left,
    the decoded one on the right, both centred on the true pelvis, so that drift shows."""
    font, pages = ImageFont.load_default(13), []
    true, decoded = joint_positions(true), joint_positions(decoded)  # (n, 20, 3)
    pair = [on_the_spot(joints, true[:, :1]) for joints in (true, decoded)]
    for figures in zip(*pair, strict=True):
        page = Image.new("RGB", (2 * size, size), PAPER)
        pen = ImageDraw.Draw(page)
        for i, (label, joints) in enumerate(zip(("true", "decoded"), figures, strict=True)):
            draw_figure(pen, joints, i * size, 0, size)
            pen.text((i * size + 8, 8), label, INK, font)
        pages.append(page.quantize(32))
    return pages
