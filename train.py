"""Train a discrete autoencoder.

    python train.py                                             DAPS on glyphs, minutes on a laptop
    python train.py config/mnist_daps.py                        the paper's MNIST run
    python train.py config/mnist_daps.py config/short.py        the same in 3,000 steps, for a CPU
    python train.py config/mnist_daps.py --resume=True          go on after an interruption
    torchrun --nproc_per_node=2 train.py config/mnist_daps.py   two processes share every batch

With --max_restarts, torchrun starts the same command again when a process dies: give it
--resume=True from the start, which begins anew only where out_dir has no checkpoint yet.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width.
"""

import json
import math
import os
import signal
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import configure, die
from data import (
    DATA_DIR,
    DATASETS,
    TRAIN_NOISE,
    DataError,
    example_shape,
    load_dataset,
    uniform_noise,
)
from eval import (
    AUTOREGRESSIVE,
    METHODS,
    VECTORS,
    build_model,
    check_device,
    evaluate,
    keep_memory,
    load_checkpoint,
    load_config,
    n_parameters,
    peak_memory,
    read_log,
    report,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# ---------------------------------------------------------------------------------------------
# Settings. Files and --key=value on the command line override them; --help lists them.

# what
method = "daps"  # daps, gumbel, grmck, rloo (each also _na: in one pass), ppo, reinmax_na, ...
dataset = "glyphs"  # glyphs: drawn on the spot; mnist, cifar10, lafan: downloaded; imagenet
data_dir = DATA_DIR  # holds a folder per data set; or, for imagenet, images in folders
image_size = 256  # imagenet: side of the images
out_dir = "out/glyphs_daps"  # checkpoints, log and pictures go here
resume = False  # go on from last.pt in out_dir, if it is there
overwrite = False  # replace the run that out_dir holds
# the code and the networks
n_tokens = 8  # B, tokens per code
vocab_size = 256  # V, values per token
width = 64  # H
n_heads = 4  # attention heads
n_layers = 1  # transformer blocks, per side where there are two (autoregressive)
mlp_ratio = 4  # hidden width of a block's MLP over H
decoder_layers = 2  # lafan: transformer blocks of the decoder
resnet_encoder = False  # vqvae, fsq, gaussian in colour: convolutions instead of a transformer
aligned = True  # the query of token t also sees patch t (in one pass it always does)
# the estimator
n_samples = 8  # K, codes sampled per example
ess_target = 0.33  # effective sample size of the K weights, over K
eta_update = "solve"  # solve: exact on every batch; gradient: the paper's step on log eta
beta_init = 0.5  # weight of the KL to the prior at the first step
beta_final = 0.01  # and at the last; exponential in between
# the other estimators
tau_init = 1.0  # gumbel, grmck, reinmax: temperature at the first step
tau_final = 1.0  # and at the last; exponential in between
mc_samples = 100  # grmck: conditional Gumbels per token
ppo_epochs = 4  # ppo: updates per batch
ppo_clip = 0.2  # ppo: how far the ratio of probabilities may go
commitment = 0.25  # vqvae: weight of the commitment term
vq_ema = True  # vqvae: code vectors by running means, k-means start, revival; else by gradient
fsq_levels = "8 8 4"  # fsq: levels per number; their product is vocab_size
# optimisation
max_steps = 2000  # optimizer steps; all schedules end here
batch_size = 128  # N, over all processes together
lr = 6e-3  # highest learning rate of AdamW
lr_schedule = "cosine"  # cosine: down to lr_final at the last step; constant
lr_final = 0.0  # lowest learning rate of the cosine
warmup_steps = 50  # steps of linear warm-up
weight_decay = 1e-4  # decoupled, on all weights
grad_clip = 1000.0  # largest norm of the gradient (of a sum over pixels, so large); 0: off
max_skipped = 20  # stop after so many steps in a row with a non-finite gradient
# memory
accumulate = 1  # parts of a batch that are worked on one after the other
recompute = 0  # parts in which codes are scored, computed again for the gradient; 0: keep all
# log and evaluation
eval_interval = 250  # steps between validations, each of which saves last.pt
eval_examples = 0  # validation examples during training; 0: all
log_interval = 10  # steps between lines in log.jsonl
wandb_log = False  # also log to Weights & Biases (pip install wandb)
# machine
seed = 0  # of parameters, batches and noise
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
dtype = "bfloat16" if torch.cuda.is_available() else "float32"  # of the networks' matrix products
use_compile = torch.cuda.is_available()  # torch.compile
n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images

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
    (
        "n_tokens",
        n_tokens * max(width, vocab_size) <= 2**26,
        "less: with width and vocab_size, an example has more than 2**26 numbers",
    ),
    ("n_heads", n_heads >= 1, "at least 1"),
    (
        "width",
        width > 0 and width % (2 * max(n_heads, 1)) == 0,
        f"a multiple of 2 * n_heads = {2 * n_heads}",
    ),
    ("n_layers", n_layers >= 1, "at least 1"),
    ("mlp_ratio", mlp_ratio >= 1, "at least 1"),
    ("decoder_layers", decoder_layers >= 1, "at least 1"),
    (
        "aligned",
        aligned or method in AUTOREGRESSIVE,
        f"True for {method}: in one pass, token t always sees patch t",
    ),
    ("n_samples", n_samples >= 2, "at least 2: codes are compared"),
    ("ess_target", 0 < ess_target <= 1, "in (0, 1]"),
    ("eta_update", eta_update in ("solve", "gradient"), "solve or gradient"),
    ("beta_final", beta_final >= 0, "zero or more"),
    ("beta_init", beta_init >= 0, "zero or more"),
    ("beta_init", beta_init > 0 or beta_final <= 0, "positive, like beta_final"),
    ("beta_final", beta_final > 0 or beta_init <= 0, "positive, like beta_init"),
    ("tau_init", tau_init > 0, "positive"),
    ("tau_final", tau_final > 0, "positive"),
    ("mc_samples", mc_samples >= 1, "at least 1"),
    ("ppo_epochs", ppo_epochs >= 1, "at least 1"),
    ("ppo_clip", ppo_clip > 0, "positive"),
    ("commitment", commitment >= 0, "zero or more"),
    ("max_steps", max_steps >= 1, "at least 1"),
    ("batch_size", batch_size >= 1, "at least 1"),
    ("accumulate", accumulate >= 1, "at least 1"),
    ("accumulate", accumulate == 1 or method != "ppo", "1 for ppo, which goes back to its batch"),
    (
        "batch_size",
        batch_size % (world_size * max(accumulate, 1)) == 0,
        f"a multiple of {world_size} processes times accumulate = {accumulate}",
    ),
    ("recompute", recompute >= 0, "zero (off) or more"),
    (
        "recompute",
        recompute == 0 or method in ("daps", "rloo", "ppo"),
        f"0 for {method}, which scores no codes",
    ),
    ("resnet_encoder", not resnet_encoder or method in VECTORS, f"False for {method}"),
    ("resnet_encoder", not resnet_encoder or dataset != "lafan", "False for lafan, no images"),
    ("image_size", image_size >= 8, "at least 8"),
    ("n_workers", n_workers >= 0, "zero or more"),
    ("eval_examples", eval_examples >= 0, "zero (all) or more"),
    ("lr", lr > 0, "positive"),
    ("lr_final", 0 <= lr_final <= lr, f"between zero and lr = {lr}"),
    ("lr_final", lr_final == 0 or lr_schedule != "constant", "0 for a constant rate"),
    ("lr_schedule", lr_schedule in ("cosine", "constant"), "cosine or constant"),
    ("warmup_steps", warmup_steps >= 0, "zero or more"),
    ("weight_decay", weight_decay >= 0, "zero or more"),
    ("grad_clip", grad_clip >= 0, "zero (off) or more"),
    ("max_skipped", max_skipped >= 1, "at least 1"),
    ("eval_interval", eval_interval >= 1, "at least 1"),
    ("log_interval", log_interval >= 1, "at least 1"),
    ("seed", 0 <= seed < 2**63, "zero or more and below 2**63"),
    ("device", world_size == 1 or ":" not in device, "cpu or cuda: each process takes its own"),
    ("dtype", dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
):
    if not fine:
        die(f"{key} is {settings[key]!r}, must be {wanted}")
if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 and not resume:
    die("torchrun --max_restarts starts the same command again: add --resume=True")
if device == "cuda" and world_size > 1:
    device = f"cuda:{os.environ['LOCAL_RANK']}"
# The networks, on paper: whether they fit together is known before data are looked for.
try:
    check_device(device)
    with torch.device("meta"):
        build_model(settings, example_shape(dataset, image_size))
except ValueError as fault:
    die(fault)
if wandb_log:
    try:
        import wandb
    except ImportError:
        die("wandb_log is True, but wandb is not installed: pip install wandb")

# ---------------------------------------------------------------------------------------------
# Where to write. A folder that holds a run is only touched to resume it, or if told to overwrite.
chief = rank == 0  # the process that prints and writes
names = ("last.pt", "best.pt", "log.jsonl", "config.json")
out_dir = os.path.expanduser(out_dir)
last_path, best_path, log_path, config_path = paths = [os.path.join(out_dir, n) for n in names]


def lock(path):
    """Keep other runs out of out_dir while this process lives; a kill releases it."""
    file = open(path, "a")  # noqa: SIM115 (open until the program ends)
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        die(f"out_dir {out_dir} is in use: another process is training there")
    except OSError:
        pass  # a file system without locks
    return file


if chief:
    if any(map(os.path.exists, paths)) and not (resume or overwrite):
        die(f"out_dir {out_dir} holds a run: add --resume=True or --overwrite=True")
    try:
        os.makedirs(out_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=out_dir).close()
        locked = lock(os.path.join(out_dir, ".lock"))
    except OSError as fault:
        die(f"out_dir {out_dir} cannot be written ({fault.strerror}); choose another")

# Where to run. Under torchrun each process takes its share of every batch.
device_type = torch.device(device).type
keep_memory()
if device_type == "cuda":
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32


def reader_died(fault):
    """Whether a process that reads images was killed: torch raises this wherever we are."""
    return isinstance(fault, RuntimeError) and "DataLoader worker (pid" in str(fault)


def explain(kind, fault, trace):
    """One line, instead of a traceback, for what is not the fault of this process."""
    if reader_died(fault):
        reason = "a process that reads images died (killed, or out of memory)"
    elif issubclass(kind, dist.DistError) or "gloo" in str(fault):
        reason = "another process of this run died or cannot be reached"
    else:
        return sys.__excepthook__(kind, fault, trace)
    go_on = "the same command with --resume=True goes on from the last checkpoint"
    print(f"error: {reason}; {go_on}", file=sys.stderr, flush=True)


sys.excepthook = explain  # it may surface anywhere: in a backward pass, a sum, an evaluation
if world_size > 1:
    # torchrun's store outlives a restart, and so do the addresses of dead processes in it.
    store, *_ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


# Ctrl-C and SIGTERM end the loop after the current step, with a checkpoint. Before and after it
# there is nothing to save: they end the program at once, and so does a second signal.
caught, how_to_go_on = [], "the same command starts again"


def catch(number, frame):
    caught.append(number)
    signal.signal(number, signal.SIG_DFL)
    if how_to_go_on:
        stop_here()


def stop_here():
    if chief:
        print(f"stopped; {how_to_go_on}", flush=True)
    sys.exit(128 + caught[0])


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, catch)
autocast = torch.autocast(device_type, torch.bfloat16, enabled=dtype == "bfloat16")

