"""A run on this machine: its files, stop signals, and device.

Every file is written under a temporary name and moved into place: whole or not at all. A checkpoint
is a dict of tensors and plain types, read with weights_only=True, which executes no code.
"""

import ctypes
import io
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress

import torch
from torch import nn
from tqdm import tqdm

from configurator import UserError


def write(path, content):
    """Write text or bytes to path, whose folder is made if needed."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):  # it has its name, unless writing failed
            os.remove(part)


def save(path, content):
    """Write tensors and plain types to path."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getvalue())


def load_checkpoint(path, needs=("config", "model", "step")):
    """The content of a checkpoint, on the CPU; it must have all keys in `needs`."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist: train it, or name another folder") from None
    except Exception as error:  # torch does not document what damaged files raise
        raise UserError(f"{path} is not a readable checkpoint ({type(error).__name__})") from None
    if not isinstance(saved, dict) or not set(needs) <= saved.keys():
        raise UserError(f"{path} is not a checkpoint of this version")
    return saved


def restore(path, saved, **parts):
    """Load the state of each part (a model, an optimizer) from the checkpoint's key of its name."""
    try:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except KeyError:
        raise UserError(f"{path} has no {name}, so it cannot be continued") from None
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} does not fit this version: {reason}") from None


def check_same_run(path, now, then, may_differ, step):
    """A resumed run is the same run: refuse other settings, and fewer steps than it has made."""
    for key, new in now.items():
        if key not in may_differ and (old := then.get(key, "none")) != new:
            raise UserError(f"{key} is {new!r}, but {path} has {old!r}; it must not change")
    if step > now["max_steps"]:
        raise UserError(f"{path} is at step {step}, past max_steps = {now['max_steps']}")


def read_log(path):
    """The rows of a log, one JSON object per line, up to the first that is damaged."""
    rows = []
    with suppress(FileNotFoundError, ValueError), open(path, "rb") as file:
        for line in file:
            rows.append(json.loads(line))
    return rows


class Log:
    """A log to add rows to; an old one is cut after last_step, where the run continues."""

    def __init__(self, path, last_step):
        rows = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= last_step]
        write(path, "".join(rows))
        self.file = open(path, "a")  # noqa: SIM115 (open until the program ends)

    def add(self, row):
        print(json.dumps(row), file=self.file, flush=True)


class StopSignal:
    """Ctrl-C and SIGTERM set `number`, for the loop to save and leave. Schedulers and torchrun send
    them repeatedly: for twenty seconds that changes nothing, afterwards it ends the program."""

    def __init__(self):
        self.number, self.patience = 0, 0.0
        signal.signal(signal.SIGINT, self.catch)
        signal.signal(signal.SIGTERM, self.catch)

    def catch(self, number, frame):
        if not self.number:
            self.number, self.patience = number, time.monotonic() + 20
        elif time.monotonic() > self.patience:
            sys.exit(128 + number)

    def release(self):
        """From now on, a signal ends the program."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def fit(path, net, settings, loss_at, validate, form, **saved):
    """Train a prior or policy to max_steps, from the checkpoint at path if there is one. loss_at(
    step) has a gradient, validate() is a number for the text `form`; a log of both is beside it."""
    step, max_steps = 0, settings["max_steps"]
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    if os.path.exists(path):
        step = (found := load_checkpoint(path))["step"]
        if step < max_steps and "optimizer" not in found:
            raise UserError(f"{path} comes without its optimizer; delete it to train another")
        restore(path, found, model=net, **({"optimizer": optimizer} if step < max_steps else {}))
    log, stop = Log(os.path.splitext(path)[0] + ".jsonl", step), StopSignal()
    bar = tqdm(total=max_steps, initial=step, smoothing=0.05, disable=None)
    while step < max_steps and not stop.number:
        rate = min(1.0, (step + 1) / 100) * (1 + math.cos(math.pi * step / max_steps)) / 2
        optimizer.param_groups[0]["lr"] = settings["lr"] * rate
        loss = loss_at(step)
        loss.backward()
        if not nn.utils.clip_grad_norm_(net.parameters(), 1.0).isfinite():
            raise UserError(f"step {step + 1}: the gradient is not finite; try a lower --lr")
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update()
        if step % 50 == 0:
            log.add({"step": step, "split": "train", "loss": loss.item()})
        evaluating = step % settings["eval_interval"] == 0 or step == max_steps
        if evaluating:
            log.add({"step": step, "split": "val", "loss": (value := validate())})
            bar.write(f"step {step:6d}  val {form.format(value)}")
        if evaluating or stop.number:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, state | dict(step=step, config=settings, **saved))
    bar.close()
    stop.release()
    if stop.number:
        print(f"stopped at step {step}; the same command continues from here")
        sys.exit(128 + stop.number)


def setup_device(device):
    """Prepare "cpu", "cuda" or "cuda:1" for use; returns its name, for a GPU with an index."""
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # one for each process of torchrun
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device is {device!r}, which cannot be used here ({reason})") from None
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
        torch.backends.cudnn.benchmark = True  # batches keep their shapes: time its algorithms once
    torch.set_flush_denormal(True)  # CPUs are slow with the tiny numbers of a confident softmax
    # glibc would return large buffers and request them again: 14 % of a CPU step of DAPS on MNIST.
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    return device
