"""Train a discrete autoencoder.

    python train.py                                             DAPS on glyphs, minutes on a laptop
    python train.py config/mnist_daps.py                        the paper's run on MNIST: hours
    python train.py config/mnist_daps.py config/short.py        the same in 3,000 steps, for a CPU
    python train.py config/mnist_daps.py --resume               continue after an interruption
    torchrun --nproc_per_node=2 train.py config/mnist_daps.py   two processes share every batch

Letters: N examples in a batch, K codes sampled per example, B tokens per code, V values per token,
H width.
"""

from configurator import UserError, configure, settings_block  # isort: skip (first: it makes errors one line)

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

from build import METHODS, build_model
from data import DATA_DIR, DATASETS, TRAIN_NOISE, load_dataset, on_device, share, uniform_noise
from eval import evaluate, evaluate_runs, one_line
from report import n_parameters
from run import Log, StopSignal, check_same_run, load_checkpoint, restore, save, setup_device, write
from sampler import CompiledSampler
from vocabulary import split_values, start_from_clusters

# ---------------------------------------------------------------------------------------------
# Settings: what the paper's runs on MNIST need. Config files and --key=value override them; without
# a config file, config/glyphs.py is read. --help lists them.

# what
method = "daps"  # daps, gumbel, grmck, rloo (also _na), ppo, reinmax_na, vqvae, fsq, gaussian
dataset = "mnist"  # glyphs: drawn on the fly; mnist, cifar10, lafan: downloaded; imagenet
image_size = 256  # imagenet: side of the images
# the code and the networks
n_tokens = 8  # B, tokens per code
vocab_size = 256  # V, values per token
width = 64  # H
n_layers = 1  # transformer blocks; autoregressive: over patches, and as many over tokens
mlp_ratio = 4  # hidden width of a block's MLP, as a multiple of H
aligned = False  # autoregressive: the query of token t also sees patch t, as one-pass methods do
# the estimator
n_samples = 8  # K, codes sampled per example
ess_target = 0.33  # effective sample size of the K weights, as a share of K
eta_update = "solve"  # solve: exact on every batch; gradient: the paper's step on log eta
centred = True  # daps: subtract 1 / K from the weights; False: eq. (6) as printed
credit_window = 0  # daps: side of the window of x around a token that rewards it; 0: all of x
kmeans_start = False  # values start as clusters of what the encoder sees; False: at random
split_interval = 0  # steps between turning rarely used values into copies of common ones; 0: off
beta_init = 0.5  # weight of the KL to the prior at the first step
beta_final = 0.01  # and at the last; exponential in between
# the other estimators
tau_final = 1.0  # gumbel, grmck, reinmax: temperature at the last step; exponential from 1
mc_samples = 100  # grmck: conditional Gumbels per token
ppo_epochs = 1  # ppo: updates per batch
commitment = 0.25  # vqvae: weight of the commitment term
vq_ema = True  # vqvae: code vectors by running means, k-means start, revival; False: by gradient
fsq_levels = "8 8 4"  # fsq: levels per number; their product is vocab_size
# optimisation
batch_size = 256  # N, over all processes together
lr = 3e-4  # highest learning rate of AdamW, after 50 steps of linear warm-up
lr_final = 1.0  # learning rate at the last step, as a multiple of lr; 1: constant, else a cosine
encoder_lr = 1.0  # learning rate of the encoder, as a multiple of lr
scale_lr = 0.0  # learning rate of the logits' scale (1 / temperature), as a multiple of lr; 0: off
weight_decay = 1e-4  # decoupled, on all weights
accumulate = 1  # process each batch in this many parts, one after the other
eval_examples = 0  # validation examples during training; 0: all
seed = 0  # of parameters, batches and noise
# may differ when a run is resumed: no part of the method (max_steps stretches the schedules)
max_steps = 250_000  # optimizer steps; all schedules end here
data_dir = DATA_DIR  # has a folder per data set; for imagenet, may be a folder of image folders
out_dir = ""  # checkpoints, log and pictures go here; empty: out/<dataset>_<method>
resume = False  # continue from last.pt in out_dir, if there is one
eval_interval = 1000  # steps between validations, each of which saves last.pt
log_interval = 100  # steps between lines in log.jsonl
wandb_log = False  # also log to Weights & Biases (pip install wandb)
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1
dtype = ""  # of matrix products: float32, bfloat16; empty: bfloat16 on GPUs that compute in it
use_compile = True  # torch.compile, on GPUs
cuda_graphs = True  # autoregressive, compiled: replay the sampler's steps as CUDA graphs
n_workers = 8  # imagenet, lafan: processes that read ahead, at most one per core
# ---------------------------------------------------------------------------------------------

