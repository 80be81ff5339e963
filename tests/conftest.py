"""What several test files use: the scripts, run as a user runs them."""

import os
import subprocess
import sys

import pytest
import torch

from models import OnePassEncoder, token_log_prob

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ("--batch_size=16", "--n_samples=4", "--vocab_size=32", "--width=32", "--max_steps=12")
TINY += ("--eval_interval=4", "--log_interval=1", "--warmup_steps=2")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

torch.set_num_threads(1)


def log_prob_of_all(encoder, x, codes):
    """log q(z|x) of one x (1, ...) for every row of codes (M, B): (M,), with gradient."""
    patches = encoder.patch_encoder(x)
    if isinstance(encoder, OnePassEncoder):
        logits = encoder.head(patches).unsqueeze(1).expand(-1, len(codes), -1, -1)
    else:
        logits = encoder.logits(patches, codes.unsqueeze(0))
    return token_log_prob(logits, codes.unsqueeze(0)).sum(dim=-1)[0]


def environment(**extra):
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def run(*command, cwd=ROOT, timeout=300, **extra):
    """Run python with these arguments; the finished process with its output as text."""
    command = [sys.executable, *map(str, command)]
    env = environment(**extra)
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True
    )


def start(*command):
    command = [sys.executable, *map(str, command)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=pipe, stderr=pipe
    )


def succeed(*command, **extra):
    done = run(*command, **extra)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The out_dir of a tiny run that was never interrupted."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    succeed("train.py", *TINY, f"--out_dir={out_dir}")
    return out_dir
