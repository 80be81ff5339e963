"""Train a discrete autoencoder.

    python train.py                                                 DAPS on glyphs: a few minutes on a laptop
    python train.py config/mnist_daps.py --out_dir=out/x            the paper's MNIST run
    python train.py config/mnist_daps.py config/short.py            the same in 3,000 steps, for a CPU
    torchrun --nproc_per_node=2 train.py config/mnist_daps.py       two processes share every batch
    python train.py config/mnist_daps.py --resume=True              go on after an interruption

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token, H width.
"""

import json
import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import configure, die
from data import DATASETS, TRAIN_NOISE, DataError, load_dataset, uniform_noise
from eval import METHODS, build_model, evaluate, load_checkpoint, n_parameters, report

# ---------------------------------------------------------------------------------------------
# Settings. Files and --key=value on the command line override them; --help lists them.

# what
method = "daps"  # daps: autoregressive encoder; daps_na: all tokens in one pass
dataset = "glyphs"  # glyphs: drawn on the spot; mnist: found in data_dir or downloaded
data_dir = os.environ.get(
    "DAPS_DATA", "~/.cache/daps"
)  # data sets live in folders of their name here
out_dir = "out/glyphs_daps"  # checkpoints, log and pictures go here
resume = False  # go on from last.pt in out_dir
overwrite = False  # replace the run that out_dir holds
# the code and the networks
n_tokens = 8  # B, tokens per code
vocab_size = 256  # V, values per token
width = 64  # H
n_heads = 4  # attention heads
n_layers = 1  # transformer blocks, per side where there are two (autoregressive)
mlp_ratio = 4  # hidden width of a block's MLP over H
aligned = True  # the query of token t also sees patch t (always so in one pass; not in the paper)
# the estimator
n_samples = 8  # K, codes sampled per example
ess_target = 0.33  # effective sample size of the K weights, over K
eta_update = "solve"  # solve: exact on every batch; gradient: the paper's step on log eta
beta_init = 0.5  # weight of the KL to the prior at the first step
beta_final = 0.01  # and at the last; exponential in between
# optimisation
max_steps = 1000  # optimizer steps; all schedules end here
batch_size = 128  # N, over all processes together
lr = 3e-3  # highest learning rate of AdamW
lr_schedule = "cosine"  # cosine: down to zero at the last step; constant
warmup_steps = 50  # steps of linear warm-up
weight_decay = 1e-4  # decoupled, on matrices and embeddings
grad_clip = (
    1000.0  # largest gradient norm; the loss is a sum over pixels, so norms are large; 0: off
)
max_skipped = 20  # stop after so many steps in a row with a non-finite gradient
# log and evaluation
eval_interval = 250  # steps between evaluations on the whole validation set; each saves last.pt
log_interval = 10  # steps between lines in log.jsonl
wandb_log = False  # also log to Weights & Biases (pip install wandb)
# machine
seed = 0  # of parameters, batches and noise
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
dtype = "bfloat16" if torch.cuda.is_available() else "float32"  # of the networks' matrix products
use_compile = torch.cuda.is_available()  # torch.compile

# ---------------------------------------------------------------------------------------------
settings, unused = configure(globals(), sys.argv[1:])
rank, world_size = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
if unused:
    die(f"{unused[0]}: neither a config file (*.py) nor --key=value")
