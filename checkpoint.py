"""A run on this machine: its folder and files, stop signals, and device.

Every file is written under a temporary name and moved into place: whole or not at all. A checkpoint
is a dict of tensors and plain types, read with weights_only=True, which executes no code.
"""

import ctypes
import glob
import io
import json
import os
import secrets
import signal
import sys

import torch

from configurator import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def write(path, content):
    """Write text or bytes to path, whole or not at all; makes the folder if needed."""
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        cannot_write(path, error)
    finally:  # also when a signal ends the program here
        if os.path.exists(part):
            os.remove(part)


def cannot_write(path, error):
    untouched = "what was there before is untouched: make room; a run continues with --resume=True"
    raise UserError(f"{path} could not be written ({error.strerror or error}); {untouched}")


def as_bytes(save, content, *options):
    """The bytes that save(content, file, *options) writes; save: torch.save, or a picture's."""
    buffer = io.BytesIO()
    save(content, buffer, *options)
    return buffer.getvalue()


def load_checkpoint(path, needs=()):
    """The content of a checkpoint, on the CPU; it must have all keys in `needs`."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # torch does not document what damaged files raise
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable checkpoint ({reason})") from None
    if not isinstance(saved, dict) or not {"config", "step", "model", *needs} <= saved.keys():
        raise UserError(f"{path} is not a checkpoint of this version")
    return saved


def restore(path, checkpoint, **parts):
    """Load the state of each part (a model, an optimizer) from the checkpoint's key of its name."""
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit this version: {reason}") from None


def check_same_run(out_dir, now, then, may_differ, step=0):
    """A resumed run is the same run: refuse settings that differ from those it started with, and
    fewer steps than it has made."""
    for key in sorted(now.keys() - may_differ):
        if then.get(key) != now[key]:
            found = f"{key} is {now[key]!r}, but the run in {out_dir} has {then.get(key, 'none')!r}"
            raise UserError(f"resume: {found}; it must stay the same")
    if step > (last := now.get("max_steps", step)):
        raise UserError(f"resume: {out_dir} is at step {step}, past max_steps = {last}")


def claim(out_dir, paths, resume, overwrite):
    """Make out_dir and lock it for the life of this process. If any of these paths exists in it, it
    is refused unless resuming or overwriting. Returns the lock, which must be kept."""
    if not (resume or overwrite) and any(map(os.path.exists, paths)):
        raise UserError(f"out_dir {out_dir} holds a run: add --resume=True or --overwrite=True")
    try:
        os.makedirs(out_dir, exist_ok=True)
        file = open(os.path.join(out_dir, ".lock"), "a")  # noqa: SIM115 (a kill releases it)
    except OSError as error:
        raise UserError(f"out_dir {out_dir} cannot be written ({error.strerror})") from None
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"out_dir {out_dir} is in use: another process trains there") from None
    except OSError:
        pass  # a file system without locks
    for part in glob.glob(os.path.join(glob.escape(out_dir), "*.part")):
        os.remove(part)  # left by a killed process
    return file


class Log:
    """log.jsonl: one JSON object per line; nothing in it depends on the clock."""

    def __init__(self, path, last_step):
        """Truncate an old log to last_step, where the run continues, and append to it."""
        self.path = path
        rows = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= last_step]
        write(path, "".join(rows))
        self.file = open(path, "a")  # noqa: SIM115 (open until the program ends)

    def add(self, row):
        try:  # a line cut short by a full disk is left out when the run is resumed
            print(json.dumps(row), file=self.file, flush=True)
        except OSError as error:
            cannot_write(self.path, error)

    def sync(self):
        """Flush to disk, so that after a power cut the log is not behind the next checkpoint."""
        os.fsync(self.file.fileno())


def read_log(path):
    """The rows of a log, without a truncated last line."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


class StopSignal:
    """Ctrl-C and SIGTERM. While there is something to save (`advice` is empty), the first one is
    stored in `number` for the loop to check; otherwise it ends the program at once, like a second.
    """

    def __init__(self):
        self.number, self.advice = 0, "the same command starts again"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.catch)

    def catch(self, number, frame):
        self.number = number
        signal.signal(number, signal.SIG_DFL)
        if self.advice:
            self.exit(self.advice)

    def exit(self, advice):
        if os.environ.get("RANK", "0") == "0":
            print(f"stopped; {advice}", flush=True)
        sys.exit(128 + (self.number or signal.SIGTERM))


def has_bfloat16():
    """Whether there is a GPU with native bfloat16, not emulated in float32."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def setup_device(device):
    """Set up a device, "cpu", "cuda" or "cuda:1", or say in one line why it cannot be used.
    Returns its name; that of a GPU has an index.
    """
    wanted = device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # one for each process of torchrun
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device is {wanted!r}, which cannot be used here ({reason})") from None
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    # Softmax of a confident encoder yields numbers below 1e-38, with which CPUs compute many times
    # more slowly than with zero.
    torch.set_flush_denormal(True)
    # glibc returns large buffers to the system and soon requests them again, page by page: 14 % of
    # a CPU step of DAPS on MNIST, 7 % on CIFAR-10. Let the process keep them.
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return device
