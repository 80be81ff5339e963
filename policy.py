"""Motion on command: p(z | history, path, words) over the codes of a motion run, and rollouts.

    python policy.py out/lafan_daps_na    train on the codes of a run
    python policy.py out/lafan_daps_na --say="walk" --path=circle --seconds=10
                                          the policy is there: write command.gif and command.csv

    policy = load_policy("out/lafan_daps_na")
    frames, jumps = policy.rollout(history, "walk", path)  # (32, 26), (n, 2) -> (n, 26)

experiments/commands.py measures what a policy is worth.

The network is the autoregressive encoder of models.py, which reads conditions instead of patches:

    history   32 frames, the last of which is called now
    path      of the centre of mass on the ground, in these 32 frames and the 32 that follow
    words     what the file is called: walk, run, fall and get up, ...

Positions are seen from now: from the point on the ground below the pelvis, x ahead. The code is
that of the segment whose first frame is now, so only 31 of its frames are new.

Letters: N examples in a batch, B tokens per code, V values per token, H width.
"""

import math
import os
import re
import sys

import torch
from PIL import Image, ImageDraw
from torch import nn

import data
import motion
from configurator import UserError, configure, settings_block
from daps import draw
from eval import load
from models import AutoregressiveEncoder, Block, Sizes, sinusoids
from motion import COLUMNS, FRAMES, GROUND, LAFAN_VAL, ROWS, ground_frame, quat_conj, quat_rotate
from prior import digest_of_model, load_prior
from report import save_picture
from run import check_same_run, fit, setup_device

# ---------------------------------------------------------------------------------------------
# Settings. Config files and --key=value override them; --help lists them.

n_layers = 2  # transformer blocks, over conditions and over tokens
width = 128  # H
batch_size = 32  # N
lr = 2e-3  # peak rate of AdamW: warm-up, then a cosine down to 0
dropout = 0.1  # share of examples in which a condition is hidden; also the others, at random
text_encoder = ""  # a frozen sentence encoder, by name or path; empty: a learned table of words
seed = 0  # of parameters, batches and noise
# may differ when a policy is continued (max_steps stretches the schedule)
max_steps = 2000
eval_interval = 500  # steps between validations, each of which saves policy.pt
say = ""  # what the robot should do, in words; if set, this command instead of training
path = ""  # where to go, also a command: straight, circle, square, figure8, still, a CSV of x, y
seconds = 10.0  # length of a command, unless its path is a file
speed = 1.2  # m/s, along a path that is not a file
guidance = 1.0  # 0: ignore all conditions; 1: p(z | conditions); above: more typical of them
n_draws = 16  # codes per second, of which the one is kept that best continues and follows the path
draw_seed = 0  # another number, another motion for the same command
data_dir = ""  # where the data sets are; empty: the run's data_dir
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
# ---------------------------------------------------------------------------------------------
# the robot's centre of mass; segments, one after the other

FPS, TOP_SPEED = 30, 8.0  # frames per second; m/s that a path may ask for
BLEND = 8  # frames in which a segment drops what is left of the one before
TRAIN_NOISE, VAL_NOISE, ROLLOUT_NOISE = 19, 20, 21  # streams of randomness, next to prior.py's