argv = sys.argv[1:]
if not any(word.endswith(".py") for word in argv):
    argv.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "glyphs.py"))
may_be_zero = "beta_init", "beta_final", "commitment", "lr_final", "weight_decay", "n_workers"
settings, unused = configure(globals(), argv, may_be_zero)
rank, world_size = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
is_main = rank == 0  # the process that prints and writes
n_parts = world_size * accumulate  # of a batch


def must(key, holds, wanted):
    if not holds:
        raise UserError(f"{key} is {settings[key]!r}, must be {wanted}")


if unused:
    raise UserError(f"{unused[0]}: neither a config file (*.py) nor --key=value")
must("vocab_size", vocab_size >= 2, "at least 2")
must("image_size", image_size >= 8 and image_size % 2 == 0, "even and at least 8")
must("seed", seed < 2**32, "below 2**32")
must("dtype", dtype in ("", "float32", "bfloat16"), "float32 or bfloat16")
must("method", method in METHODS, f"one of: {', '.join(METHODS)}")
must("dataset", dataset in DATASETS, f"one of: {', '.join(DATASETS)}")
must("beta_init", (beta_init > 0) == (beta_final > 0), "positive if beta_final is, else zero")
must("credit_window", credit_window % 2 or credit_window == 0, "odd, or zero for whole codes")
must("lr_final", lr_final <= 1, "at most 1")
must("accumulate", accumulate == 1 or method != "ppo", "1 for ppo, which returns to its batch")
must("batch_size", batch_size % n_parts == 0, f"a multiple of processes * accumulate = {n_parts}")
must("batch_size", batch_size * n_samples > 1 or method != "ppo", "at least 2 for one sample")
must("device", world_size == 1 or ":" not in device, "cpu or cuda: one for each process")
if wandb_log:
    import wandb

# ---------------------------------------------------------------------------------------------
# Device, data and model. Under torchrun, each process takes its share of every batch.
device = setup_device(device)
on_gpu = device.startswith("cuda")
can_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
dtype = settings["dtype"] = dtype or ("bfloat16" if can_bfloat16 else "float32")
autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16")
data = load_dataset(dataset, data_dir, image_size)
torch.manual_seed(seed)
try:
    raw_model = build_model(settings, data.shape, data.scale).to(device)
except ValueError as error:
    raise UserError(error) from None
has_tokens = raw_model.discrete and raw_model.has_kl  # and a distribution over them

out_dir = settings["out_dir"] = out_dir or f"out/{dataset}_{method}"
last_path, best_path = (os.path.join(out_dir, name) for name in ("last.pt", "best.pt"))
if is_main and os.path.exists(os.path.join(out_dir, "log.jsonl")) and not resume:
    raise UserError(f"{out_dir} holds a run: --resume continues it; or name another --out_dir")
progress = {"step": 0, "best": -math.inf, "n_split": 0, "seconds": 0.0}
# best.pt is written a moment before the first last.pt, or is all that is left of a run.
resume_path = last_path if os.path.exists(last_path) else best_path
saved = load_checkpoint(resume_path) if resume and os.path.exists(resume_path) else None
if saved:
    _, may_differ = settings_block(__file__)
    check_same_run(resume_path, settings, saved["config"], may_differ, saved["step"])
    progress = {key: saved[key] for key in progress}
    for key in ("mean", "std"):  # of the data; the scale in the model becomes that of the run
        if not torch.allclose(getattr(data.scale, key).cpu(), saved["scale"][key], atol=1e-4):
            raise UserError(f"resume: the data in {data_dir} are not those the run began with")
    restore(resume_path, saved, model=raw_model)