for key, fine, wanted in (
    ("method", method in METHODS, f"one of: {', '.join(METHODS)}"),
    ("dataset", dataset in DATASETS, f"one of: {', '.join(DATASETS)}"),
    ("n_tokens", n_tokens >= 1, "at least 1"),
    ("vocab_size", vocab_size >= 2, "at least 2"),
    ("n_heads", n_heads >= 1, "at least 1"),
    (
        "width",
        width > 0 and width % (2 * n_heads) == 0,
        f"a multiple of 2 * n_heads = {2 * n_heads}",
    ),
    ("n_layers", n_layers >= 1, "at least 1"),
    ("mlp_ratio", mlp_ratio >= 1, "at least 1"),
    ("n_samples", n_samples >= 1, "at least 1"),
    ("ess_target", 0 < ess_target <= 1, "in (0, 1]"),
    ("eta_update", eta_update in ("solve", "gradient"), "solve or gradient"),
    ("beta_final", beta_final >= 0, "zero or more"),
    ("beta_init", beta_init >= 0, "zero or more"),
    (
        "beta_init",
        beta_init == beta_final or beta_init * beta_final > 0,
        "positive, like beta_final",
    ),
    ("max_steps", max_steps >= 1, "at least 1"),
    ("batch_size", batch_size >= 1, "at least 1"),
    ("batch_size", batch_size % world_size == 0, f"a multiple of the {world_size} processes"),
    ("lr", lr > 0, "positive"),
    ("lr_schedule", lr_schedule in ("cosine", "constant"), "cosine or constant"),
    ("warmup_steps", warmup_steps >= 0, "zero or more"),
    ("weight_decay", weight_decay >= 0, "zero or more"),
    ("grad_clip", grad_clip >= 0, "zero (off) or more"),
    ("max_skipped", max_skipped >= 1, "at least 1"),
    ("eval_interval", eval_interval >= 1, "at least 1"),
    ("log_interval", log_interval >= 1, "at least 1"),
    ("seed", seed >= 0, "zero or more"),
    ("dtype", dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
):
    if not fine:
        die(f"{key} is {settings[key]!r}, must be {wanted}")

# ---------------------------------------------------------------------------------------------
# Where to run. Under torchrun each process takes its share of every batch.
if device == "cuda" and world_size > 1:
    device = f"cuda:{os.environ['LOCAL_RANK']}"
try:
    torch.zeros(1, device=device)
except (RuntimeError, AssertionError) as fault:
    die(f"device is {device!r}, which cannot be used here ({str(fault).splitlines()[0]})")
device_type = torch.device(device).type
if world_size > 1:
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
chief = rank == 0  # the process that prints and writes
torch.set_float32_matmul_precision("high")
autocast = torch.autocast(device_type, torch.bfloat16, enabled=dtype == "bfloat16")

# Where to write. A folder that holds a run is only touched to resume it, or if told to overwrite.
last_path, best_path, log_path, config_path = (
    os.path.join(out_dir, name) for name in ("last.pt", "best.pt", "log.jsonl", "config.json")
)
if any(map(os.path.exists, (last_path, log_path, config_path))) and not (resume or overwrite):
    die(
        f"out_dir {out_dir} holds a run: --resume=True goes on with it, --overwrite=True replaces it"
    )
try:
    os.makedirs(out_dir, exist_ok=True)
    if not os.access(out_dir, os.W_OK):
        raise PermissionError(None, "Permission denied")
except OSError as fault:
    die(f"out_dir {out_dir} cannot be written ({fault.strerror}); choose another")

# A resumed run is the same run: only what does not change its course may differ.
free_to_change = {
    "out_dir",
    "data_dir",
    "resume",
    "overwrite",
    "max_steps",
    "eval_interval",
    "log_interval",
}
free_to_change |= {"wandb_log", "device", "dtype", "use_compile"}
checkpoint = None
if resume and os.path.exists(last_path):
    try:
        checkpoint = load_checkpoint(last_path)
    except ValueError as fault:
        die(fault)
    for key in settings.keys() - free_to_change:
        if settings[key] != checkpoint["config"].get(key):
            was = checkpoint["config"].get(key)
            die(
                f"resume: {key} is {settings[key]!r}, but the run in {out_dir} has {was!r}; give the same settings"
            )
    if checkpoint["step"] > max_steps:
        die(
            f"resume: max_steps is {max_steps}, but the run in {out_dir} is at step {checkpoint['step']}"
        )

try:
    data = load_dataset(dataset, data_dir)
except DataError as fault:
    die(fault)

# ---------------------------------------------------------------------------------------------
# Model and optimizer. log_eta, if trained by gradient, has a rate of its own, no decay, no clipping.
torch.manual_seed(seed)
raw_model = build_model(settings, data.shape).to(device)
weights = [p for name, p in raw_model.named_parameters() if name != "log_eta"]
optimizer = torch.optim.AdamW(
    [
        {"params": weights, "weight_decay": weight_decay},
        {"params": [raw_model.log_eta], "weight_decay": 0.0, "lr": 1e-3},
    ],
    lr=lr,
    fused=True,
)
step, best, skipped, seconds = 0, -math.inf, 0, 0.0
if checkpoint:
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step, best, skipped, seconds = (
        checkpoint[key] for key in ("step", "best", "skipped", "seconds")
    )
if use_compile:
    raw_model.compile()
model = DistributedDataParallel(raw_model) if world_size > 1 else raw_model


def schedule(step):
    """beta and learning rate of a step."""
    beta = beta_init
    if beta_init != beta_final:
        beta *= (beta_final / beta_init) ** (step / max(max_steps - 1, 1))
    rate = lr * min(1.0, (step + 1) / max(warmup_steps, 1))
    if lr_schedule == "cosine":
        rate *= (1 + math.cos(math.pi * step / max_steps)) / 2
    return beta, rate


def write(path, content):
    """Write a file under a temporary name and move it into place: it is whole or not there."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as fault:
        if os.path.exists(temporary):
            os.remove(temporary)
        die(f"{path} could not be written ({fault.strerror}); what was there before is untouched")


def save(path):
    state = {
        "model": raw_model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": settings,
    }
    state |= {"step": step, "best": best, "skipped": skipped, "seconds": seconds}
    write(path, state | {"x_shape": list(data.shape)})


def log(split, values):
    """One line in log.jsonl: a step, "train" or "val", and numbers. Nothing in it depends on time."""
    values = {key: float(value) for key, value in values.items()}
    print(json.dumps({"step": step, "split": split} | values), file=log_file, flush=True)
    if wandb_log:
        wandb.log({f"{split}/{key}": value for key, value in values.items()}, step=step)


if chief:
    # Start the log anew, or cut it back to the checkpoint: what came after will come again.
    lines = []
    if checkpoint and os.path.exists(log_path):
        with open(log_path) as file:
            lines = [
                line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step
            ]
    if not checkpoint and os.path.exists(best_path):
        os.remove(best_path)
    write(log_path, "".join(lines))
    write(config_path, json.dumps(settings, indent=2) + "\n")
    log_file = open(log_path, "a")
    if wandb_log:
        try:
            import wandb
        except ImportError:
            die("wandb_log is True, but wandb is not installed: pip install wandb")
        wandb.init(project="daps", name=out_dir, config=settings)
    encoder_size, decoder_size = n_parameters(raw_model)
    print(
        f"{method} on {dataset}: {n_tokens} tokens x {math.log2(vocab_size):g} bits, {max_steps:,} steps"
    )
    print(f"parameters: encoder {encoder_size:,}, decoder {decoder_size:,}; {device}, {dtype}")
    print(
        f"batch_size {batch_size}: {world_size} process(es) with {batch_size // world_size} examples each"
    )
    if resume:
        print(
            f"resumed at step {step}"
            if checkpoint
            else f"nothing to resume in {out_dir}: from the start"
        )

# ---------------------------------------------------------------------------------------------
# The loop. Ctrl-C and SIGTERM end it after the current step, with a checkpoint.
caught = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: caught.append(number))
noise_shape = (n_samples, n_tokens)
bar = tqdm(
    total=max_steps,
    initial=step,
    disable=None if chief else True,
    smoothing=0.05,
    dynamic_ncols=True,
)
bad_in_a_row = 0
started = time.perf_counter()
while step < max_steps:
    beta, optimizer.param_groups[0]["lr"] = schedule(step)
    x = data.train_batch(seed, step, batch_size, rank, world_size).to(device)  # (N, *shape)
    noise = uniform_noise(
        TRAIN_NOISE, seed, step, batch_size, noise_shape, rank, world_size, device
    )
    with autocast:
        loss, metrics = model(x, torch.tensor(beta, device=device), noise=noise)
    loss.backward()  # DDP averages the gradients here
    grad_norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf).item()
    if math.isfinite(grad_norm):
        optimizer.step()
        bad_in_a_row = 0
    else:
        skipped, bad_in_a_row = skipped + 1, bad_in_a_row + 1
        if bad_in_a_row == max_skipped:
            die(
                f"{max_skipped} steps in a row up to step {step} had a non-finite gradient; last.pt is from before: try a lower --lr"
            )
    optimizer.zero_grad()
    step += 1
    bar.update()

    if step % log_interval == 0 or step == max_steps:
        names = ["loss", *metrics]
        values = torch.stack([loss.detach(), *metrics.values()])
        if world_size > 1:
            dist.all_reduce(values)
            values /= world_size
        if chief:
            values = dict(zip(names, values.tolist(), strict=True))
            log(
                "train",
                values
                | {
                    "lr": optimizer.param_groups[0]["lr"],
                    "grad_norm": grad_norm,
                    "skipped": skipped,
                },
            )
            bar.set_postfix(
                {key: f"{values[key]:.4g}" for key in ("reward", "kl", "ess", "eta", "beta")}
            )

    stop = torch.tensor(len(caught), device=device)
    if world_size > 1:
        dist.all_reduce(stop)  # a signal may reach one process a step before another
    stop = bool(stop.item())
    if step % eval_interval == 0 or step == max_steps:
        seconds += time.perf_counter() - started
        with autocast:
            val, _ = evaluate(raw_model, data, beta_final, batch_size, device)
        if chief:
            log("val", val)
            bar.write(
                f"step {step:6d}  val beta-ELBO {val['beta_elbo']:.2f}  log p(x|z) {val['log_px']:.2f}  "
                f"KL {val['kl']:.2f}  PSNR {val['psnr']:.2f}  codes used {val['code_usage']:.0%}"
            )
            if val["beta_elbo"] > best:
                best = val["beta_elbo"]
                save(best_path)
            save(last_path)
        started = time.perf_counter()
    elif stop and chief:
        seconds += time.perf_counter() - started
        save(last_path)
    if stop:
        bar.close()
        if chief:
            print(
                f"stopped by a signal at step {step}; the same command with --resume=True goes on"
            )
        sys.exit(128 + caught[0] if caught else 1)

bar.close()
if chief:
    report([out_dir])
if world_size > 1:
    dist.destroy_process_group()
