"""Train a discrete autoencoder.

    python train.py                                             DAPS on glyphs, minutes on a laptop
    python train.py config/mnist_daps.py                        the paper's networks on MNIST
    python train.py config/mnist_daps.py config/short.py        the same in 3,000 steps, for a CPU
    python train.py config/mnist_daps.py --resume=True          continue after an interruption
    torchrun --nproc_per_node=2 train.py config/mnist_daps.py   two processes share every batch

With --max_restarts, torchrun runs the same command again when a process dies: pass --resume=True
from the first run on; without a checkpoint in out_dir, it starts from step 0.

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width.
"""

import json
import math
import os
import sys
import time
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from checkpoint import (
    Log,
    StopSignal,
    as_bytes,
    check_same_run,
    claim,
    has_bfloat16,
    load_checkpoint,
    restore,
    setup_device,
    write,
)
from configurator import UserError, configure, require
from data import DATA_DIR, DATASETS, TRAIN_NOISE, example_shape, load_dataset, uniform_noise
from eval import evaluate, one_line, report
from models import (
    AUTOREGRESSIVE,
    METHODS,
    VECTORS,
    build_model,
    n_parameters,
    split_values,
    start_from_clusters,
)

# ---------------------------------------------------------------------------------------------
# Settings. Config files and --key=value override them; --help lists them.

# what
method = "daps"  # daps, gumbel, grmck, rloo (also _na), ppo, reinmax_na, vqvae, fsq, gaussian
dataset = "glyphs"  # glyphs: drawn on the fly; mnist, cifar10, lafan: downloaded; imagenet
data_dir = DATA_DIR  # has a folder per data set; for imagenet, may be a folder of image folders
image_size = 256  # imagenet: side of the images
out_dir = ""  # checkpoints, log and pictures go here; empty: out/<dataset>_<method>
resume = False  # continue from last.pt in out_dir, if there is one
overwrite = False  # replace the run in out_dir
# the code and the networks
n_tokens = 8  # B, tokens per code
vocab_size = 256  # V, values per token
width = 64  # H
n_heads = 4  # attention heads
n_layers = 1  # transformer blocks; autoregressive: over patches, and as many over tokens
mlp_ratio = 4  # hidden width of a block's MLP, as a multiple of H
decoder_layers = 2  # lafan: transformer blocks of the decoder
resnet_encoder = False  # vqvae, fsq, gaussian in colour: convolutions instead of a transformer
tied = True  # logits are products with the decoder's vectors; False: a table of their own
aligned = True  # autoregressive: the query of token t also sees patch t; one-pass methods always do
# the estimator
n_samples = 8  # K, codes sampled per example
ess_target = 0.33  # effective sample size of the K weights, as a share of K
eta_update = "solve"  # solve: exact on every batch; gradient: the paper's step on log eta
centred = True  # daps: subtract 1 / K from the weights; False: eq. (6) as printed
credit_window = 3  # daps: side of the window of x around a token that rewards it; 0: all of x
kmeans_start = False  # values start as clusters of what the encoder sees; False: at random
split_interval = 50  # steps between turning rarely used values into copies of common ones; 0: off
beta_init = 0.5  # weight of the KL to the prior at the first step
beta_final = 0.01  # and at the last; exponential in between
# the other estimators
tau_init = 1.0  # gumbel, grmck, reinmax: temperature at the first step
tau_final = 1.0  # and at the last; exponential in between
mc_samples = 100  # grmck: conditional Gumbels per token
ppo_epochs = 1  # ppo: updates per batch
ppo_clip = 0.2  # ppo: how far the ratio of probabilities may move from 1
commitment = 0.25  # vqvae: weight of the commitment term
vq_ema = True  # vqvae: code vectors by running means, k-means start, revival; False: by gradient
fsq_levels = "8 8 4"  # fsq: levels per number; their product is vocab_size
# optimisation
max_steps = 2000  # optimizer steps; all schedules end here
batch_size = 128  # N, over all processes together
lr = 6e-3  # highest learning rate of AdamW
encoder_lr = 1.0  # learning rate of the encoder, as a multiple of lr
scale_lr = 0.0  # learning rate of the logits' scale (1 / temperature), as a multiple of lr; 0: off
lr_schedule = "cosine"  # cosine: down to lr_final at the last step; constant
lr_final = 0.0  # lowest learning rate of the cosine
warmup_steps = 50  # steps of linear warm-up
weight_decay = 1e-4  # decoupled, on all weights
grad_clip = 0.0  # largest norm of the gradient; 0: off
max_skipped = 20  # stop after this many steps in a row with a non-finite gradient
# memory
accumulate = 1  # process each batch in this many parts, one after the other
recompute = 0  # score codes in this many parts, computed again for the gradient; 0: keep all
# log and evaluation
eval_interval = 250  # steps between validations, each of which saves last.pt
eval_examples = 0  # validation examples during training; 0: all
log_interval = 10  # steps between lines in log.jsonl
wandb_log = False  # also log to Weights & Biases (pip install wandb)
# machine
seed = 0  # of parameters, batches and noise
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
dtype = ""  # of matrix products: float32, bfloat16; empty: bfloat16 on GPUs that compute in it
use_compile = torch.cuda.is_available()  # torch.compile
cuda_graphs = False  # autoregressive: replay the sampler's steps as CUDA graphs
n_workers = min(8, os.cpu_count() or 1)  # imagenet: processes that decode images

