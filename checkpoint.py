"""A run on this machine: its folder and files, how it is stopped, the device it uses.

Every file is written under another name and moved into place: whole or not at all. A checkpoint is
a dict of tensors and plain types, read with weights_only=True, which executes nothing.
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
    """Write text or bytes to path, in a folder made if need be: whole, or not at all."""
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
    untouched = "what was there before is untouched: make room, then add --resume=True"
    raise UserError(f"{path} could not be written ({error.strerror or error}); {untouched}")


def as_bytes(save, content, *options):
    """What save(content, file, *options) would write: torch.save, or the save of a picture."""
    buffer = io.BytesIO()
    save(content, buffer, *options)
    return buffer.getvalue()


def load_checkpoint(path, needs=()):
    """The content of a checkpoint, on the CPU, which must hold what is needed of it."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # what a damaged file makes torch raise is not documented
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable checkpoint ({reason})") from None
    if not isinstance(saved, dict) or not {"config", "step", "model", *needs} <= saved.keys():
        raise UserError(f"{path} is not a checkpoint of this version")
    return saved


def restore(path, checkpoint, **parts):
    """Load the state of each part (a model, an optimizer) from its place in a checkpoint."""
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit this version: {reason}") from None


def check_same_run(out_dir, now, then, may_differ):
    """A resumed run is the same run: refuse settings that are not those it began with."""
    for key in sorted(now.keys() - may_differ):
        if then.get(key) != now[key]:
            found = f"{key} is {now[key]!r}, but the run in {out_dir} has {then.get(key, 'none')!r}"
            raise UserError(f"resume: {found}; it must stay the same")


def claim(out_dir, paths, resume, overwrite):
    """Make out_dir and lock it for the life of this process. One in which any of these paths exists
    is refused, unless to resume or to overwrite. Returns the lock, which must be kept."""
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
        os.remove(part)  # of a process that was killed
    return file


class Log:
    """log.jsonl: one JSON object per line, none of which depends on the clock."""

    def __init__(self, path, last_step):
        """Cut an old log back to last_step, from where the run continues, and go on writing."""
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
        """After a power cut, the log must reach as far as the checkpoint written next."""
        os.fsync(self.file.fileno())


def read_log(path):
    """The rows of a log, without a last line that was cut short."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


class StopSignal:
    """Ctrl-C and SIGTERM. While there is something to save (`advice` is empty) the first one is
    noted in `number` for the loop to see; else it ends the program at once, as a second one does.
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
    """Whether there is a GPU that computes in bfloat16 itself, not by way of float32."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def setup_device(device):
    """Make a device ready for use, or say in one line why it is not: "cpu", "cuda", "cuda:1".
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
    # glibc hands large buffers back to the system and asks for them again, page by page, a moment
    # later: 14 % of a CPU's step of DAPS on MNIST, 7 % on CIFAR-10. Let the process keep them.
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return device