# Mass in kg and centre of mass in metres of each link, in its own frame: of the published model,
# h1.xml. Those on the right mirror those on the left.
PELVIS, TORSO = (5.39, -0.0002, 4e-5, -0.04522), (17.789, 0.000489, 0.002797, 0.20484)
LEFT_LEG = (
    (2.244, -0.04923, 0.0001, 0.0072),
    (2.232, -0.0058, -0.00319, -9e-5),
    (4.152, 0.00746, -0.02346, -0.08193),
    (1.721, -0.00136, -0.00512, -0.1384),
    (0.552448, 0.048568, 0, -0.045609),
)
LEFT_ARM = (
    (1.033, 0.005045, 0.053657, -0.015715),
    (0.793, 0.000679, 0.00115, -0.094076),
    (0.839, 0.01365, 0.002767, -0.16266),
    (0.669, 0.15908, -0.000144, -0.015776),
)
RIGHT_LEG, RIGHT_ARM = ([(m, x, -y, z) for m, x, y, z in side] for side in (LEFT_LEG, LEFT_ARM))
LINKS = torch.tensor([PELVIS, *LEFT_LEG, *RIGHT_LEG, TORSO, *LEFT_ARM, *RIGHT_ARM]).double()
MASS, CENTRE = LINKS[:, :1] / LINKS[:, 0].sum(), LINKS[:, 1:]  # (20, 1), (20, 3)


def centre_of_mass(frames):
    """Frames (..., 26) float64 -> (..., 3) in the world."""
    positions, rotations = motion.forward_kinematics(frames[..., 7:])
    links = positions + quat_rotate(rotations, CENTRE[1:])  # (..., 19, 3)
    centre = MASS[0] * CENTRE[0] + (MASS[1:] * links).sum(dim=-2)  # seen from the pelvis
    return quat_rotate(frames[..., 3:7].roll(1, -1), centre) + frames[..., :3]


def seen_from(point, heading, frames):
    """Frames (..., 26) in the world -> seen from there: the inverse of motion.placed()."""
    back = quat_conj(heading)
    return motion.placed(frames, -quat_rotate(back, point), back)


def joined(last, segment):
    """A decoded segment (N, 32, 26) that should begin with the frame last (N, 1, 26), placed there.
    What is left of the difference to its first frame fades in BLEND frames. Also returns how large
    it was: mean distance of joints in cm, of joint angles in degrees, (N, 2)."""
    segment = motion.placed(motion.relative_frames(segment), *ground_frame(last))
    # A rotation has two quaternions: take the ones near that of the last frame.
    near = (last * segment[:, :1])[..., 3:7].sum(dim=-1, keepdim=True) >= 0
    segment[..., 3:7] *= torch.where(near, 1.0, -1.0)
    first = segment[:, :1].clone()
    jump = torch.stack(motion.frame_errors(last, first), dim=1)
    fade = (1 - torch.arange(FRAMES).double() / BLEND).clamp_min(0).view(-1, 1)  # (32, 1)
    segment += fade.square() * (3 - 2 * fade) * (last - first)
    segment[..., 3:7] = nn.functional.normalize(segment[..., 3:7], dim=-1)
    return segment, jump


# ---------------------------------------------------------------------------------------------
# conditions


def describe(history, coming):
    """A history (N, 32, 26) and the path in the frames that follow (N, 32, 2) as the policy sees
    them, float32: rows (N, 32, 28 + 2 + 2) of poses, with two axes of the pelvis for its rotation,
    of the path so far, and of the path to come."""
    point, heading = ground_frame(history[:, -1:])
    path = torch.cat([centre_of_mass(history)[..., :2], coming], dim=1)
    path = quat_rotate(quat_conj(heading), nn.functional.pad(path, (0, 1)) - point)[..., :2]
    frames = seen_from(point, heading, history)
    x, _, z = (quat_rotate(frames[..., 3:7].roll(1, -1), axis) for axis in torch.eye(3).double())
    rows = [frames[..., :3], x, z, frames[..., 7:], *path.chunk(2, dim=1)]
    return torch.cat(rows, dim=-1).float()


def describe_window(window):
    """The same of a window (N, 64, 26) whose future is known: only through the path."""
    return describe(window[:, :FRAMES], centre_of_mass(window[:, FRAMES:])[..., :2])


def poses_and_path(rows):
    """Rows (N, 32, 32) of describe() -> poses (N, 32, 28) and the whole path (N, 64, 2)."""
    return rows[..., :28], torch.cat(rows[..., 28:].chunk(2, dim=-1), dim=1)


