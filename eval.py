"""Evaluate checkpoints on the whole validation set: a table, eval.json, and pictures.

    python eval.py out/glyphs_daps out/mnist_daps

From Python, load("out/glyphs_daps") gives a model with encode(x), decode(z) and sample(n).

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token.
"""

import copy
import ctypes
import hashlib
import json
import math
import os
import sys
import zipfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from baselines import FSQ, PPO, RLOO, VQVAE, Gaussian, Quantised, Relaxed
from configurator import configure, die
from daps import DAPS
from data import (
    CACHE_DIR,
    FRAMES,
    H1,
    LAFAN_VAL,
    VAL_NOISE,
    DataError,
    joint_positions,
    load_dataset,
    uniform_noise,
    write_whole,
)
from models import (
    AutoregressiveEncoder,
    MLPDecoder,
    MotionDecoder,
    OnePassEncoder,
    ResNetDecoder,
    ResNetEncoder,
    VectorEncoder,
)

try:
    import resource
except ImportError:  # Windows
    resource = None

CHECKPOINT = {"model": dict, "optimizer": dict, "config": dict, "x_shape": list}  # what it holds
CHECKPOINT |= {"x_mean": torch.Tensor, "x_std": torch.Tensor}
CHECKPOINT |= {"step": int, "best": float, "skipped": int, "seconds": float, "memory": float}
SETTINGS = {  # of those in a checkpoint, the ones that a model or its evaluation depends on
    int: "n_tokens vocab_size width n_heads n_layers mlp_ratio decoder_layers image_size "
    "n_samples mc_samples ppo_epochs recompute",
    float: "ess_target ppo_clip commitment beta_final",
    bool: "aligned resnet_encoder vq_ema",
    str: "method dataset data_dir eta_update fsq_levels",
}


# ---------------------------------------------------------------------------------------------
# from settings and checkpoints to models


METHODS = {  # from networks e, d and settings s
    "daps": lambda e, d, s: DAPS(e, d, s["n_samples"], s["ess_target"], s["eta_update"]),
    "gumbel": lambda e, d, s: Relaxed(e, d, "gumbel"),
    "grmck": lambda e, d, s: Relaxed(e, d, "grmck", s["mc_samples"]),
    "rloo": lambda e, d, s: RLOO(e, d, s["n_samples"]),
    "ppo": lambda e, d, s: PPO(e, d, s["width"], s["n_samples"], s["ppo_epochs"], s["ppo_clip"]),
    "reinmax_na": lambda e, d, s: Relaxed(e, d, "reinmax"),
    "vqvae": lambda e, d, s: VQVAE(e, d, s["width"], s["commitment"], s["vq_ema"]),
    "fsq": lambda e, d, s: FSQ(e, d, fsq_levels(s), s["width"]),
    "gaussian": lambda e, d, s: Gaussian(e, d, s["width"]),
}
METHODS |= {f"{name}_na": METHODS[name] for name in ("daps", "gumbel", "grmck", "rloo")}
AUTOREGRESSIVE = ("daps", "gumbel", "grmck", "rloo", "ppo")  # the others see x in one pass
VECTORS = ("vqvae", "fsq", "gaussian")  # methods whose encoder gives vectors, not logits
DECODERS = {"glyphs": MLPDecoder, "mnist": MLPDecoder}
DECODERS |= {"cifar10": ResNetDecoder, "imagenet": ResNetDecoder, "lafan": MotionDecoder}


def fsq_levels(config):
    """The setting "8 8 4" as numbers; whether they make vocab_size values is for FSQ to say."""
    words = config["fsq_levels"].split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(
            f"fsq_levels is {config['fsq_levels']!r}, must be numbers whose product is vocab_size"
        )
    return [int(word) for word in words]


def build_model(config, x_shape):
    """The method and networks that a run's settings ask for, with fresh parameters."""
    method, width = config["method"], config["width"]
    size = {
        key: config[key]
        for key in ("n_tokens", "vocab_size", "width", "n_heads", "n_layers", "mlp_ratio")
    }
    if method in VECTORS:
        dim = len(fsq_levels(config)) if method == "fsq" else width
        if config["resnet_encoder"]:
            encoder = ResNetEncoder(x_shape, config["n_tokens"], config["vocab_size"], dim)
        else:
            encoder = VectorEncoder(x_shape, **size, dim=dim)
    elif method in AUTOREGRESSIVE:
        options = {key: config[key] for key in ("aligned", "recompute")}
        encoder = AutoregressiveEncoder(x_shape, **size, **options)
    else:
        encoder = OnePassEncoder(x_shape, **size)
    vocab_size = 0 if method in VECTORS else config["vocab_size"]
    decoder = DECODERS[config["dataset"]]
    size = ()
    if decoder is MotionDecoder:
        size = (config["n_heads"], config["decoder_layers"], config["mlp_ratio"])
    decoder = decoder(x_shape, config["n_tokens"], vocab_size, width, *size)
    model = METHODS[method](encoder, decoder, config)
    if isinstance(model, DAPS):
        model.noise_shape = (config["n_samples"], config["n_tokens"])
    return model