# ---------------------------------------------------------------------------------------------
# Check the settings before anything is written, downloaded or computed. Checks in the networks and
# methods are not repeated here: building the model on the meta device runs them.
settings, unused = configure(globals(), sys.argv[1:])
rank, world_size = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
is_main = rank == 0  # the process that prints and writes
out_dir = settings["out_dir"] = os.path.expanduser(out_dir or f"out/{dataset}_{method}")
counts = "n_tokens n_heads n_layers mlp_ratio decoder_layers n_samples mc_samples ppo_epochs "
counts += "max_steps batch_size accumulate max_skipped eval_interval log_interval"
amounts = "beta_init beta_final commitment recompute n_workers eval_examples lr_final warmup_steps "
amounts += "weight_decay grad_clip seed credit_window split_interval scale_lr"
shares = world_size * accumulate
scores_codes = method in ("daps", "rloo", "ppo")
require(
    settings,
    (counts, lambda v: v >= 1, "at least 1"),
    ("vocab_size", lambda v: v >= 2, "at least 2"),
    ("image_size", lambda v: v >= 8, "at least 8"),
    ("width tau_init tau_final ppo_clip lr encoder_lr", lambda v: v > 0, "positive"),
    (amounts, lambda v: v >= 0, "zero or more"),
    ("seed", lambda v: v < 2**32, "below 2**32"),
    ("lr_schedule", lambda v: v in ("cosine", "constant"), "cosine or constant"),
    ("dtype", lambda v: v in ("", "float32", "bfloat16"), "float32 or bfloat16"),
    ("method", lambda v: v in METHODS, f"one of: {', '.join(METHODS)}"),
    ("dataset", lambda v: v in DATASETS, f"one of: {', '.join(DATASETS)}"),
    ("beta_init", lambda v: (v > 0) == (beta_final > 0), "positive if beta_final is, else zero"),
    ("credit_window", lambda v: v % 2 or v == 0, "odd, or zero for whole codes"),
    ("lr_final", lambda v: v <= lr, f"at most lr = {lr}"),
    ("lr_final", lambda v: v == 0 or lr_schedule == "cosine", "0 for a constant rate"),
    ("accumulate", lambda v: v == 1 or method != "ppo", "1 for ppo, which returns to its batch"),
    ("batch_size", lambda v: v % shares == 0, f"a multiple of processes * accumulate = {shares}"),
    ("recompute", lambda v: v == 0 or scores_codes, f"0 for {method}, which scores no codes"),
    ("resnet_encoder", lambda v: not v or method in VECTORS, f"False for {method}"),
    ("resnet_encoder", lambda v: not v or dataset != "lafan", "False for lafan, no images"),
    ("device", lambda v: world_size == 1 or ":" not in v, "cpu or cuda: one for each process"),
)
if unused:
    raise UserError(f"{unused[0]}: neither a config file (*.py) nor --key=value")