def summary(rows, given):
    """What a linear guess of the coming segment needs: five poses of the last half second and the
    path, in one of four blocks of a row, (N, 4 * 173), by whether they are given (N, 2 or 3)."""
    poses, path = poses_and_path(rows)
    poses, path = poses[:, [-1, -2, -4, -8, -16]].flatten(1), path[:, 3::4].flatten(1)
    row = torch.cat([poses * given[:, :1], path * given[:, 1:2]], dim=1)
    row = nn.functional.pad(row, (0, 1), value=1.0)  # (N, 173)
    block = nn.functional.one_hot(given[:, 0] + 2 * given[:, 1].long(), 4).to(row)  # (N, 4)
    return (block.unsqueeze(2) * row.unsqueeze(1)).flatten(1)


class ConditionEncoder(nn.Module):
    """Conditions -> (N, 64, H), for the 32 frames up to now and the 32 that follow: embed, add up,
    blocks, LayerNorm. A condition that is hidden is replaced by a learned embedding. Row t also has
    a linear guess of row t of what networks see of the coming segment, see motion.FeatureScale."""

    def __init__(self, sizes, n_text):
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(n, sizes.width) for n in (28, 2, n_text, COLUMNS))
        self.hidden = nn.Embedding(3, sizes.width)
        self.guess = nn.Linear(4 * 173, ROWS * COLUMNS, bias=False)
        for key in ("mean", "std"):  # of poses and path: measured in training, then restored
            self.register_buffer(key, torch.full((28 + 4,), float(key == "std")))
        times = sinusoids(Sizes((), 2 * FRAMES, 0, sizes.width))
        self.register_buffer("times", times, persistent=False)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.n_layers)))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, x):
        rows, words, given = x  # (N, 32, 32), (N, n_text), (N, 3) bool
        rows = (rows - self.mean) / self.std
        guess = self.guess(summary(rows, given)).unflatten(1, (ROWS, COLUMNS))
        parts = []  # (N, 32, H), (N, 64, H), (N, 1, H)
        for i, part in enumerate((*poses_and_path(rows), words.unsqueeze(1))):
            seen = given[:, i].view(-1, 1, 1)
            parts.append(torch.where(seen, self.embed[i](part), self.hidden.weight[i]))
        poses, path, words = parts
        frames = nn.functional.pad(poses, (0, 0, 0, FRAMES)) + path + words  # (N, 64, H)
        return self.norm(self.blocks(frames + self.embed[3](guess) + self.times))