elif kmeans_start and has_tokens:
    n = -(-32 * vocab_size // n_tokens)  # 32 tokens per value
    x = on_device(data.train_batch(seed, 0, n)[0], device)
    start_from_clusters(raw_model, x, torch.Generator().manual_seed(seed))

# Parts of the model have learning rates of their own; log_scale and log_eta have no weight decay.
parts = {"decoder": [], "encoder": [], "log_scale": [], "log_eta": []}
for name, p in raw_model.named_parameters():
    first, last = name.split(".")[0], name.split(".")[-1]
    parts[last if last in parts else "encoder" if first == "encoder" else "decoder"].append(p)
for p in parts["log_scale"]:
    p.requires_grad_(scale_lr > 0)
scheduled = [
    {"params": parts["decoder"], "multiple": 1.0},  # of the scheduled learning rate
    {"params": parts["encoder"], "multiple": encoder_lr},
    {"params": parts["log_scale"], "multiple": scale_lr, "weight_decay": 0.0},
]
eta_group = {"params": parts["log_eta"], "lr": 1e-3, "weight_decay": 0.0}
optimizer = torch.optim.AdamW([*scheduled, eta_group], lr, weight_decay=weight_decay, fused=True)
if saved:
    restore(resume_path, saved, optimizer=optimizer)
weights = [p for group in scheduled for p in group["params"]]

if world_size > 1:
    dist.init_process_group("nccl" if on_gpu else "gloo")
if use_compile and on_gpu and method not in ("gumbel", "grmck"):  # their loops would be unrolled
    raw_model.compile()
    if raw_model.encoder.autoregressive:
        raw_model.encoder.sampler = CompiledSampler(cuda_graphs=cuda_graphs)
model = raw_model
if world_size > 1:
    torch._dynamo.config.optimize_ddp = False  # it would split the graph to send gradients early
    # Buffers are equal on all ranks. torch 2.13 renames that setting, older ones know this name.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
    model = DistributedDataParallel(raw_model, broadcast_buffers=False)


def anneal(first, last, step):
    """From first to last over the run, exponentially."""
    return first if first == last else first * (last / first) ** (step / max(max_steps - 1, 1))


def learning_rate(step):
    cosine = (1 + math.cos(math.pi * step / max_steps)) / 2
    return lr * min(1.0, (step + 1) / 50) * (lr_final + (1 - lr_final) * cosine)


def log(split, values):
    """One line in log.jsonl: step, "train" or "val", and numbers that do not depend on time."""
    values = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
    log_file.add({"step": step, "split": split} | values)
    if wandb_log:
        wandb.log({f"{split}/{k}": v for k, v in values.items()}, step=step)


def checkpoint(path):
    state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), **progress}
    state |= {"scale": data.scale.state_dict(), "x_shape": list(data.shape), "config": settings}
    save(path, state)


if is_main:
    log_file = Log(os.path.join(out_dir, "log.jsonl"), progress["step"])
    write(os.path.join(out_dir, "config.json"), json.dumps(settings, indent=2) + "\n")
    if wandb_log:
        wandb.init(project="daps", name=out_dir, config=settings)
    print("settings:", *(os.path.relpath(word) if word.endswith(".py") else word for word in argv))
    found = f"{data.n_train:,} examples for training, {data.n_val:,} for validation"
    print(f"{method} on {dataset}: {found}")
    sizes = "encoder {:,}, decoder {:,} parameters".format(*n_parameters(raw_model))
    bits = n_tokens * math.log2(vocab_size)
    print(f"{n_tokens} tokens of {vocab_size} values, {bits:g} bits; {sizes}")
    shares = f", {batch_size // world_size} for each of {world_size} processes" * (world_size > 1)
    steps = f"{max_steps:,} {'steps' if max_steps > 1 else 'step'} of {batch_size}{shares}"
    print(f"{steps} on {device} in {dtype}, into {out_dir}")
    if resume:
        print("resuming" if saved else "no checkpoint yet: starting", f"at step {progress['step']}")