def load_checkpoint(path):
    """A checkpoint's content; ValueError, in one line, if it is missing, damaged or foreign."""
    try:
        # torch.load looks at no checksum, and unpacks what may be a thousand times larger.
        with zipfile.ZipFile(path) as file:
            if sum(item.file_size for item in file.infolist()) > os.path.getsize(path):
                raise ValueError("it promises more than it holds")
            if file.testzip():
                raise ValueError("its checksum is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as fault:  # what a damaged file makes them raise is not documented
        reason = str(fault).split("\n")[0] or type(fault).__name__
        raise ValueError(f"{path} is not a readable checkpoint ({reason})") from None
    if not isinstance(checkpoint, dict) or any(
        not isinstance(checkpoint.get(key), kind) for key, kind in CHECKPOINT.items()
    ):
        raise ValueError(f"{path} is not a checkpoint of train.py")
    if checkpoint["step"] < 1:
        raise ValueError(f"{path} is of step {checkpoint['step']}, must be of 1 or later")
    return checkpoint


def load_config(path):
    """The settings in a config.json; ValueError, in one line, if it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as fault:
        raise ValueError(f"{path} cannot be read ({fault})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no settings")
    return config


def rebuild(state, file_size):
    """The model of a checkpoint. What it says need not be true: it is compared with the tensors,
    and these with the size of the file, before any room is made."""
    config, x_shape, found = state["config"], state["x_shape"], state["model"]
    for kind, names in SETTINGS.items():
        for name in names.split():
            value = config[name]
            if type(value) is not kind or kind in (int, float) and not 0 <= value < 2**31:
                raise ValueError(f"{name} is {value!r}")
    n_tokens, width, n_heads = config["n_tokens"], config["width"], config["n_heads"]
    if n_tokens * max(width, config["vocab_size"]) > 2**26 or width % (2 * n_heads):
        raise ValueError(f"{n_tokens} tokens, {width} wide, {n_heads} heads")
    if max(config["n_layers"], config["decoder_layers"]) > len(found):
        raise ValueError("more layers than tensors")
    if not all(type(n) is int and n > 0 for n in x_shape):
        raise ValueError(f"x_shape is {x_shape}")
    if sum(t.numel() * t.element_size() for t in found.values()) > file_size:
        raise ValueError("tensors larger than the file")
    with torch.device("meta"):  # shapes alone
        wanted = build_model(config, x_shape).state_dict()
    for name in wanted.keys() | found.keys():
        if (wanted[name].shape, wanted[name].dtype) != (found[name].shape, found[name].dtype):
            raise ValueError(f"{name} is {tuple(found[name].shape)}, {found[name].dtype}")
    model = build_model(config, x_shape)
    model.load_state_dict(found)
    return model


def load(out_dir, checkpoint="best", device="cpu"):
    """The trained model of a run, ready for use; its settings are in model.config. What it takes
    and gives is standardised: x = (pixels - model.x_mean) / model.x_std."""
    path = os.path.join(out_dir, f"{checkpoint}.pt")
    state = load_checkpoint(path)
    try:
        model = rebuild(state, os.path.getsize(path))
        model.register_buffer("x_mean", state["x_mean"], persistent=False)
        model.register_buffer("x_std", state["x_std"], persistent=False)
        model.to(device)
    except Exception:  # settings that nobody foresaw fail in ways that nobody did
        raise ValueError(f"{path}: settings and parameters do not fit this version") from None
    model.x_shape = tuple(state["x_shape"])
    model.config = state["config"] | {key: state[key] for key in ("step", "seconds", "memory")}
    return model.eval().requires_grad_(False)


def check_device(device):
    """ValueError, in one line, if this machine has no such device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as fault:
        reason = str(fault).splitlines()[0]
        raise ValueError(f"device is {device!r}, which cannot be used here ({reason})") from None


def keep_memory():
    """Let this process keep the memory that it frees.

    glibc hands large buffers back to the system and asks for them again, page by page, a moment
    later: 14 % of a CPU's step of DAPS on MNIST, 7 % on CIFAR-10.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def peak_memory(device):
    """The most that the GPU, or else this process, has held so far, in MiB; 0 if not known."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    if not resource:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB elsewhere


def n_parameters(model):
    """How many numbers the recognition and the generative model learn, code vectors with the
    latter; what only training needs (eta, a value function) is not counted."""
    learned = dict(model.named_parameters())
    if hasattr(model, "codebook"):
        learned["codebook"] = model.codebook  # a buffer if it is a running mean
    sizes = {"encoder": 0, "decoder": 0}
    for name, p in learned.items():
        if not name.startswith(("log_eta", "value.")):
            part = "encoder" if name.startswith(("encoder.", "posterior.")) else "decoder"
            sizes[part] += p.numel()
    return sizes["encoder"], sizes["decoder"]


# ---------------------------------------------------------------------------------------------
# metrics


def validation_noise(model, n, rank=0, world_size=1):
    """What decides the codes of the n validation examples, in every evaluation: (n, 1, B)."""
    return uniform_noise(VAL_NOISE, 0, 0, n, (1, model.encoder.n_tokens), rank, world_size)


@torch.no_grad()
def evaluate(model, data, beta, batch_size, device, limit=0, n_workers=0):
    """Means over the validation set, or `limit` of it, one code z ~ q(z|x) per x: metrics (a dict
    of floats); and how often each position used each value: counts (B, V). Processes share the
    work.

    beta_elbo   log_px - beta kl; None where there is no q (VQ-VAE, FSQ)
    log_px      log p(x|z), nats
    kl          KL(q(z|x) || prior), nats: exact per token given the tokens before it; or None
    psnr        10 log10(1 / mse) per image on [0, 1] pixels, of the decoder's mean as it is; of
                motion, features are divided by their range in training
    code_usage  share of the V values that a position uses at all, mean over positions
    perplexity  exp(entropy) of a position's marginal, mean over positions
    cm          motion alone: distance of joints from where they should be, mean over joints
    degrees     motion alone: difference of joint angles, mean over joints
    Use and perplexity are None, and so are the counts, where the code is not discrete.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    was_training = model.training
    model.eval()
    n_tokens, vocab_size = model.encoder.n_tokens, model.encoder.vocab_size
    has_kl, discrete = not isinstance(model, Quantised), not isinstance(model, Gaussian)
    sums = torch.zeros(4 + len(data.error_names), dtype=torch.float64, device=device)
    counts = torch.zeros(n_tokens * vocab_size, dtype=torch.float64, device=device)
    offsets = torch.arange(n_tokens, device=device) * vocab_size
    noise = validation_noise(model, len(data.val_index(limit)), rank, world_size)
    for rows, x in data.val_batches(batch_size, rank, world_size, limit, n_workers):
        if len(x) == 0:  # nothing that could be read
            continue
        x = x.to(device)
        z = model.encode(x, noise=noise[rows].to(device))  # (N, B)
        p = model.decode(z)
        error = (data.unit(p.mean) - data.unit(x)).square()
        mse = error.flatten(1).mean(dim=1).clamp_min(1e-10)  # (N,)
        kl = model.kl(x, z) if has_kl else torch.zeros(1, device=device)
        values = (p.log_prob(x), kl, -10 * mse.log10(), torch.ones_like(mse))
        values += data.errors(x, p.mean)
        sums += torch.stack([t.double().sum().to(device) for t in values])
        if discrete:
            counts += torch.bincount((z + offsets).flatten(), minlength=len(counts))
    if world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(counts)
    model.train(was_training)
    if sums[3] == 0:
        raise DataError(f"{data.name}: no validation example could be read")
    log_px, kl, psnr, _, *errors = (sums / sums[3]).tolist()
    counts = counts.view(n_tokens, vocab_size)
    marginal = counts / counts.sum(dim=1, keepdim=True)
    metrics = {
        "beta_elbo": log_px - beta * kl if has_kl else None,
        "log_px": log_px,
        "kl": kl if has_kl else None,
        "psnr": psnr,
        "code_usage": (counts > 0).double().mean().item() if discrete else None,
        "perplexity": torch.special.entr(marginal).sum(dim=1).exp().mean().item()
        if discrete
        else None,
        **dict(zip(data.error_names, errors, strict=True)),
        "examples": int(sums[3]),
    }
    return metrics, counts if discrete else None


# ---------------------------------------------------------------------------------------------
# pictures, all drawn with Pillow

INK, GRID, PAPER = (40, 40, 40), (225, 225, 225), (255, 255, 255)
COLOURS = ((31, 90, 180), (214, 84, 32), (30, 140, 80), (140, 60, 160), (190, 150, 20))
COLOURS += ((20, 170, 190), (230, 60, 130), (110, 110, 110), (130, 80, 40), (130, 190, 60))
COLOURS += ((120, 160, 240), (250, 170, 120), (90, 20, 60))


def font(size=13):
    return ImageFont.load_default(size)


def grid(images, columns, gap=4):
    """Images (n, 1 or 3, height, width) in [0, 1] as one picture, row by row; small ones twice
    their size."""
    n, channels, height, width = images.shape
    scale = 2 if width < 64 else 1
    height, width = height * scale, width * scale
    rows = -(-n // columns)
    mode = "L" if channels == 1 else "RGB"
    page = Image.new(mode, (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    pixels = (images * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    for i, image in enumerate(pixels):
        tile = Image.fromarray(image.squeeze(2) if channels == 1 else image)
        place = (gap + i % columns * (width + gap), gap + i // columns * (height + gap))
        page.paste(tile.resize((width, height), Image.Resampling.NEAREST), place)
    return page


def columns_of(shape):
    return max(4, min(16, 512 // shape[2]))


def draw_reconstructions(model, data, device, pairs=4):
    """Validation images, each over the decoder's mean for one code drawn from the encoder."""
    columns = min(columns_of(data.shape), data.n_val)
    n = min(pairs, data.n_val // columns) * columns
    index = data.val_index(n)
    x, kept = data.val_examples(index)
    n = len(x) // columns * columns  # whole rows
    x = x[:n].to(device)
    noise = validation_noise(model, data.n_val)[index][kept][:n].to(device)
    mean = model.decode(model.encode(x, noise=noise)).mean
    rows = zip(x.split(columns), mean.split(columns), strict=True)
    return grid(data.unit(torch.cat([image for row in rows for image in row])), columns)


def draw_samples(model, data, rows=6):
    """Decoder means of codes drawn from the prior; the same codes every time."""
    columns = columns_of(data.shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return grid(data.unit(model.sample(rows * columns).mean), columns)


BONES = [  # a colour for each link: left, right, middle
    {"left": COLOURS[0], "right": COLOURS[1]}.get(name.split()[0], INK) for name, *_ in H1
]


def draw_figure(pen, joints, left, top, size):
    """A stick figure: joints (20, 3) in metres around a point on the ground, seen from ahead and to
    the side; the square holds 1.8 m."""
    neck = joints[[12, 16]].mean(
        dim=0
    )  # between the shoulders, which hang on it, not on the pelvis
    head = neck + 0.15 * (neck - joints[0]) / (neck - joints[0]).norm().clamp_min(1e-6)
    x, y, z = torch.cat([joints, neck[None], head[None]]).unbind(dim=-1)
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


def film(rows, frame_numbers, size=120):
    """Stick figures over time: rows of (label, joints (32, 20, 3)), each followed by one column."""
    page = Image.new("RGB", (110 + len(frame_numbers) * size, len(rows) * size), PAPER)
    pen = ImageDraw.Draw(page)
    for i, (label, joints) in enumerate(rows):
        middle = joints[:, :1] * joints.new_tensor([1, 1, 0])  # keep the figure in its square
        pen.text((6, (i + 0.5) * size), label, INK, font(), anchor="lm")
        for column, t in enumerate(frame_numbers):
            draw_figure(pen, (joints - middle)[t], 110 + column * size, i * size, size)
    return page


def reconstruct_motion(model, data, device, index):
    """True and reconstructed frames of validation segments in the world: (N, 32, 26) each."""
    x, _ = data.val_examples(index)
    noise = validation_noise(model, data.n_val)[index].to(device)
    mean = model.decode(model.encode(x.to(device), noise=noise)).mean
    origin = data.true_origin(index)
    return data.frames(x, origin), data.frames(mean, origin)


def draw_motion(model, data, device):
    """A segment of each validation file, over the decoder's mean for one code of it."""
    index = torch.stack([segments[len(segments) // 2] for segments in data.val_files])
    rows = []
    for name, *pair in zip(LAFAN_VAL, *reconstruct_motion(model, data, device, index), strict=True):
        name = name.replace("_subject", "\nsubject ")
        rows += [
            (label, joint_positions(f)) for label, f in zip((name, "decoded"), pair, strict=True)
        ]
    return film(rows, range(0, FRAMES, 4))


def draw_motion_samples(model, data, n=6):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        frames = data.frames(model.sample(n).mean)
    rows = [(f"sample {i + 1}", joint_positions(f)) for i, f in enumerate(frames)]
    return film(rows, range(0, FRAMES, 4))


def write_motion(model, data, device, out_dir, seconds=8, size=300):
    """motion.csv: the first validation file, decoded segment by segment, in the files' format.
    motion.gif: the beginning of it, true on the left and decoded on the right."""
    true, ours = reconstruct_motion(model, data, device, data.val_files[0])
    rows = "\n".join(",".join(f"{v:.6f}" for v in frame) for frame in ours.flatten(0, 1).tolist())
    with open(os.path.join(out_dir, "motion.csv"), "w") as file:
        file.write(rows + "\n")
    n = min(len(true), seconds * 30 // FRAMES)
    pages = []
    for pair in zip(true[:n].flatten(0, 1), ours[:n].flatten(0, 1), strict=True):
        page = Image.new("RGB", (2 * size, size), PAPER)
        pen = ImageDraw.Draw(page)
        for i, frame in enumerate(pair):
            joints = joint_positions(frame)
            middle = joint_positions(pair[0])[:1] * joints.new_tensor([1, 1, 0])
            draw_figure(pen, joints - middle, i * size, 0, size)
            pen.text((i * size + 8, 8), ("true", "decoded")[i], INK, font())
        pages.append(page.quantize(32))
    path = os.path.join(out_dir, "motion.gif")
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=33, loop=0)


def draw_codes(counts, columns=4, cell=8):
    """One panel per position: its V values as a square, the darker the more often used."""
    counts = counts[:16].cpu().numpy()  # of long codes, the beginning
    side = math.isqrt(counts.shape[1] - 1) + 1
    step_x, step_y = side * cell + 24, side * cell + 40
    rows = -(-len(counts) // columns)
    page = Image.new("RGB", (min(columns, len(counts)) * step_x + 24, rows * step_y + 16), PAPER)
    pen = ImageDraw.Draw(page)
    for i, count in enumerate(counts):
        left, top = 24 + i % columns * step_x, 30 + i // columns * step_y
        used = (count > 0).mean()
        pen.text((left, top - 20), f"token {i + 1}: {used:.0%} used", INK, font())
        for v, c in enumerate(count):
            x, y = left + v % side * cell, top + v // side * cell
            dark = (c / count.max()) ** 0.5
            colour = tuple(round(255 + (blue - 255) * dark) for blue in COLOURS[0])
            pen.rectangle((x, y, x + cell - 1, y + cell - 1), fill=colour, outline=GRID)
    return page


def ticks(low, high, n=5):
    """About n round numbers between low and high."""
    step = 10 ** math.floor(math.log10((high - low) / n))
    step *= min((1, 2, 5, 10), key=lambda m: abs((high - low) / (step * m) - n))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low, high):
    """log10 of 1, 2, 5, 10, 20, ... between low and high, or of powers of ten if these are many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if high - low < 3 else (1,)
    values = [k + math.log10(digit) for k in powers for digit in digits]
    return [value for value in values if low <= value <= high]


def draw_plot(title, lines, y_range=None, log_scale=False, size=(420, 300)):
    """Lines over steps, each a list of (step, value); with log_scale, values are logarithms."""
    page = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((size[0] / 2, 16), title, INK, font(15), anchor="mm")
    points = [point for line in lines for point in line]
    if not points:
        pen.text((size[0] / 2, size[1] / 2), "nothing logged", INK, font(), anchor="mm")
        return page
    x_high = max(x for x, _ in points)
    low, high = y_range or (min(y for _, y in points), max(y for _, y in points))
    if log_scale:
        low, high = math.floor(low), math.floor(high) + 1  # whole decades
    margin = 0.05 * (high - low) or max(0.5, 1e-3 * abs(high))
    low, high = low - margin, high + margin
    left, top, right, bottom = 66, 32, size[0] - 26, size[1] - 44

    def place(x, y):
        return left + (right - left) * x / x_high, bottom - (bottom - top) * (y - low) / (
            high - low
        )

    for value in log_ticks(low, high) if log_scale else ticks(low, high):
        _, y = place(0, value)
        pen.line((left, y, right, y), GRID)
        label = 10**value if log_scale else value
        pen.text((left - 6, y), f"{label:.4g}", INK, font(), anchor="rm")
    for step in ticks(0, x_high, 4):
        x, _ = place(step, low)
        pen.line((x, top, x, bottom), GRID)
        pen.text((x, bottom + 12), f"{step:,.0f}", INK, font(), anchor="mm")
    pen.text(((left + right) / 2, size[1] - 12), "step", INK, font(), anchor="mm")
    pen.rectangle((left, top, right, bottom), outline=INK)
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        pen.line([place(*point) for point in line], colour, 2)
        for point in line[-1:]:
            pen.circle(place(*point), 3, colour)
    return page


def draw_curves(out_dirs):
    """Validation beta-ELBO (log p(x|z) where there is no KL), PSNR and KL, training ESS and eta
    over steps, of one or more runs."""
    panels = (  # title, where it is logged, and how the axis is cut
        ("validation beta-ELBO", "val", "beta_elbo", {}),
        ("validation PSNR (dB)", "val", "psnr", {}),
        ("validation KL (nats)", "val", "kl", {}),
        ("ESS / K", "train", "ess", {"y_range": (0, 1)}),
        ("eta (log scale)", "train", "eta", {"log_scale": True}),
    )
    logs = [read_log(out_dir) for out_dir in out_dirs]
    for row in (row for log in logs for row in log if row["split"] == "val"):
        if row.get("kl") is None:
            row["beta_elbo"] = row.get("log_px")
    page = Image.new("RGB", (3 * 420, 2 * 300), PAPER)
    for i, (title, split, key, options) in enumerate(panels):
        lines = [
            [
                (row["step"], row[key])
                for row in log
                if row["split"] == split and row.get(key) is not None
            ]
            for log in logs
        ]
        if options.get("log_scale"):
            lines = [[(x, math.log10(y)) for x, y in line if y > 0] for line in lines]
        page.paste(draw_plot(title, lines, **options), (i % 3 * 420, i // 3 * 300))
    pen = ImageDraw.Draw(page)
    for i, out_dir in enumerate(out_dirs):
        y = 340 + 19 * i
        pen.line((880, y, 910, y), COLOURS[i % len(COLOURS)], 4)
        pen.text((920, y), os.path.normpath(out_dir), INK, font(), anchor="lm")
    return page


def read_log(out_dir):
    """The rows of log.jsonl, without a last line that was cut short. Other lines that train.py did
    not write are named and skipped."""
    path, rows = os.path.join(out_dir, "log.jsonl"), []
    if not os.path.exists(path):
        return rows
    with open(path, "rb") as file:
        for i, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                numbers = [v for k, v in row.items() if k != "split" and v is not None]
                if not (0 < row["step"] < 2**53 and row["split"] in ("train", "val")):
                    raise ValueError("no step")
                if not all(type(v) in (int, float) and abs(v) < 1e100 for v in numbers):
                    raise ValueError("no number")
                rows.append(row)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if line.endswith(b"\n"):
                    print(f"warning: {path}, line {i}: not a line of train.py", file=sys.stderr)
    return rows


# ---------------------------------------------------------------------------------------------
# FID (Heusel et al. 2017): the distance of two Gaussians fitted to Inception features

FID_WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"  # the name ends in the start of its sha256
FID_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FID_WEIGHTS}"


class Conv(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, n_in, n_out, kernel, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(n_out, eps=1e-3)

    def forward(self, h):
        return self.bn(self.conv(h)).relu()


class Mixed(nn.Module):
    """Branches side by side, and one that pools; their channels are put together.

    branches: a name and its layers (channels, kernel height, kernel width) each. A kernel of "fork"
    is 1 x 3 and 3 x 1 side by side. pool: "down" halves, and so do the last layers of the branches;
    else "avg" or "max", followed by a 1 x 1 convolution to n_pool channels.
    """

    def __init__(self, n_in, branches, pool, n_pool=0):
        super().__init__()
        self.branches, self.pool = [], pool
        for branch, layers in branches.items():
            n, names = n_in, []
            for i, (n_out, *kernel) in enumerate(layers, 1):
                name = f"{branch}_{i}" if len(layers) > 1 else branch
                forks = {"a": (1, 3), "b": (3, 1)} if kernel == ["fork"] else {"": tuple(kernel)}
                down = pool == "down" and i == len(layers)
                for fork, (h, w) in forks.items():
                    conv = (
                        Conv(n, n_out, (h, w), 2)
                        if down
                        else Conv(n, n_out, (h, w), 1, (h // 2, w // 2))
                    )
                    self.add_module(name + fork, conv)
                names.append([name + fork for fork in forks])
                n = n_out
            self.branches.append(names)
        if n_pool:
            self.branch_pool = Conv(n_in, n_pool, 1)

    def forward(self, h):
        parts = []
        for names in self.branches:
            ends = [h]
            for forks in names:
                ends = [self.get_submodule(name)(ends[0]) for name in forks]
            parts += ends
        if self.pool == "down":
            return torch.cat([*parts, F.max_pool2d(h, 3, 2)], dim=1)
        if self.pool == "avg":
            h = F.avg_pool2d(h, 3, 1, 1, count_include_pad=False)
        else:
            h = F.max_pool2d(h, 3, 1, 1)
        return torch.cat([*parts, self.branch_pool(h)], dim=1)


class Inception(nn.Module):
    """Inception-v3 as FID has used it since 2015, with the names of the published weights."""

    def __init__(self):
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)

        def mixed_5(n_in, n_pool):
            branches = {
                "branch1x1": [(64, 1, 1)],
                "branch5x5": [(48, 1, 1), (64, 5, 5)],
                "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
            }
            return Mixed(n_in, branches, "avg", n_pool)

        def mixed_6(n):
            branches = {
                "branch1x1": [(192, 1, 1)],
                "branch7x7": [(n, 1, 1), (n, 1, 7), (192, 7, 1)],
                "branch7x7dbl": [(n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)],
            }
            return Mixed(768, branches, "avg", 192)

        def mixed_7(n_in, pool):
            branches = {
                "branch1x1": [(320, 1, 1)],
                "branch3x3": [(384, 1, 1), (384, "fork")],
                "branch3x3dbl": [(448, 1, 1), (384, 3, 3), (384, "fork")],
            }
            return Mixed(n_in, branches, pool, 192)

        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = (
            mixed_5(*n) for n in ((192, 32), (256, 64), (288, 64))
        )
        branches = {
            "branch3x3": [(384, 3, 3)],
            "branch3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
        }
        self.Mixed_6a = Mixed(288, branches, "down")
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = map(
            mixed_6, (128, 160, 160, 192)
        )
        branches = {
            "branch3x3": [(192, 1, 1), (320, 3, 3)],
            "branch7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
        }
        self.Mixed_7a = Mixed(768, branches, "down")
        self.Mixed_7b, self.Mixed_7c = mixed_7(1280, "avg"), mixed_7(2048, "max")
        self.fc = nn.Linear(2048, 1008)  # in the file, not used

    def forward(self, x):
        """Images (N, 3, height, width) in [0, 1] -> pool3 features (N, 2048)."""
        x = F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False)
        h = 2 * x - 1
        for name, module in self.named_children():
            if name in ("Conv2d_3b_1x1", "Mixed_5b"):
                h = F.max_pool2d(h, 3, 2)
            if name != "fc":
                h = module(h)
        return h.mean(dim=(2, 3))


def load_inception(path, device):
    """The published network; ValueError, in one line, if the file is not the published one."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError as fault:
        raise ValueError(f"fid_weights {path}: {fault.strerror}; get them from {FID_URL}") from None
    if not digest.startswith(FID_WEIGHTS[-12:-4]):
        raise ValueError(f"fid_weights {path}: not the published file; get it from {FID_URL}")
    network = Inception()
    weights = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    return network.to(device).eval().requires_grad_(False)


class Moments:
    """Mean and covariance of features that come in batches, in float64."""

    def __init__(self, dim=2048):
        self.n, self.sum = 0, torch.zeros(dim, dtype=torch.float64)
        self.outer = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, features):
        f = features.double().cpu()  # (N, dim)
        self.n, self.sum, self.outer = (
            self.n + len(f),
            self.sum + f.sum(dim=0),
            self.outer + f.T @ f,
        )

    def result(self):
        mean = self.sum / self.n
        return mean, (self.outer - self.n * torch.outer(mean, mean)) / max(self.n - 1, 1)


def frechet_distance(mean_a, cov_a, mean_b, cov_b):
    """Squared Frechet distance |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of Gaussians.

    The trace of the root is that of (A C_b A)^(1/2) with A the root of C_a. Both are symmetric, so
    that eigenvalues give the roots, real and stable also where a covariance is singular.
    """
    values, vectors = torch.linalg.eigh(cov_a)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    values = torch.linalg.eigvalsh(root @ cov_b @ root)
    trace = cov_a.trace() + cov_b.trace() - 2 * values.clamp_min(0).sqrt().sum()
    return ((mean_a - mean_b).square().sum() + trace).item()


@torch.no_grad()
def fid(model, data, inception, batch_size, device, n_workers=0):
    """FID of reconstructions to the validation images themselves, both rounded to 8 bits. Moments
    of the images are kept for next time."""
    name = f"fid_{data.key()}_{FID_WEIGHTS[-12:-4]}.pt"
    path = os.path.join(os.path.expanduser(CACHE_DIR), name)
    try:
        known = torch.load(path, weights_only=True)
    except Exception:  # not there yet, or damaged
        known = None
    noise = validation_noise(model, data.n_val)
    truth, ours = Moments(), Moments()
    for rows, x in data.val_batches(batch_size, n_workers=n_workers):
        x = x.to(device)
        mean = model.decode(model.encode(x, noise=noise[rows].to(device))).mean
        for moments, images in ((ours, mean), (truth, x)):
            if moments is ours or known is None:
                images = (data.unit(images).clamp(0, 1) * 255).round() / 255
                moments.add(inception(images))
    if known is None:
        known = truth.result()
        write_whole(path, known)
    return frechet_distance(*ours.result(), *known)


# ---------------------------------------------------------------------------------------------
# the report


def report(
    out_dirs,
    checkpoint="best",
    data_dir="",
    device="cpu",
    batch_size=250,
    n_workers=0,
    fid_weights="",
    curves="out/curves.png",
):
    """Evaluate runs, write eval.json and pictures into each folder, print one table of all."""
    rows, missing_fid, skipped = [], False, 0
    inception = load_inception(os.path.expanduser(fid_weights), device) if fid_weights else None
    for out_dir in out_dirs:
        model = load(out_dir, checkpoint, device)
        config = model.config
        data = load_dataset(config["dataset"], data_dir or config["data_dir"], config["image_size"])
        data = copy.copy(data)  # others keep theirs
        mean, std = model.x_mean.cpu(), model.x_std.cpu()  # those of its training
        kinds = [(t.shape, t.dtype) for t in (mean, std, data.mean, data.std)]
        if model.x_shape != tuple(data.shape) or kinds[:2] != kinds[2:]:
            raise ValueError(
                f"{out_dir}: was trained on examples of shape {model.x_shape}, those of "
                f"{data.name} in {data_dir or config['data_dir']} are {tuple(data.shape)}"
            )
        data.mean, data.std = mean, std
        settings = (config["beta_final"], batch_size, device)
        metrics, counts = evaluate(model, data, *settings, n_workers=n_workers)
        if data.shape[0] == 3:  # in colour
            ready = inception is not None
            settings = (inception, batch_size, device, n_workers)
            metrics["fid"] = fid(model, data, *settings) if ready else None
            missing_fid |= not ready
        skipped += data.n_val - metrics["examples"]
        encoder_size, decoder_size = n_parameters(model)
        row = {
            "run": os.path.normpath(out_dir),
            "method": config["method"],
            "bits": config["n_tokens"] * math.log2(config["vocab_size"]),
            **metrics,
            "encoder": encoder_size,
            "decoder": decoder_size,
            "steps": config["step"],
            "s_per_step": config["seconds"] / config["step"],
            "memory": config["memory"] or None,
        }
        path = os.path.join(out_dir, "eval.json")
        with open(f"{path}.tmp", "w") as file:
            json.dump(row, file, indent=2)
        os.replace(f"{path}.tmp", path)
        with torch.no_grad():
            motion = data.name == "lafan"
            reconstruct, sample = (
                (draw_motion, draw_motion_samples)
                if motion
                else (draw_reconstructions, draw_samples)
            )
            pictures = {
                "reconstructions": reconstruct(model, data, device),
                "samples": sample(model, data),
                "curves": draw_curves([out_dir]),
            }
            if counts is not None:
                pictures["codes"] = draw_codes(counts)
            if motion:
                write_motion(model, data, device, out_dir)
        for name, picture in pictures.items():
            picture.save(os.path.join(out_dir, f"{name}.png"))
        rows.append(row)
    print_table(rows)
    if skipped:
        print(f"{skipped} files could not be decoded and were left out")
    if missing_fid:
        print(f"FID: needs --fid_weights=path to {FID_WEIGHTS}, from {FID_URL}")
    print("pictures in each folder: reconstructions.png, samples.png, codes.png, curves.png")
    if len(out_dirs) > 1:
        os.makedirs(os.path.dirname(curves) or ".", exist_ok=True)
        draw_curves(out_dirs).save(curves)
        print(f"curves of all runs: {curves}")
    return rows


def print_table(rows):
    columns = {
        "run": ("run", "{}"),
        "method": ("method", "{}"),
        "bits": ("bits", "{:g}"),
        "beta-ELBO": ("beta_elbo", "{:.2f}"),
        "log p(x|z)": ("log_px", "{:.2f}"),
        "KL": ("kl", "{:.2f}"),
        "PSNR": ("psnr", "{:.2f}"),
        "FID": ("fid", "{:.2f}"),
        "cm": ("cm", "{:.2f}"),
        "degrees": ("degrees", "{:.2f}"),
        "codes used": ("code_usage", "{:.1%}"),
        "perplexity": ("perplexity", "{:.1f}"),
        "encoder": ("encoder", "{:,}"),
        "decoder": ("decoder", "{:,}"),
        "steps": ("steps", "{:,}"),
        "s/step": ("s_per_step", "{:.3f}"),
        "MiB": ("memory", "{:,.0f}"),
    }
    columns = {k: column for k, column in columns.items() if any(column[0] in row for row in rows)}
    table = [list(columns)]
    for row in rows:
        table.append(
            [
                "-" if row.get(key) is None else form.format(row[key])
                for key, form in columns.values()
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    checkpoint = "best"  # best: highest validation beta-ELBO, as the paper reports; last
    data_dir = ""  # where the data sets are; empty: where the run found them
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
    batch_size = 250  # examples at a time
    n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images
    fid_weights = ""  # file with the weights of Inception, for FID; empty: none
    curves = "out/curves.png"  # the curves of several runs in one picture

    settings, out_dirs = configure(globals(), sys.argv[1:])
    if not out_dirs:
        die("name at least one run: python eval.py out/glyphs_daps (--help lists the settings)")
    if batch_size < 1:
        die(f"batch_size is {batch_size}, must be at least 1")
    try:
        check_device(device)
        report(out_dirs, **settings)
    except (ValueError, OSError) as fault:
        die(fault)