# A resumed run is the same run: only what does not change its course may differ (rounding aside;
# a new max_steps stretches the schedules).
may_differ = "out_dir data_dir resume overwrite max_steps eval_interval log_interval wandb_log"
may_differ = set(may_differ.split()) | {"device", "dtype", "use_compile", "n_workers", "recompute"}
checkpoint, config_then = None, settings
try:
    if resume and os.path.exists(last_path):
        checkpoint = load_checkpoint(last_path)
        config_then = checkpoint["config"]
    elif resume and os.path.exists(config_path) and not overwrite:
        config_then = load_config(config_path)  # killed before the first checkpoint
except ValueError as fault:
    die(f"resume: {fault}")
for key in settings:
    then, now = config_then.get(key, "not set"), settings[key]
    if key not in may_differ and (type(then) is not type(now) or then != now):
        then = repr(then).split("\n")[0]  # a foreign checkpoint may hold anything
        die(f"resume: {key} is {now!r}, but the run in {out_dir} has {then}; it must stay so")
if checkpoint and checkpoint["step"] > max_steps:
    die(f"resume: {out_dir} is at step {checkpoint['step']}, past max_steps = {max_steps}")

try:
    data = load_dataset(dataset, data_dir, image_size)
except DataError as fault:
    die(fault)