# ---------------------------------------------------------------------------------------------
# The loop.
stop = StopSignal()
step, stopping, started = progress["step"], 0, time.perf_counter()
part = share(batch_size, rank, world_size)  # of every batch
numbers = torch.arange(batch_size, device=device)[part]
batches = data.train_batches(seed, range(step, max_steps), batch_size, part, n_workers)
bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None if is_main else True)
while step < max_steps and not stopping:
    if split_interval and has_tokens and step % split_interval == 0 and 0 < step <= 0.8 * max_steps:
        # The last fifth of the run is left to what the copies have become.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        progress["n_split"] += split_values(raw_model, optimizer, generator)
    beta = torch.full((), anneal(beta_init, beta_final, step), device=device)
    if raw_model.tau is not None:
        raw_model.tau.fill_(anneal(1.0, tau_final, step))
    rate = learning_rate(step)
    for group in optimizer.param_groups[: len(scheduled)]:
        group["lr"] = rate * group["multiple"]
    x = on_device(next(batches)[0], device)  # (N, *shape)
    noise = uniform_noise(TRAIN_NOISE, seed, step, numbers, raw_model.noise_shape)
    for epoch in range(raw_model.n_epochs):  # PPO goes over a batch several times
        options, rows = {"epoch": epoch} if epoch > 0 else {}, []
        for x_part, noise_part in zip(x.chunk(accumulate), noise.chunk(accumulate), strict=True):
            last = len(rows) == accumulate - 1  # DDP averages the gradients after the last part
            with nullcontext() if last or world_size == 1 else model.no_sync():
                with autocast:
                    loss, metrics = model(x_part, beta, noise=noise_part, **options)
                (loss / accumulate).backward()
            rows.append(torch.stack([loss.detach(), *metrics.values()]))
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    step += 1
    progress["step"] = step
    bar.update()

    # The one GPU sync of a step. A signal may reach one process a step before another.
    flags = torch.stack([grad_norm.float(), torch.full_like(grad_norm, stop.number).float()])
    if world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    grad_norm, stopping = flags.tolist()
    if not math.isfinite(grad_norm):
        raise UserError(f"step {step}: the gradient is not finite; try a lower --lr")

    if step % log_interval == 0 or step == max_steps:
        values = torch.stack(rows).mean(dim=0)
        if world_size > 1:
            dist.all_reduce(values)
            values /= world_size
        if is_main:
            row = dict(zip(["loss", *metrics], values.tolist(), strict=True))
            row |= {"lr": rate, "grad_norm": grad_norm, "n_split": progress["n_split"]}
            if parts["log_scale"]:
                row["scale"] = parts["log_scale"][0].exp().item()
            log("train", row)
            names = [k for k in ("reward", "kl", "ess", "eta", "beta") if k in row]
            shown = "  ".join(f"{k} {row[k]:.4g}" for k in names)
            bar.set_postfix_str(shown)
            if bar.disable:  # no terminal
                print(f"step {step:6d}  {shown}", flush=True)

    evaluating = step % eval_interval == 0 or step == max_steps
    if evaluating or stopping:
        progress["seconds"] += time.perf_counter() - started
        if evaluating:
            index = data.val_index(eval_examples)
            val, _ = evaluate(raw_model, data, beta_final, index, device, n_workers=n_workers)
            score = val["beta_elbo"] if raw_model.has_kl else val["log_px"]
            if is_main:
                log("val", val)
                bar.write(f"step {step:6d}  val {one_line(val)}")
            if is_main and score > progress["best"]:
                progress["best"] = score
                checkpoint(best_path)
        if is_main:
            checkpoint(last_path)
        started = time.perf_counter()

bar.close()
stop.release()
if world_size > 1:
    dist.destroy_process_group()
if is_main and stopping:
    print(f"stopped at step {step}; the same command with --resume continues from here")
if stopping:
    sys.exit(128 + int(stopping))
if is_main:
    evaluate_runs([out_dir], data_dir=data_dir, device=device, n_workers=n_workers)
