"""Our numbers in the tables of README.md and docs/results.md are those on record in docs/runs."""

import glob
import os
import re

import pytest
from conftest import ROOT

from report import group_by_seed, read_record, summary

COLUMNS = {  # of a table: key in a record, how it is printed
    "n": ("n", "{}"),
    "beta-ELBO": ("beta_elbo", "{:.2f}"),
    "log p(x|z)": ("log_px", "{:.2f}"),
    "KL": ("kl", "{:.2f}"),
    "PSNR": ("psnr", "{:.2f}"),
    "cm": ("cm", "{:.2f}"),
    "degrees": ("degrees", "{:.2f}"),
    "values used": ("code_usage", "{:.0%}"),
    "perplexity": ("perplexity", "{:.0f}"),
    "decodings": ("search", "{}"),
    "searched log p(x|z)": ("search_log_px", "{:.2f}"),
    "searched PSNR": ("search_psnr", "{:.2f}"),
    "searched cm": ("search_cm", "{:.2f}"),
    "searched degrees": ("search_degrees", "{:.2f}"),
}
PAIR = r"(?:-|-?\d+\.\d\d) / \d\d\.\d\d"  # beta-ELBO, or log p(x|z), and PSNR
PAGES = ("README.md", "docs/results.md")
PAPER = {"MNIST", "CIFAR-10", "ImageNet", "LAFAN1"}  # columns of the table of the paper's numbers
# Means over seeds, one of which was run before runs were recorded.
BEFORE_RECORDS = {
    "-45.96 +- 0.45",
    "-45.96 / 18.27",
    "-56.51 +- 1.02",
    "-56.58 +- 0.62",
    "-59.80 +- 1.04",
    "-59.68 +- 0.53",
    "-98.03 +- 8.13",
}


def records():
    """The rows that eval.py prints for all of docs/runs: of groups of seeds, and of every run."""
    runs = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "runs", "*.jsonl"))):
        runs |= {run["row"]["run"]: run for run in read_record(path)}  # some are in two of them
    groups = [*group_by_seed(runs.values()), *([run] for run in runs.values())]
    return [summary([run["row"] for run in group]) for group in groups]


def tables(page):
    """The tables of a page without bold type: lists of rows, the header first."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        text = file.read().replace("**", "").replace(r"p(x\|z)", "p(x/z)")
    for table in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
        lines = [line.strip()[1:-1].split("|") for line in table.splitlines()]
        rows = [[cell.strip().replace("p(x/z)", "p(x|z)") for cell in line] for line in lines]
        yield rows[:1] + rows[2:]


def fits(cells, record):
    """Whether the cells {column: text} are numbers of this record, with or without +-."""
    for column, text in cells.items():
        key, form = COLUMNS[column]
        value, spread = ({"n": 1} | record).get(key), record.get(f"{key} std")
        mean = "-" if value is None else form.format(value)
        if text != mean and (spread is None or text != f"{mean} +- {form.format(spread)}"):
            return False
    return True


def test_rows_with_a_column_per_metric_are_on_record():
    """All numbers of a row belong to the same run, or group of seeds."""
    known, checked = records(), 0
    for header, *rows in tables("docs/results.md"):
        for row in rows if "PSNR" in header else []:
            cells = {key: text for key, text in zip(header, row, strict=True) if key in COLUMNS}
            recorded = any(fits(cells, record) for record in known)
            assert recorded != (not BEFORE_RECORDS.isdisjoint(cells.values())), row
            checked += recorded
    assert checked > 30


def test_only_numbers_that_are_shown_are_excused():
    cells = {cell for page in PAGES for table in tables(page) for row in table for cell in row}
    for number in BEFORE_RECORDS:
        assert any(cell.startswith(number) for cell in cells), number


@pytest.mark.parametrize("page", PAGES)
def test_cells_with_beta_elbo_and_psnr_are_on_record(page):
    known = set()
    for record in records():
        for key in ("beta_elbo", "log_px"):
            first = "-" if record[key] is None else f"{record[key]:.2f}"
            known.add(f"{first} / {record['psnr']:.2f}")
    checked = 0
    for header, *rows in tables(page):
        for row in rows:
            for column, cell in zip(header, row, strict=True):
                theirs = "paper" in f"{row[0]} {column}" or set(header) >= PAPER
                for pair in re.findall(PAIR, cell) if not theirs else []:
                    assert (pair in known) != (pair in BEFORE_RECORDS), (row[0], pair)
                    checked += 1
    assert checked >= 4
