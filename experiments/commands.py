"""What a policy is worth: bits per code, and motion on command beside real and decoded motion.

    python experiments/commands.py out/lafan_daps_na

For motion runs with a policy (policy.py), on the files that neither was trained on. Rollouts start
from real histories and follow the path that the centre of mass really took, in closed loop.

    real       the frames themselves
    decoded    the codes of the real segments, joined as rollouts are
    commanded  history, path and words given
    no path    history and words given
"""

import copy
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch import nn

from configurator import UserError, configure
from data import DATA_DIR, LAFAN_FILES, train_indices
from motion import COLUMNS, FRAMES, LAFAN_VAL, ROWS, frame_errors, joint_positions, mirrored
from policy import (
    FPS,
    SUBSETS,
    VAL_NOISE,
    Windows,
    centre_of_mass,
    code_bits,
    joined,
    load_policy,
    noise_for,
    path_error,
    seen_from,
    start,
)
from report import print_aligned
from run import setup_device

n_starts = 64  # rollouts
n_segments = 10  # of each, 31 new frames long
guidance = 1.0  # 0: ignore all conditions; 1: p(z | conditions); above: more typical of them
n_draws = 16  # codes per second, of which the one is kept that best continues and follows the path
n_classifier_steps = 1500  # of the network that tells whether what was said is recognised
data_dir = ""  # where the data sets are; empty: the run's data_dir
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1


def frame_steps(frames):
    """How far frames (n, 26) are from the ones before: means at joins and elsewhere, (2,) each, of
    joints in cm, of joint angles in degrees."""
    steps = torch.stack(frame_errors(frames[:-1].unsqueeze(1), frames[1:].unsqueeze(1)), dim=1)
    at = torch.arange(1, len(frames)) % (FRAMES - 1) == 0
    return steps[at].mean(dim=0), steps[~at].mean(dim=0)


def foot_sliding(frames):
    """How far an ankle below 10 cm moves along the ground until it is lifted: a mean over all steps
    in frames (N, n, 26), in cm."""
    ankles = joint_positions(frames)[..., [5, 10], :]  # (N, n, 2, 3)
    down = ankles[..., 2] < 0.1
    distance = ankles[..., :2].diff(dim=1).norm(dim=-1) * (down[:, 1:] & down[:, :-1])
    n_steps = down[:, 0].sum() + (down[:, 1:] & ~down[:, :-1]).sum()
    return 100 * distance.sum() / n_steps.clamp_min(1)


@torch.no_grad()
def decoded(policy, window):
    """Like a rollout from windows (N, 32 + n, 26), with the codes of the real segments."""
    model, known, jumps = policy.autoencoder, window[:, :FRAMES], []
    known = seen_from(*start(known), known)
    segments = window[:, FRAMES - 1 :].unfold(1, FRAMES, FRAMES - 1).mT  # (N, segments, 32, 26)
    for i, x in enumerate(segments.unbind(dim=1)):
        noise = noise_for(VAL_NOISE, 0, i + 1, len(x), policy)
        z = model.encode(x.float().to(noise.device), noise=noise)
        segment, jump = joined(known[:, -1:], model.decode(z).mean)
        known = torch.cat([known, segment[:, 1:]], dim=1)
        jumps.append(jump)
    return known[:, FRAMES:], torch.stack(jumps, dim=1)