if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 and not resume:
    raise UserError("torchrun --max_restarts starts the same command again: add --resume=True")
try:
    with torch.device("meta"):
        build_model(settings, example_shape(dataset, image_size))
    if wandb_log:
        import wandb
except ValueError as error:
    raise UserError(str(error)) from None
except ImportError as error:
    raise UserError(f"wandb_log is True: {error}; pip install wandb") from None

# ---------------------------------------------------------------------------------------------
# Device, output folder, processes. Under torchrun, each process takes its share of every batch.
device = setup_device(device)
device_type = torch.device(device).type
can_bfloat16 = device_type == "cuda" and has_bfloat16()
dtype = settings["dtype"] = dtype or ("bfloat16" if can_bfloat16 else "float32")
last_path, best_path, log_path, config_path, _ = paths = [
    os.path.join(out_dir, name)
    for name in ("last.pt", "best.pt", "log.jsonl", "config.json", "eval.json")
]
lock = claim(out_dir, paths, resume, overwrite) if is_main else None
if world_size > 1:
    # torchrun's store survives a restart, with the addresses of dead processes still in it.
    store, *_ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
stop = StopSignal()
autocast = torch.autocast(device_type, torch.bfloat16, enabled=dtype == "bfloat16")

# A resumed run is the same run: only settings that do not change its results may differ (rounding
# aside; a new max_steps stretches the schedules).
may_differ = {"out_dir", "data_dir", "resume", "overwrite", "max_steps", "eval_interval"}
may_differ |= {"log_interval", "wandb_log", "device", "dtype", "use_compile", "n_workers"}
may_differ |= {"recompute", "cuda_graphs"}
saved = None
if resume and os.path.exists(last_path):
    saved = load_checkpoint(last_path, ("optimizer", "n_split", "data_mean"))
    check_same_run(out_dir, settings, saved["config"], may_differ, saved["step"])
elif resume and os.path.exists(config_path) and not overwrite:  # stopped before a checkpoint
    with open(config_path) as file:
        check_same_run(out_dir, settings, json.load(file), may_differ)

# ---------------------------------------------------------------------------------------------
# Data, model and optimizer. The parts of the model have learning rates of their own; log_scale and
# log_eta, if trained by gradient, have no weight decay, and log_eta no clipping.
data = load_dataset(dataset, data_dir, image_size).to(device)
torch.manual_seed(seed)
raw_model = build_model(settings, data.shape).to(device)
for module in raw_model.modules():
    if hasattr(module, "standardise"):
        module.standardise(*data.input_scale())
groups = {"log_eta": [], "log_scale": [], "encoder": [], "": []}  # "": all others
for name, p in raw_model.named_parameters():
    groups[next(g for g in groups if name.startswith(g) or name.endswith(g))].append(p)
for p in groups["log_scale"]:  # one, or none
    p.requires_grad_(scale_lr > 0)
optimizer = torch.optim.AdamW(
    [
        {"params": groups[""], "multiple": 1.0},  # of the scheduled learning rate
        {"params": groups["encoder"], "multiple": encoder_lr},
        {"params": groups["log_scale"], "multiple": scale_lr, "weight_decay": 0.0},
        {"params": groups["log_eta"], "lr": 1e-3, "weight_decay": 0.0},
    ],
    lr=lr,
    weight_decay=weight_decay,
    fused=True,
)
weights = [p for group in optimizer.param_groups[:-1] for p in group["params"]]  # not log_eta
progress = {"step": 0, "best": -math.inf, "skipped": 0, "n_split": 0, "seconds": 0.0}
if saved:
    restore(last_path, saved, model=raw_model, optimizer=optimizer)
    progress = {key: saved[key] for key in progress}
    for key, value in (("data_mean", data.mean), ("data_std", data.std)):
        if not torch.allclose(saved[key], value.cpu()):
            raise UserError(f"resume: the data in {data_dir} are not those the run began with")