standard = {"x_mean": data.mean, "x_std": data.std}
if checkpoint and not all(
    checkpoint[key].shape == value.shape and torch.allclose(checkpoint[key].to(value), value)
    for key, value in standard.items()
):
    die(f"resume: the data in {data_dir} have another mean or scale than those the run began with")

# ---------------------------------------------------------------------------------------------
# Model and optimizer. log_eta, if trained by gradient, has its own rate, no decay, no clipping.
torch.manual_seed(seed)
raw_model = build_model(settings, data.shape).to(device)
for module in raw_model.modules():
    if hasattr(module, "standardise"):
        module.standardise(*data.input_scale())
weights = [p for name, p in raw_model.named_parameters() if name != "log_eta"]
etas = [p for name, p in raw_model.named_parameters() if name == "log_eta"]
optimizer = torch.optim.AdamW(
    [
        {"params": weights, "weight_decay": weight_decay},
        {"params": etas, "weight_decay": 0.0, "lr": 1e-3},
    ],
    lr=lr,
    fused=True,
)
rules = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
progress = {"step": 0, "best": -math.inf, "skipped": 0, "seconds": 0.0, "memory": 0.0}
if checkpoint:
    try:
        raw_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        # What the optimizer takes as it comes.
        if any(
            group | rule != group for group, rule in zip(optimizer.param_groups, rules, strict=True)
        ):
            raise ValueError("other rules")
        for p, state in optimizer.state.items():
            if any(t.shape != (() if key == "step" else p.shape) for key, t in state.items()):
                raise ValueError("other shapes")
    except Exception:  # what foreign content makes torch raise is not documented
        die(f"resume: {last_path} was written by another version and does not fit this one")
    progress = {key: checkpoint[key] for key in progress}
