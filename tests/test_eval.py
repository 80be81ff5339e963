"""eval.py: metrics with known answers, pictures, tables, and models from checkpoints."""

import glob
import json
import math
import os

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, run, succeed
from PIL import Image

from configurator import read_config
from data import Dataset, load_dataset
from eval import (
    COLOURS,
    METHODS,
    build_model,
    draw_curves,
    evaluate,
    load,
    load_checkpoint,
    log_ticks,
    n_parameters,
    ticks,
)

X_SHAPE = (1, 28, 28)


class Known(torch.nn.Module):
    """B = 2, V = 4: token 1 is always 3, token 2 tells if x is bright; pixels are 0.9 or 0.1."""

    class encoder:  # noqa: N801
        n_tokens, vocab_size = 2, 4

    def encode(self, x, noise):
        bright = x.mean(dim=(1, 2, 3)) > 0.5
        return torch.stack([torch.full_like(bright, 3, dtype=torch.long), bright.long()], dim=1)

    def decode(self, z):
        p = torch.where(z[:, 1] == 1, 0.9, 0.1).view(-1, 1, 1, 1).expand(-1, *X_SHAPE)
        return torch.distributions.Independent(torch.distributions.Bernoulli(p), 3)

    def kl(self, x, z):
        return torch.full((len(x),), 1.5)


def test_metrics_have_their_known_values():
    x = torch.cat([torch.ones(6, *X_SHAPE), torch.zeros(2, *X_SHAPE)]).byte()
    data = Dataset("known", x, x[:, 0, 0, 0], x, x[:, 0, 0, 0])
    for batch_size in (3, 8):
        metrics, counts = evaluate(Known(), data, 0.1, batch_size, "cpu")
        assert metrics["log_px"] == pytest.approx(784 * math.log(0.9), rel=1e-5)
        assert metrics["kl"] == pytest.approx(1.5)
        assert metrics["beta_elbo"] == pytest.approx(784 * math.log(0.9) - 0.15, rel=1e-5)
        assert metrics["psnr"] == pytest.approx(20, abs=1e-4)  # mse 0.01
        assert metrics["code_usage"] == pytest.approx((1 / 4 + 2 / 4) / 2)
        entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        assert metrics["perplexity"] == pytest.approx((1 + math.exp(entropy)) / 2)
        assert counts.tolist() == [[0, 0, 0, 8], [2, 6, 0, 0]]


def test_the_reported_elbo_matches_a_slow_computation_by_hand(finished_run):
    """log p(x|z) pixel by pixel, and the KL as the mean of log q - log p over many codes."""
    model = load(finished_run)
    x = load_dataset("glyphs").x_val[:2].float()
    torch.manual_seed(0)
    z = model.encode(x)
    p = model.decode(z).mean
    by_hand = (x * p.log() + (1 - x) * (1 - p).log()).sum(dim=(1, 2, 3))
    torch.testing.assert_close(model.decode(z).log_prob(x), by_hand, rtol=1e-3, atol=1e-2)
    with torch.no_grad():
        codes, log_q = model.encoder(x, 4000)
        sampled = (log_q + 8 * math.log(32)).mean(dim=1)
        exact = torch.stack([model.kl(x, codes[:, k]) for k in range(64)]).mean(dim=0)
    torch.testing.assert_close(sampled, exact, rtol=0.05, atol=0.05)


def test_eval_json_agrees_with_the_log_of_the_best_step(finished_run):
    report = json.loads((finished_run / "eval.json").read_text())
    rows = map(json.loads, (finished_run / "log.jsonl").read_text().splitlines())
    best = max((row for row in rows if row["split"] == "val"), key=lambda row: row["beta_elbo"])
    assert report["steps"] == best["step"]
    for key in ("beta_elbo", "log_px", "kl", "psnr", "code_usage", "perplexity"):
        assert report[key] == pytest.approx(best[key], rel=1e-5)
    assert report["bits"] == 40


def test_a_loaded_model_encodes_decodes_and_samples(finished_run):
    model = load(finished_run)
    x = torch.rand(3, *X_SHAPE).round()
    z = model.encode(x)
    assert z.shape == (3, 8) and z.dtype == torch.int64
    assert model.decode(z).mean.shape == (3, *X_SHAPE)
    assert model.decode(z).log_prob(x).shape == (3,)
    assert model.sample(5).mean.shape == (5, *X_SHAPE)
    assert model.config["step"] in (4, 8, 12)