elif kmeans_start and method not in VECTORS:
    n = -(-32 * vocab_size // n_tokens)  # 32 tokens per value
    x = data.standardise(data.train_batch(seed, 0, n))
    start_from_clusters(raw_model, x, torch.Generator().manual_seed(seed))
if world_size > 1:  # processes that start from different states would train nonsense
    views = [None] * world_size
    view = {k: v for k, v in settings.items() if not k.endswith(("_dir", "_workers"))}
    view |= {f"the {key} of last.pt": value for key, value in progress.items()}
    dist.all_gather_object(views, view | data.summary())
    for key in views[0]:
        for other in views[1:]:
            if repr(views[0][key]) != repr(other[key]):
                difference = f"{views[0][key]} and {other[key]}"
                raise UserError(f"the processes disagree on {key}: {difference}")
splits = split_interval > 0 and method not in VECTORS
if splits:
    raw_model.encoder.counting = True
if use_compile and method not in ("gumbel", "grmck"):  # whose loops over tokens would be unrolled
    raw_model.compile()
    if method in AUTOREGRESSIVE:
        raw_model.encoder.compile_sampler(cuda_graphs=cuda_graphs)
# DDP would split the compiled graph to send some gradients early. Buffers are equal on all ranks;
# torch 2.13 renames that setting and warns, but older versions know only the old name.
warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
torch._dynamo.config.optimize_ddp = False
model = raw_model
if world_size > 1:
    model = DistributedDataParallel(raw_model, broadcast_buffers=False)


def anneal(first, last, step):
    """From first to last over the run, exponentially."""
    return first if first == last else first * (last / first) ** (step / max(max_steps - 1, 1))


def learning_rate(step):
    rate = lr * min(1.0, (step + 1) / max(warmup_steps, 1))
    if lr_schedule == "cosine":
        low = lr_final / lr
        rate *= low + (1 - low) * (1 + math.cos(math.pi * step / max_steps)) / 2
    return rate


def save(path):
    log_file.sync()
    state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), **progress}
    state |= {"data_mean": data.mean.cpu(), "data_std": data.std.cpu()}
    state["x_shape"] = list(data.shape)
    write(path, as_bytes(torch.save, state | {"config": settings}))


def log(split, values):
    """One line in log.jsonl: step, "train" or "val", and numbers that do not depend on time."""
    values = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
    log_file.add({"step": progress["step"], "split": split} | values)
    if wandb_log:
        wandb.log({f"{split}/{k}": v for k, v in values.items()}, step=progress["step"])


stop.advice = ""  # from here on there is something to save
if is_main:
    if overwrite and not saved:
        for path in filter(os.path.exists, paths):
            os.remove(path)
    log_file = Log(log_path, progress["step"])
    write(config_path, json.dumps(settings, indent=2) + "\n")
    if wandb_log:
        wandb.init(project="daps", name=out_dir, config=settings)
    sizes = "encoder {:,}, decoder {:,}".format(*n_parameters(raw_model))
    bits = n_tokens * math.log2(vocab_size)
    print(f"{method} on {dataset}: {n_tokens} tokens of {vocab_size} values, {bits:g} bits")
    print(f"parameters: {sizes}; {max_steps:,} steps on {device} in {dtype}")
    if device_type == "cuda" and not can_bfloat16:
        print("this GPU has no native bfloat16, so the default is float32")
    print(f"batch_size {batch_size}: {batch_size // world_size} for each of {world_size} processes")
    if resume:
        where = f"at step {progress['step']}" if saved else "at the start: no last.pt yet"
        print(f"resumed {where}")