if world_size > 1:  # processes that start from different places would train nonsense
    views = [None] * world_size
    view = {k: v for k, v in settings.items() if not k.endswith(("_dir", "_workers"))}
    view |= {f"the {key} of last.pt": value for key, value in progress.items()}
    dist.all_gather_object(views, view | data.summary())
    for key, (ours, *others) in ((key, [view[key] for view in views]) for key in views[0]):
        for other in others:
            if not (torch.allclose(ours, other) if torch.is_tensor(ours) else ours == other):
                die(f"the processes disagree on {key}: {ours} and {other}")
if use_compile:
    raw_model.compile()
    if method in AUTOREGRESSIVE:
        raw_model.encoder.compile_sampler()
model = DistributedDataParallel(raw_model) if world_size > 1 else raw_model


def anneal(first, last, step):
    """From first to last over the run, exponentially."""
    return first if first == last else first * (last / first) ** (step / max(max_steps - 1, 1))


def learning_rate(step):
    rate = lr * min(1.0, (step + 1) / max(warmup_steps, 1))
    if lr_schedule == "cosine":
        low = lr_final / lr
        rate *= low + (1 - low) * (1 + math.cos(math.pi * step / max_steps)) / 2
    return rate


def write(path, content):
    """Write text or a checkpoint under another name and move it into place: whole or not at all."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as fault:  # torch.save turns a full disk into a RuntimeError
        if os.path.exists(f"{path}.tmp"):
            os.remove(f"{path}.tmp")
        if reader_died(fault):
            raise
        cannot_write(path, fault)


def cannot_write(path, fault):
    whole = "what was there before is untouched: make room, then --resume=True"
    die(f"{path} could not be written ({fault}); {whole}")


def save(path):
    try:  # after a power cut, the log must reach as far as the checkpoint
        os.fsync(log_file.fileno())
    except OSError as fault:
        cannot_write(log_path, fault)
    nets = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
    write(path, nets | progress | standard | {"config": settings, "x_shape": list(data.shape)})


def log(split, values):
    """One line in log.jsonl: step, "train" or "val", and numbers, none of which depends on time."""
    values = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
    line = json.dumps({"step": progress["step"], "split": split} | values)
    try:
        print(line, file=log_file, flush=True)
    except OSError as fault:  # a line cut short is left out when the run is resumed
        cannot_write(log_path, fault)
    if wandb_log:
        values = {f"{split}/{key}": value for key, value in values.items()}
        wandb.log(values, step=progress["step"])


how_to_go_on = ""  # from here on there is something to save
if chief:
    # Start the log anew, or cut it back to the checkpoint: what came after will come again.
    lines = []
    if checkpoint:
        rows = read_log(out_dir)
        lines = [json.dumps(row) + "\n" for row in rows if row["step"] <= progress["step"]]
    elif overwrite:
        for path in filter(os.path.exists, paths):
            os.remove(path)
    write(log_path, "".join(lines))
    write(config_path, json.dumps(settings, indent=2) + "\n")
    log_file = open(log_path, "a")  # noqa: SIM115 (open until the program ends)
    if wandb_log:
        wandb.init(project="daps", name=out_dir, config=settings)
    sizes = "encoder {:,}, decoder {:,}".format(*n_parameters(raw_model))
    bits = n_tokens * math.log2(vocab_size)
    print(f"{method} on {dataset}: {n_tokens} tokens of {vocab_size} values, {bits:g} bits")
    print(f"parameters: {sizes}; {max_steps:,} steps on {device} in {dtype}")
    print(f"batch_size {batch_size}: {batch_size // world_size} for each of {world_size} processes")
    if resume:
        where = f"at step {progress['step']}" if checkpoint else "at the start: no last.pt yet"
        print(f"resumed {where}")

# ---------------------------------------------------------------------------------------------
# The loop.
place = dict(rank=rank, world_size=world_size)
step, bad_in_a_row, started = progress["step"], 0, time.perf_counter()
bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None if chief else True)
batches = data.train_batches(seed, step, max_steps, batch_size, **place, n_workers=n_workers)
while step < max_steps:
    beta = anneal(beta_init, beta_final, step)
    if hasattr(raw_model, "tau"):
        raw_model.tau.fill_(anneal(tau_init, tau_final, step))
    rate = optimizer.param_groups[0]["lr"] = learning_rate(step)
    try:
        x = next(batches).to(device, non_blocking=True)  # (N, *shape)
    except (DataError, RuntimeError) as fault:  # the latter from a worker that broke down
        if reader_died(fault):
            raise
        die(f"batch {step} could not be read: {str(fault).splitlines()[-1]}")
    noise = uniform_noise(TRAIN_NOISE, seed, step, batch_size, raw_model.noise_shape, **place)
    beta_now = torch.tensor(beta, device=device)
    parts = list(zip(x.chunk(accumulate), noise.to(device).chunk(accumulate), strict=True))
    for epoch in range(getattr(raw_model, "n_epochs", 1)):  # PPO goes over a batch several times
        options = {"epoch": epoch} if epoch > 0 else {}
        buffers = [buffer.clone() for buffer in raw_model.buffers()]
        seen = []
        for x, noise in parts:
            last = len(seen) == accumulate - 1
            wait = nullcontext() if last or world_size == 1 else model.no_sync()
            with wait:
                with autocast:
                    loss, metrics = model(x, beta_now, noise=noise, **options)
                (loss / accumulate).backward()  # DDP averages the gradients here, after the last
            seen.append(torch.stack([loss.detach(), *metrics.values()]))
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf).item()
        if math.isfinite(grad_norm):
            optimizer.step()
            bad_in_a_row = 0
        else:  # leave parameters, optimizer and running moments as they are
            for buffer, before in zip(raw_model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            progress["skipped"] += 1
            bad_in_a_row += 1
            if bad_in_a_row == max_skipped:
                die(f"non-finite gradients in {max_skipped} steps up to {step}; try a lower --lr")
        optimizer.zero_grad()
    step += 1
    progress["step"] = step
    bar.update()

    if step % log_interval == 0 or step == max_steps:
        values = torch.stack(seen).mean(dim=0)
        if world_size > 1:
            dist.all_reduce(values)
            values /= world_size
        if chief:
            row = dict(zip(["loss", *metrics], values.tolist(), strict=True))
            log("train", row | dict(lr=rate, grad_norm=grad_norm, skipped=progress["skipped"]))
            shown = ("reward", "kl", "ess", "eta", "beta")
            bar.set_postfix({key: f"{row[key]:.4g}" for key in shown if key in row})

    stop = torch.tensor(len(caught))
    if world_size > 1:  # a signal may reach one process a step before another
        stop = stop.to(device)
        dist.all_reduce(stop)
    evaluating = step % eval_interval == 0 or step == max_steps
    if evaluating or stop:
        progress["seconds"] += time.perf_counter() - started
        progress["memory"] = max(progress["memory"], peak_memory(device))
        if evaluating:
            size = batch_size // accumulate
            try:
                limits = (eval_examples, n_workers)
                val, _ = evaluate(raw_model, data, beta_final, size, device, *limits)
            except DataError as fault:
                die(fault)
            if chief:
                log("val", val)
                shown = {
                    "beta-ELBO": "beta_elbo",
                    "log p(x|z)": "log_px",
                    "KL": "kl",
                    "PSNR": "psnr",
                }
                shown = {k: val[v] for k, v in shown.items() if val[v] is not None}
                shown = "  ".join(f"{key} {value:8.2f}" for key, value in shown.items())
                bar.write(f"step {step:6d}  val {shown}")
                score = val["log_px"] if val["beta_elbo"] is None else val["beta_elbo"]
                if score > progress["best"]:
                    progress["best"] = score
                    save(best_path)
        if chief:
            save(last_path)
        started = time.perf_counter()
    if stop:
        bar.close()
        if chief:
            print(f"stopped at step {step}; the same command with --resume=True goes on from here")
        sys.exit(128 + (caught or [signal.SIGTERM])[0])

bar.close()
if world_size > 1:
    dist.destroy_process_group()
how_to_go_on = "all steps are done; the same command with --resume=True makes table and pictures"
if caught:  # in the last evaluation
    stop_here()
if chief:
    try:
        best_or_last = "best" if os.path.exists(best_path) else "last"
        report([out_dir], best_or_last, data_dir, device, n_workers=n_workers)
    except ValueError as fault:
        die(fault)
    except OSError as fault:
        cannot_write(f"the report in {out_dir}", fault)
