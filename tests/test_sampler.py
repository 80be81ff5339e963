"""Parallel sampling (experiments/passes.py) draws the codes that sampling token by token draws."""

import sys

import pytest
import torch
from conftest import ROOT

from models import AutoregressiveEncoder, Scale, Sizes

sys.path.append(f"{ROOT}/experiments")
from passes import ParallelSampler  # noqa: E402


def encoder(aligned=False, sway=1.0):
    """A small encoder of tokens that are far from uniform; sway: how much they depend on others."""
    torch.manual_seed(0)
    scale = Scale(torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 0.5))
    encoder = AutoregressiveEncoder(Sizes((1, 12, 12), 9, 11, 16, 2), scale, aligned=aligned)
    encoder.head.log_scale.data.fill_(1.0)
    encoder.tokens.embed.weight.data.mul_(sway)
    return encoder


@pytest.mark.parametrize("aligned", (False, True))
def test_parallel_codes_are_those_drawn_token_by_token(aligned):
    found = []
    for sway in (0.0, 1.0, 100.0):
        model = encoder(aligned, sway)
        torch.manual_seed(1)
        patches, noise = model.patch_encoder(torch.rand(6, 1, 12, 12)), torch.rand(6, 4, 9)
        z, logits, n_passes = ParallelSampler()(model.tokens, model.tokens.context(patches), noise)
        assert torch.equal(z, model.sample(patches, noise)) and len(z.unique()) > 5
        assert torch.equal(logits, model.tokens.logits(model.tokens.context(patches), z))
        found.append(n_passes)
    # two where tokens do not depend on each other, and never more than tokens + 1
    assert found[0] == 2 and 2 < found[1] <= found[2] <= 10