def test_pictures_show_what_they_should(finished_run):
    x = load_dataset("glyphs").x_val
    picture = Image.open(finished_run / "reconstructions.png")
    corner = torch.from_numpy(np.array(picture.crop((4, 4, 60, 60))))  # (56, 56)
    assert torch.equal(corner[::2, ::2] // 255, x[0, 0])  # the first input, twice as large
    for name in ("samples.png", "codes.png", "curves.png"):
        colours = Image.open(finished_run / name).convert("L").getextrema()
        assert colours[1] - colours[0] > 100  # not blank


def test_several_runs_make_one_table_and_one_plot(finished_run, tmp_path):
    other = tmp_path / "one_pass"
    succeed("train.py", *TINY, "--method=daps_na", f"--out_dir={other}")
    curves = tmp_path / "both.png"
    output = succeed("eval.py", finished_run, other, f"--curves={curves}")
    header, first, second = output.splitlines()[:3]
    assert "beta-ELBO" in header and str(finished_run) in first and "daps_na" in second
    assert Image.open(curves).size[0] > 1000


def test_a_loaded_model_gives_arrays_without_further_ado(finished_run):
    assert load(finished_run).sample(2).mean.numpy().shape == (2, *X_SHAPE)


def test_the_same_checkpoint_gives_the_same_numbers_twice(finished_run):
    before = (finished_run / "eval.json").read_text()
    succeed("eval.py", finished_run, "--batch_size=500")
    assert (finished_run / "eval.json").read_text() == before


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((), "name at least one run"),
        (("nowhere",), "nowhere/best.pt does not exist"),
        (("nowhere", "--checkpoints=last"), "did you mean checkpoint"),
        (("nowhere", "--device=cuba"), "cuba"),
        (("nowhere", "--batch_size=0"), "batch_size"),
        (("RUN", "RUN", "--curves=/dev/null/x.png"), "/dev/null"),
        (("RUN", "--data_dir=nowhere", "--checkpoint=worst"), "worst.pt does not exist"),
    ],
)
def test_a_bad_call_is_refused_in_one_line(arguments, match, finished_run):
    done = run("eval.py", *(finished_run if word == "RUN" else word for word in arguments))
    assert done.returncode == 2 and match in done.stderr and done.stderr.count("\n") == 1


def test_a_checkpoint_with_code_inside_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({"model": Bomb()}, tmp_path / "best.pt")
    with pytest.raises(ValueError, match="best.pt is not a readable checkpoint"):
        load(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_foreign_checkpoint_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "best.pt")
    with pytest.raises(ValueError, match="not a checkpoint of train.py"):
        load_checkpoint(tmp_path / "best.pt")


def test_build_model_follows_the_settings(finished_run):
    config = load(finished_run).config
    assert type(build_model(config, X_SHAPE).encoder).__name__ == "AutoregressiveEncoder"
    config = config | {"method": "daps_na", "n_samples": 3}
    model = build_model(config, X_SHAPE)
    assert type(model.encoder).__name__ == "OnePassEncoder" and model.n_samples == 3


@pytest.mark.parametrize(
    "dataset, shape, bits",
    [("mnist", X_SHAPE, 64), ("cifar10", (3, 32, 32), 576), ("imagenet", (3, 256, 256), 10_240)],
)
def test_the_models_of_all_methods_are_of_one_size(finished_run, dataset, shape, bits):
    """All have the same bits and, but for the paper's own one-pass models on ImageNet (9 % larger),
    totals of parameters within 5 % of DAPS."""
    defaults, totals = load(finished_run).config, {}
    for path in glob.glob(os.path.join(ROOT, "config", f"{dataset}_*.py")):
        config = defaults | {key: value for key, value, _ in read_config(path)}
        if os.path.basename(path) == f"{dataset}_{config['method']}.py":
            assert config["n_tokens"] * math.log2(config["vocab_size"]) == bits
            totals[config["method"]] = sum(n_parameters(build_model(config, shape)))
    assert len(totals) == {"mnist": len(METHODS), "cifar10": 9, "imagenet": 7}[dataset]
    for method, total in totals.items():
        paper_s_own = dataset == "imagenet" and method.endswith("_na")
        assert total == pytest.approx(totals["daps"], rel=0.09 if paper_s_own else 0.05), method


def test_curves_of_a_method_without_a_kl_show_its_likelihood(tmp_path):
    rows = [{"step": i, "split": "val", "beta_elbo": None, "kl": None} for i in (1, 2)]
    lines = [json.dumps(row | {"log_px": -row["step"], "psnr": row["step"]}) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    panel = draw_curves([tmp_path]).crop((0, 0, 420, 300))
    assert COLOURS[0] in {colour for _, colour in panel.getcolors(10_000)}


def test_ticks_are_round_numbers_inside_the_range():
    assert ticks(0, 1000, 4) == [0, 200, 400, 600, 800, 1000]
    assert ticks(-110, -75) == [-110, -100, -90, -80]
    assert all(0.31 <= t <= 0.36 for t in ticks(0.31, 0.36))
    assert [round(10**t, 6) for t in log_ticks(0.1, 1.1)] == [2, 5, 10]
    assert [round(10**t, 6) for t in log_ticks(-3.5, 1.5)] == [0.001, 0.01, 0.1, 1, 10]