def train_classifier(scale, clips, n_steps):
    """A network that tells motion types apart: frames (N, 32, 26) -> logits (N, types), trained on
    real segments and their mirror images."""
    names = sorted(set(clips.texts))
    types = torch.tensor([names.index(text) for text in clips.texts])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(ROWS * COLUMNS, 256), nn.ReLU(), nn.Dropout(0.5))
    net.extend([nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, len(names))])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.1)
    for step in range(n_steps):
        index = train_indices(len(clips), 0, step, 128)
        x, y = clips.window(index)[:, FRAMES:], types[clips.clip[index]]
        x = mirrored(x) if step % 2 else x
        loss = nn.functional.cross_entropy(net(scale(x.float()).flatten(1)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    return lambda frames: net(scale(frames.float()).flatten(1)), names


@torch.no_grad()
def recognised(classifier, frames, texts):
    """Share of the seconds in frames (N, n, 26) whose type is recognised, in per cent."""
    classify, names = classifier
    seconds = frames.unfold(1, FRAMES, FRAMES).mT  # (N, seconds, 32, 26)
    found = torch.stack([classify(x).argmax(dim=1) for x in seconds])  # (N, seconds)
    true = torch.tensor([names.index(text) for text in texts]).unsqueeze(1)
    return 100 * (found == true).double().mean()


def judge(policy, clips, classifier):
    """{name: numbers of the table} of real, decoded and commanded motion, and the distance of two
    draws of one command in cm."""
    longest = (clips.ends - clips.starts).max().item() - FRAMES
    n = min(n_segments, longest // (FRAMES - 1)) * (FRAMES - 1)
    index = clips.some(n_starts, n)
    window, texts = clips.window(index, n), [clips.texts[i] for i in clips.clip[index]]
    history = window[:, :FRAMES]
    true = seen_from(*start(history), window)[:, FRAMES:]
    way = centre_of_mass(true)[..., :2]  # (N, n, 2)
    found = {"real": (true, torch.zeros(1, 1, 2)), "decoded": decoded(policy, window)}
    options = dict(guidance=guidance, n_draws=n_draws)
    found["commanded"] = policy.rollout(history, texts, way, **options)
    found["no path"] = policy.rollout(history, texts, n=n, **options)
    again, _ = policy.rollout(history, texts, way, **options, seed=1)
    columns = {}
    for name, (frames, jumps) in found.items():
        error, (cm, degrees) = path_error(frames, way), jumps.mean(dim=(0, 1))
        steps = torch.stack([torch.stack(frame_steps(part)) for part in frames]).mean(dim=0)
        columns[name] = {
            "path error after a second, cm": error[:, FRAMES - 2].mean(),
            f"  over {n / FPS:.1f} seconds, cm": error.mean(),
            "what was said is recognised, %": recognised(classifier, frames, texts),
            "foot sliding, cm per step": foot_sliding(frames),
            "jump at joins, cm": cm,
            "jump at joins, degrees": degrees,
            "from frame to frame at joins, cm": steps[0, 0],
            "  elsewhere, cm": steps[1, 0],
            "joints of two draws apart, cm": math.nan,
        }
    apart, _ = frame_errors(found["commanded"][0], again)
    columns["commanded"]["joints of two draws apart, cm"] = apart.mean()
    return columns


if __name__ == "__main__":
    _, out_dirs = configure(globals(), sys.argv[1:], may_be_zero=("guidance",))
    if not out_dirs:
        raise UserError("name runs with a policy: python experiments/commands.py out/lafan_daps_na")
    device = setup_device(device)
    for out_dir in out_dirs:
        policy = load_policy(out_dir, device)
        folder = data_dir or policy.autoencoder.config["data_dir"] or DATA_DIR
        clips = Windows(LAFAN_VAL, FRAMES, folder)
        index = torch.arange(len(clips))
        bits = code_bits(policy, policy.autoencoder, clips, index, *SUBSETS.values())
        bits = dict(zip(SUBSETS, bits, strict=True))
        uniform = policy.n_tokens * math.log2(policy.vocab_size)
        print(f"{out_dir}, step {policy.config['step']}: bits per code, {uniform:g} if uniform")
        print_aligned([list(bits), [f"{value:.1f}" for value in bits.values()]], n_left=0)
        scale = copy.deepcopy(policy.autoencoder.decoder.scale).cpu()
        train_names = [name for name in LAFAN_FILES if name not in LAFAN_VAL]
        classifier = train_classifier(scale, Windows(train_names, 1, folder), n_classifier_steps)
        columns = judge(policy, clips, classifier)
        rows = [["", *columns]]
        for key in columns["real"]:
            values = [float(column[key]) for column in columns.values()]
            rows.append([key, *("-" if math.isnan(v) else f"{v:.1f}" for v in values)])
        print_aligned(rows, n_left=1)