class Policy(AutoregressiveEncoder):
    """p(z | conditions). vectors: of every word or, with a text encoder, of every phrase."""

    def __init__(self, n_tokens, vocab_size, width, n_layers, vectors, text_encoder=""):
        sizes = Sizes((), n_tokens, vocab_size, width, n_layers)
        conditions = ConditionEncoder(sizes, len(next(iter(vectors.values()))))
        super().__init__(sizes, None, aligned=True, patch_encoder=conditions)
        self.vectors, self.text_encoder = vectors, text_encoder

    @torch.no_grad()
    def prepare(self, windows, scale, table):
        """Before training: the scale of poses and path in windows (n, 64, 26); the linear guess, by
        four ridge regressions; and tokens that are alike where the autoencoder's decoder, with its
        table (V, H), makes them alike."""
        net, device = self.patch_encoder, table.device
        rows = describe_window(windows).to(device)  # (n, 32, 32)
        net.mean.copy_(rows.mean(dim=(0, 1)))
        net.std.copy_(rows.std(dim=(0, 1)).clamp_min(0.01))
        rows = (rows - net.mean) / net.std
        y = scale(windows[:, FRAMES - 1 : -1].float().to(device)).flatten(1).double()  # (n, 384)
        for i, part in enumerate(net.guess.weight.split(173, dim=1)):  # of a way to hide conditions
            given = torch.tensor([i % 2, i // 2], device=device).bool().expand(len(rows), 2)
            x = summary(rows, given).split(173, dim=1)[i].double()  # (n, 173)
            ridge = 100 * torch.eye(173, device=device).double()
            part.copy_(torch.linalg.solve(x.T @ x + ridge, x.T @ y).T)
        if table.shape == self.tokens.head.weight.shape:
            table = (table - table.mean(dim=0)) / table.std() * table.size(1) ** -0.5
            self.tokens.embed.weight[:-1] = table
            self.tokens.head.weight.copy_(table)

    def text_vectors(self, texts):
        """What the network sees of N texts: (N, n_text), zeros where there is none."""
        known = self.vectors | {"": torch.zeros(len(next(iter(self.vectors.values()))))}
        for text in set(texts) - known.keys():
            words = words_of(text)
            if self.text_encoder:
                known |= sentence_vectors(self.text_encoder, [text])
            elif words and set(words) <= self.vectors.keys():
                known[text] = torch.stack([self.vectors[word] for word in words]).mean(dim=0)
            else:
                wanted = f"words of {', '.join(self.vectors)}, without a text encoder"
                raise UserError(f"say is {text!r}, must be {wanted}")
        return torch.stack([known[text] for text in texts])

    @torch.no_grad()
    def act(self, x, noise, guidance=1.0):
        """Codes (N, K, B) under conditions x, decided by noise of that shape."""
        memory = self.patch_encoder(x)
        if guidance == 1:
            return self.sample(memory, noise)
        nothing = self.patch_encoder((*x[:2], torch.zeros_like(x[2])))

        def choose(logits, u):  # one token for both, with conditions and without
            given, free = logits.chunk(2)
            z = draw(free + guidance * (given - free), u[: len(given)])
            return torch.cat([z, z])

        z = self.sample(torch.cat([memory, nothing]), torch.cat([noise, noise]), choose)
        return z[: len(memory)]

    def rollout(self, history, words="", path=None, n=300, guidance=1.0, n_draws=16, seed=0):
        """The n frames (..., n, 26) that follow a history (..., 32, 26), and jumps (..., segments,
        2) as in joined(). path (n, 2), or one for each history: where the centre of mass should be
        in metres; path and frames are seen from where it is on the ground, x ahead. Without words
        or path, they are hidden. Of n_draws codes for each segment, the one with the smallest sum
        of squared distances to the last frame and to the path is kept."""
        known = torch.as_tensor(history, dtype=torch.float64)
        shape, known = known.shape[:-2], known.reshape(-1, FRAMES, 26)
        known = seen_from(*start(known), known)
        N, jumps, device = len(known), [], self.tokens.positions.device
        texts = [words] * N if isinstance(words, str) else words
        vectors = self.text_vectors(texts)
        given = torch.tensor([[True, path is not None, bool(text)] for text in texts])
        way = torch.zeros(n, 2) if path is None else torch.as_tensor(path)
        n, way = way.size(-2), nn.functional.pad(way.double(), (0, 0, 1, 0))  # row 0 is now
        way = way.expand(*shape, n + 1, 2).reshape(N, n + 1, 2)
        beyond = torch.arange(1, 2 * FRAMES).view(-1, 1) * (way[:, -1:] - way[:, -2:-1])
        way = torch.cat([way, way[:, -1:] + beyond], dim=1)
        fade = 1 - torch.arange(1, FRAMES + 1).double().view(-1, 1) / FRAMES  # (32, 1)
        for i, now in enumerate(range(0, n, FRAMES - 1)):
            last = known[:, -1:]
            # A path says where to be, not how to get back to it: errors fade in a second.
            error = centre_of_mass(last)[..., :2] - way[:, now : now + 1]  # (N, 1, 2)
            coming = way[:, now + 1 : now + 1 + FRAMES] + fade * error
            x = describe(known[:, -FRAMES:], coming), vectors, given
            noise = noise_for(ROLLOUT_NOISE, seed, i, N, self, n_draws)
            z = self.act([part.to(device) for part in x], noise, guidance)  # (N, K, B)
            segment = self.autoencoder.decode(z.flatten(0, 1)).mean
            segment, jump = joined(last.repeat_interleave(n_draws, dim=0), segment)
            cost = jump[:, 0].square()  # (N * K,)
            if path is not None:
                wanted = coming[:, : FRAMES - 1].repeat_interleave(n_draws, dim=0)
                cost = cost + path_error(segment[:, 1:], wanted).square().mean(dim=1)
            best = cost.view(N, n_draws).argmin(dim=1) + n_draws * torch.arange(N)
            segment, jump = segment[best], jump[best]
            known = torch.cat([known, segment[:, 1:]], dim=1)
            jumps.append(jump)
        frames, jumps = known[:, FRAMES : FRAMES + n], torch.stack(jumps, dim=1)
        return frames.view(*shape, n, 26), jumps.view(*shape, -1, 2)


def start(history):
    """Where rollouts begin: on the ground below the last centre of mass, x ahead."""
    last = history[..., -1:, :]
    return centre_of_mass(last) * GROUND, ground_frame(last)[1]


# ---------------------------------------------------------------------------------------------
# words and files


def phrase(name):
    """What a file shows: "fallAndGetUp1_subject1" is "fall and get up"."""
    return re.sub("([A-Z])", r" \1", name.split("_")[0]).lower().rstrip("0123456789")


def words_of(text):
    """The words of a text that count, singular and plural alike: "jumps" is "jump"."""
    words = re.findall("[a-z]+", text.lower())
    return [word.removesuffix("s") for word in words if word != "and"]


def vocabulary(texts, text_encoder=""):
    """{word: vector} of all words in some texts, one-hot: a layer on top of it is a table. With a
    text encoder, {text: vector}."""
    if text_encoder:
        return sentence_vectors(text_encoder, sorted(set(texts)))
    words = sorted({word for text in texts for word in words_of(text)})
    return dict(zip(words, torch.eye(len(words)), strict=True))


def sentence_vectors(name, texts):
    """{text: vector} by a frozen sentence encoder: mean over its tokens, of length 1."""
    from transformers import AutoModel, AutoTokenizer  # optional; sentence-transformers has it too

    try:
        tokenizer, encoder = (kind.from_pretrained(name) for kind in (AutoTokenizer, AutoModel))
    except (OSError, ValueError) as error:
        raise UserError(f"text_encoder is {name!r}: {str(error).splitlines()[0]}") from None
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = encoder(**batch).last_hidden_state  # (n, length, d)
    rows = (tokens * batch["attention_mask"].unsqueeze(2)).sum(dim=1)
    return dict(zip(texts, nn.functional.normalize(rows, dim=1), strict=True))


class Windows(motion.Segments):
    """Windows of 64 frames of some files: 32 up to every stride-th frame, now, and 32 after it."""

    def __init__(self, names, stride, data_dir):
        self.texts, clips = [phrase(name) for name in names], []
        for name in names:
            file = os.path.join(os.path.expanduser(data_dir), "lafan1", "h1", f"{name}.csv")
            data.fetch(file, [data.LAFAN_URL], data.LAFAN_FILES[name])
            clips.append(motion.read_motion(file))
        super().__init__(clips, stride, 2 * FRAMES)
        self.clip = torch.cat([torch.full_like(part, i) for i, part in enumerate(self.by_clip)])
        self.ends = torch.tensor([len(clip) for clip in clips]).cumsum(0)[self.clip]

    def some(self, limit, n=FRAMES):
        """Up to `limit` windows, evenly spaced, with n frames of the same file after now."""
        index = (self.starts + FRAMES + n <= self.ends).nonzero().squeeze(1)
        limit = min(limit, len(index))
        return index[torch.arange(limit) * len(index) // limit]

    def window(self, index, n=FRAMES):
        """The frames (N, 32 + n, 26) of histories and of the n frames that follow."""
        return self.clips[self.starts[index].unsqueeze(1) + torch.arange(FRAMES + n)]

    def examples(self, model, policy, index, noise):
        """Codes (N, 1, B), drawn with noise (N, 1, B), and their conditions, all of them given:
        rows as in describe(), vectors of words (N, n_text), given (N, 3)."""
        window, device = self.window(index), noise.device
        segment = window[:, FRAMES - 1 : -1].float().to(device)
        z = model.encode(segment, noise=noise).unsqueeze(1)
        words = policy.text_vectors([self.texts[i] for i in self.clip[index]])
        given = torch.ones(len(index), 3, dtype=torch.bool)
        return z, [part.to(device) for part in (describe_window(window), words, given)]


# ---------------------------------------------------------------------------------------------
# training


def load_run(out_dir, device="cpu"):
    """The autoencoder of a motion run."""
    model = load(out_dir, device=device)
    if model.config["dataset"] != "lafan" or not model.discrete:
        found = " ".join(model.config[key] for key in ("method", "dataset"))
        raise UserError(f"{out_dir} is a run of {found}, must have discrete codes of lafan")
    return model


def load_policy(out_dir, device="cpu"):
    """The policy of a run, ready for use; its settings are in policy.config."""
    policy = load_prior(out_dir, device, Policy, "policy")
    policy.autoencoder = load_run(out_dir, device)
    return policy


def noise_for(stream, seed, step, n, policy, n_draws=1, more=0):
    """Noise (n, n_draws, B + more), see data.py."""
    numbers = torch.arange(n, device=policy.tokens.positions.device)
    return data.uniform_noise(stream, seed, step, numbers, (n_draws, policy.n_tokens + more))


def hidden(u, dropout):
    """Which conditions are hidden, (N, 3), decided by u (N,), uniform in [0, 1): each in a share
    `dropout` of examples. All seven ways to hide some are equally likely, so that any may be left
    out later; one by one, all three would be hidden in a thousandth of examples."""
    subset = (4 / dropout * u).long() + 1  # below 7 / 4 of dropout: 1 to 7, of which 4 hide each
    bits = torch.where(subset > 7, 0, subset).unsqueeze(1)
    return bits >> torch.arange(3, device=u.device) & 1 == 1


SUBSETS = {"no condition": (0, 0, 0), "history": (1, 0, 0), "history, path": (1, 1, 0)}
SUBSETS["history, path, words"] = (1, 1, 1)


@torch.no_grad()
def code_bits(policy, model, clips, index, *subsets):
    """-log2 p of the codes of these windows, given some subsets of the conditions: means."""
    noise = noise_for(VAL_NOISE, 0, 0, len(clips), policy)
    total = torch.zeros(len(subsets)).double()
    for part in index.split(64):
        z, (*seen, given) = clips.examples(model, policy, part, noise[part])
        for i, subset in enumerate(subsets):
            x = *seen, given & torch.tensor(subset, device=given.device).bool()
            total[i] -= policy.score(policy.patch_encoder(x), z)[0].sum().item()
    return (total / math.log(2) / len(index)).tolist()


def train(out_dir, model, clips, val_clips, size):
    """Train a policy of this size to max_steps, from policy.pt if there is one; its curve, in bits
    per code, is in policy.jsonl. Codes are drawn from q each time they are seen."""
    path = os.path.join(out_dir, "policy.pt")
    torch.manual_seed(seed)
    policy = Policy(**size).to(device)
    if not os.path.exists(path):
        vectors = getattr(model, "vectors", model.decoder.vectors)  # VQ-VAE and FSQ: their own
        table = vectors(torch.arange(policy.vocab_size, device=device))  # (V, H)
        policy.prepare(clips.window(clips.some(8000)), model.decoder.scale, table)

    def loss_at(step):
        rows = data.train_indices(len(clips), seed, step, batch_size)
        u = noise_for(TRAIN_NOISE, seed, step, batch_size, policy, more=1)  # (N, 1, B + 1)
        z, x = clips.examples(model, policy, rows, u[..., 1:])
        x[2] = ~hidden(u[:, 0, 0], dropout)
        (log_p,) = policy.score(policy.patch_encoder(x), z)  # (N, 1, B)
        return -log_p.mean() * policy.n_tokens / math.log(2)

    def validate():
        return code_bits(policy, model, val_clips, val_clips.some(256), (1, 1, 1))[0]

    saved = dict(size=size, codes_of=digest_of_model(out_dir))
    fit(path, policy, settings, loss_at, validate, "{:.1f} bits per code", **saved)


# ---------------------------------------------------------------------------------------------
# commands


def path_error(frames, way):
    """Distance on the ground from the centre of mass to the path (..., n, 2), in cm: (..., n)."""
    return 100 * (centre_of_mass(frames)[..., :2] - way).norm(dim=-1)


# Where the robot heads after a share u of the way: it goes once round closed paths.
HEADINGS = {
    "straight": lambda u: 0 * u,
    "circle": lambda u: 2 * math.pi * u,
    "square": lambda u: (4 * u).floor() * math.pi / 2,
    "figure8": lambda u: 4 * math.pi * torch.minimum(u, 1 - u),
    "still": lambda u: 0 * u,
}


def read_path(name, speed, seconds):
    """A path (n, 2) in metres from its name, or from a CSV file whose first row is where the robot
    is, and the next where it shall be a frame later."""
    if name in HEADINGS:
        n = max(2, round(seconds * FPS))
        heading = HEADINGS[name](torch.arange(n).double() / n)
        ahead = torch.stack([heading.cos(), heading.sin()], dim=1)
        way = (ahead * (0 if name == "still" else speed / FPS)).cumsum(dim=0)
    else:
        try:
            way = torch.from_numpy(motion.read_motion(name))
        except (OSError, ValueError):
            wanted = f"{', '.join(HEADINGS)} or a CSV file of x, y"
            raise UserError(f"path is {name!r}, must be {wanted}") from None
        if way.dim() != 2 or way.size(1) != 2 or len(way) < 3 or not way.isfinite().all():
            found = f"{len(way)} rows of {way.size(1)}"
            raise UserError(f"{name} has {found}, must have x, y at 30 Hz: 3 rows or more, finite")
        way = way[1:] - way[0]
    fastest = FPS * way.diff(dim=0, prepend=way.new_zeros(1, 2)).norm(dim=1).max().item()
    if fastest > TOP_SPEED:
        raise UserError(f"path {name} asks for {fastest:.1f} m/s, must be at most {TOP_SPEED:.0f}")
    return way


def find_history(text, way, data_dir):
    """The second (32, 26) that leads into a path best, of a file that a text describes: one that
    was not trained on, if there is one."""
    names, words = (*LAFAN_VAL, *data.LAFAN_FILES), words_of(text)
    names = [name for name in names if words_of(phrase(name)) == words]
    clips = Windows(names[:1] or LAFAN_VAL, 5, data_dir)
    history = clips.window(torch.arange(len(clips)))[:, :FRAMES]
    rows = describe(history, history.new_zeros(len(history), FRAMES, 2))
    progress = rows[:, -1, 28:30] - rows[:, 0, 28:30]  # (n, 2)
    wanted = progress.mean(dim=0) if way is None else (FRAMES - 1) * way[0]
    return history[(progress - wanted).norm(dim=1).argmin()]


def draw_command(frames, way, size=300):
    """The images of an animation: the figure, and the path seen from above with the way so far."""
    joints, centre = motion.joint_positions(frames), centre_of_mass(frames)[:, :2]
    points = centre if way is None else torch.cat([centre, way])
    (left, bottom), (right, top) = points.amin(dim=0).tolist(), points.amax(dim=0).tolist()
    scale = 0.8 * size / max(right - left, top - bottom, 1.0)
    middle = torch.tensor([left + right, bottom + top]).double() / 2

    def on_map(points):  # x to the right, y up
        points = (points - middle) * torch.tensor([scale, -scale]) + size / 2
        return [(size + x, y) for x, y in points.tolist()]

    pages, way, done = [], [] if way is None else on_map(way), on_map(centre)
    for t, figure in enumerate(joints - joints[:, :1] * GROUND):
        page = Image.new("RGB", (2 * size, size), motion.PAPER)
        pen = ImageDraw.Draw(page)
        motion.draw_figure(pen, figure, 0, 0, size)
        if way:
            pen.line(way, (190, 190, 190), 5)
        pen.line(done[: t + 1], motion.INK, 2)
        pen.circle(done[t], 5, motion.RIGHT)
        pen.text((size + 8, 8), f"{t / FPS:.1f} s", motion.INK, motion.FONT)
        pages.append(page.quantize(32))
    return pages


def obey(policy, out_dir, data_dir):
    """Roll out the command, write command.csv and command.gif, print how well it was followed."""
    way, n = read_path(path, speed, seconds) if path else None, max(2, round(seconds * FPS))
    policy.text_vectors([say])  # no file is read if the words are unknown
    history = find_history(say, way, data_dir)
    frames, jumps = policy.rollout(history, say, way, n, guidance, n_draws, draw_seed)
    if way is not None:
        error = path_error(frames, way)
        print(f"path error {error.mean():.1f} cm, at the end {error[-1]:.1f} cm")
    cm, degrees = jumps.mean(dim=0)
    print(f"{len(jumps)} joins, {degrees:.1f} degrees and {cm:.1f} cm apart before blending")
    content = {"csv": motion.frames_to_csv(frames), "gif": draw_command(frames, way)}
    for kind in content:
        save_picture(os.path.join(out_dir, f"command.{kind}"), content[kind])
    print(f"{len(frames)} frames: {os.path.join(out_dir, 'command.gif')}, command.csv")


if __name__ == "__main__":
    settings, out_dirs = configure(globals(), sys.argv[1:], may_be_zero=("guidance",))
    if width % 4 or dropout > 0.5 or max(seed, draw_seed) >= 2**32:
        raise UserError("width must be a multiple of 4, dropout at most 0.5, seeds below 2**32")
    if not out_dirs:
        raise UserError("name at least one run: python policy.py out/lafan_daps_na")
    device, (_, may_differ) = setup_device(device), settings_block(__file__)
    for out_dir in out_dirs:
        model, file = load_run(out_dir, device), os.path.join(out_dir, "policy.pt")
        folder = data_dir or model.config["data_dir"] or data.DATA_DIR
        if say or path:
            obey(load_policy(out_dir, device), out_dir, folder)
            continue
        if os.path.exists(file):
            check_same_run(file, settings, load_policy(out_dir).config, may_differ, step=0)
        train_names = [name for name in data.LAFAN_FILES if name not in LAFAN_VAL]
        clips, val_clips = Windows(train_names, 1, folder), Windows(LAFAN_VAL, FRAMES, folder)
        size = dict(n_tokens=model.encoder.n_tokens, vocab_size=model.encoder.vocab_size)
        size |= dict(width=width, n_layers=n_layers, text_encoder=text_encoder)
        size["vectors"] = vocabulary(clips.texts, text_encoder)
        train(out_dir, model, clips, val_clips, size)
        policy, index = load_policy(out_dir, device), torch.arange(len(val_clips))
        bits = code_bits(policy, model, val_clips, index, *SUBSETS.values())
        for name, value in zip(SUBSETS, bits, strict=True):
            print(f"{name:24}{value:8.1f} bits per code")
