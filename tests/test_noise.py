"""The noise of training: a hash that must look like independent uniform numbers.

Every test gives p-values, which are uniform over [0, 1] for a correct generator. There are about
200 of them, and none may be below 1e-9 or above 1 - 1e-9: a correct generator fails for one seed in
two million, and our seeds are fixed.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import data
from data import TRAIN_NOISE, VAL_NOISE, rank_slice, uniform_noise

LEAST = 1e-9
SIDE = 1024  # numbers per row and rows: 2**20 numbers
MASK = 2**32 - 1


def numbers(kind, side=SIDE):
    """(side, side) numbers whose rows differ in only one thing: kind."""
    if kind == "j":  # one row of many numbers, as gumbel_na has them
        return uniform_noise(TRAIN_NOISE, 0, 0, 1, (side, side)).squeeze(0)
    if kind == "i":
        return uniform_noise(TRAIN_NOISE, 0, 0, side, (side,))
    calls = {
        "step": lambda n: (TRAIN_NOISE, 0, n),
        "late step": lambda n: (TRAIN_NOISE, 0, 10**6 + 997 * n),
        "seed": lambda n: (TRAIN_NOISE, n, 0),
        "stream": lambda n: (n % 4, n // 4, 0),
    }
    return torch.cat([uniform_noise(*calls[kind](n), 1, (side,)) for n in range(side)])


KINDS = ("j", "i", "step", "late step", "seed", "stream")


def chi_square(counts):
    """p-value of counts that should all be equal."""
    return stats.chisquare(np.asarray(counts).ravel()).pvalue


def squares(z):
    """p-value of values that should be independent and normal."""
    z = np.asarray(z, dtype=np.float64).ravel()
    return stats.chi2.sf((z**2).sum(), z.size)


def correlations(a, b):
    """p-values of the correlation of pairs, overall and over the columns of a table."""
    a, b = ((t.double() - 0.5) * math.sqrt(12) for t in (a, b))
    product = a * b
    overall = product.sum().item() / math.sqrt(product.numel())
    return 2 * stats.norm.sf(abs(overall)), squares(product.sum(dim=0) / math.sqrt(len(product)))


def pairs(a, b):
    """p-value of pairs in a table of 16 x 16."""
    cell = (a * 16).long() * 16 + (b * 16).long()
    return chi_square(torch.bincount(cell.flatten(), minlength=256))


def battery(u):
    """p-values by name, of numbers (side, side)."""
    n, flat = u.numel(), u.flatten()
    found = {
        "256 bins": chi_square(torch.bincount((flat * 256).long(), minlength=256)),
        "lowest 8 bits": chi_square(torch.bincount((flat * 2**24).long() % 256, minlength=256)),
        "Kolmogorov-Smirnov": stats.kstest(flat.double().numpy(), "uniform").pvalue,
        "means of rows": squares((u.double().mean(dim=1) - 0.5) * math.sqrt(12 * u.size(1))),
        "means of columns": squares((u.double().mean(dim=0) - 0.5) * math.sqrt(12 * u.size(0))),
    }
    bits = ((flat * 2**24).long().unsqueeze(0) >> torch.arange(24).unsqueeze(1)) & 1  # (24, n)
    signs = bits.float().mul_(2).sub_(1)
    found["bits"] = squares(signs.sum(dim=1) / math.sqrt(n))
    products = (signs @ signs.T / math.sqrt(n))[tuple(torch.triu_indices(24, 24, 1))]
    found["pairs of bits"] = squares(products)
    for lag in (1, 2, 16):
        for name, a, b in (
            ("in a row", u[:, :-lag], u[:, lag:]),
            ("in a column", u[:-lag], u[lag:]),
        ):
            overall, by_column = correlations(a, b)
            found[f"correlation {name}, lag {lag}"] = overall
            found[f"correlation {name}, lag {lag}, by column"] = by_column
            found[f"pairs {name}, lag {lag}"] = pairs(a, b)
    return found


def suspicious(found):
    return {name: p for name, p in found.items() if not LEAST < p < 1 - LEAST}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_look_uniform_and_independent(kind):
    u = numbers(kind)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert suspicious(battery(u)) == {}


def lowbias32(h):
    """In Python's integers, which never overflow."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        h = (h ^ h >> shift) * factor & MASK
    return h