# ---------------------------------------------------------------------------------------------
# The loop.
share = dict(rank=rank, world_size=world_size)
step, bad_in_a_row, started = progress["step"], 0, time.perf_counter()
bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None if is_main else True)
batches = data.train_batches(seed, step, max_steps, batch_size, **share, n_workers=n_workers)
while step < max_steps:
    if splits and step and step % split_interval == 0 and step <= 0.8 * max_steps:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        progress["n_split"] += split_values(raw_model, optimizer, generator)

    beta = torch.full((), anneal(beta_init, beta_final, step), device=device)
    if raw_model.tau is not None:
        raw_model.tau.fill_(anneal(tau_init, tau_final, step))
    rate = learning_rate(step)
    for group in optimizer.param_groups[:-1]:  # all but log_eta's
        group["lr"] = rate * group["multiple"]
    x = data.standardise(next(batches))  # (N, *shape)
    shape = raw_model.noise_shape
    noise = uniform_noise(TRAIN_NOISE, seed, step, batch_size, shape, **share, device=device)
    parts = list(zip(x.chunk(accumulate), noise.chunk(accumulate), strict=True))
    n_bad = torch.zeros((), device=device)
    for epoch in range(raw_model.n_epochs):  # PPO goes over a batch several times
        options = {"epoch": epoch} if epoch > 0 else {}
        buffers = [buffer.clone() for buffer in raw_model.buffers()]
        rows = []
        for x_part, noise_part in parts:
            last = len(rows) == accumulate - 1
            with nullcontext() if last or world_size == 1 else model.no_sync():
                with autocast:
                    loss, metrics = model(x_part, beta, noise=noise_part, **options)
                (loss / accumulate).backward()  # DDP averages the gradients after the last part
            rows.append(torch.stack([loss.detach(), *metrics.values()]))
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf)
        # A non-finite gradient leaves parameters, optimizer and running moments unchanged. This is
        # decided on the device, so the CPU does not wait.
        bad = ~grad_norm.isfinite()
        optimizer.found_inf = bad.float()  # read by the fused AdamW
        optimizer.step()
        optimizer.zero_grad()
        for buffer, before in zip(raw_model.buffers(), buffers, strict=True):
            buffer.copy_(torch.where(bad, before, buffer))
        n_bad += bad
    step += 1
    progress["step"] = step
    bar.update()

    # The one GPU sync of a step. A signal may reach one process a step before another.
    flags = torch.stack([grad_norm, n_bad, torch.full_like(n_bad, stop.number)])
    if world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    grad_norm, n_bad, stopping = flags.tolist()
    progress["skipped"] += n_bad > 0
    bad_in_a_row = bad_in_a_row + 1 if n_bad else 0
    if bad_in_a_row == max_skipped:
        found = f"non-finite gradients in {max_skipped} steps up to {step}"
        raise UserError(f"{found}; try a lower --lr")

    if step % log_interval == 0 or step == max_steps:
        values = torch.stack(rows).mean(dim=0)
        if world_size > 1:
            dist.all_reduce(values)
            values /= world_size
        if is_main:
            row = dict(zip(["loss", *metrics], values.tolist(), strict=True))
            for p in groups["log_scale"]:
                row["scale"] = p.exp().item()
            counters = {key: progress[key] for key in ("skipped", "n_split")}
            log("train", row | dict(lr=rate, grad_norm=grad_norm) | counters)
            shown = ("reward", "kl", "ess", "eta", "beta")
            bar.set_postfix({key: f"{row[key]:.4g}" for key in shown if key in row})

    evaluating = step % eval_interval == 0 or step == max_steps
    if evaluating or stopping:
        progress["seconds"] += time.perf_counter() - started
        if evaluating:
            size = batch_size // shares
            options = (beta_final, size, device, eval_examples, n_workers)
            with autocast:
                val, _ = evaluate(raw_model, data, *options)
            if is_main:
                log("val", val)
                bar.write(f"step {step:6d}  val {one_line(val)}")
                score = val["log_px"] if val["beta_elbo"] is None else val["beta_elbo"]
                if score > progress["best"]:
                    progress["best"] = score
                    save(best_path)
        if is_main:
            save(last_path)
        started = time.perf_counter()
    if stopping:
        bar.close()
        stop.exit(f"at step {step}; the same command with --resume=True continues from here")

bar.close()
del batches  # ends the processes that read images
if world_size > 1:
    dist.destroy_process_group()
stop.advice = "all steps are done; the same command with --resume=True prints the table"
if stop.number:  # in the last evaluation
    stop.exit(stop.advice)
if is_main:
    which = "best" if os.path.exists(best_path) else "last"
    report([out_dir], which, data_dir, device, n_workers=n_workers)