def reference(stream, seed, step, i, j):
    """Number j of example i, by another implementation."""
    k = map(int, np.random.SeedSequence([seed, stream, step]).generate_state(4, np.uint32))
    a, b = (lowbias32(lowbias32(i ^ xor) + add & MASK) for xor, add in zip(k, k, strict=True))
    return (lowbias32(lowbias32(j ^ a) + b & MASK) >> 8) / 2**24


@pytest.mark.parametrize("seed, step", ((0, 0), (1, 12_345), (2**31, 2**40)))
@pytest.mark.parametrize("stream", (TRAIN_NOISE, VAL_NOISE))
def test_numbers_are_those_of_an_implementation_in_plain_python(stream, seed, step):
    """So they are the same on every device: integers of 32 bits wrap around everywhere."""
    ours = uniform_noise(stream, seed, step, 9, (3, 11)).flatten(1)
    for i, row in enumerate(ours.tolist()):
        assert row == [reference(stream, seed, step, i, j) for j in range(33)]


def test_numbers_far_into_a_batch_and_a_row_are_those_of_plain_python():
    part = dict(rank=2**20 - 1, world_size=2**20)  # the last of many examples
    (last,) = uniform_noise(TRAIN_NOISE, 3, 4, 2**20, (2**20,), **part).tolist()
    for j in (0, 1, 2**16 - 1, 2**16, 2**20 - 1):
        assert last[j] == reference(TRAIN_NOISE, 3, 4, 2**20 - 1, j)


@pytest.mark.parametrize("shape", ((), (5,), (2, 3), (0,)))
def test_processes_have_slices_of_the_same_numbers(shape):
    whole = uniform_noise(TRAIN_NOISE, 0, 7, 12, shape)
    assert whole.shape == (12, *shape)
    for world_size in (1, 2, 3, 5, 12):
        slices = [
            uniform_noise(TRAIN_NOISE, 0, 7, 12, shape, r, world_size) for r in range(world_size)
        ]
        assert [len(s) for s in slices] == [
            len(range(12)[rank_slice(12, r, world_size)]) for r in range(world_size)
        ]
        assert torch.equal(torch.cat(slices), whole)
    assert torch.equal(uniform_noise(TRAIN_NOISE, 0, 7, 5, shape), whole[:5])  # a smaller batch


def test_every_bit_of_a_place_changes_half_of_the_bits_of_its_number():
    """Avalanche: flip one bit of i or of j and count how often each of 24 bits follows."""

    def bits(u):
        return (u * 2**24).int()

    for u in (numbers("j").flatten(), uniform_noise(TRAIN_NOISE, 0, 0, 2**20, (1,)).flatten()):
        h, place = bits(u), torch.arange(2**20)
        for flipped in range(20):
            change = h ^ h[place ^ (1 << flipped)]
            change = change[(place >> flipped) & 1 == 0]  # each pair once
            share = torch.stack([(change >> b & 1).double().mean() for b in range(24)])
            p = squares((share - 0.5) * 2 * math.sqrt(len(change)))
            assert LEAST < p < 1 - LEAST, flipped


# mistakes that the tests must catch


def one_round(h):
    h ^= (h >> 16) & 0xFFFF
    h *= 0x7FEB352D
    h ^= (h >> 15) & 0x1FFFF
    return h


def arithmetic_shifts(h):  # without the masks
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B - 2**32
    h ^= h >> 16
    return h


def no_product(h):
    h ^= (h >> 16) & 0xFFFF
    h ^= (h >> 15) & 0x1FFFF
    return h


@pytest.mark.parametrize("mistake", (one_round, arithmetic_shifts, no_product))
@pytest.mark.parametrize("kind", ("j", "i"))
def test_a_hash_with_a_mistake_is_found_out(mistake, kind, monkeypatch):
    monkeypatch.setattr(data, "mix", mistake)
    assert suspicious(battery(numbers(kind))) != {}
