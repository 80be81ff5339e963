"""policy.py: centre of mass against MuJoCo, conditions, joins, rollouts, and as a user runs it."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_one_line, config, motion_frames, run_here, train_here, write_lafan
from PIL import Image
from test_motion import ROBOT, needs_robot

import data
import motion
import policy as script
from build import build_model
from motion import FRAMES
from policy import BLEND, centre_of_mass, describe_window, joined, poses_and_path, seen_from, start
from run import load_checkpoint, save

FEW = ("--max_steps=4", "--eval_interval=2", "--batch_size=4", "--width=16", "--n_layers=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A motion run that has learned nothing, on made-up files, and a tiny policy for it."""
    folder = tmp_path_factory.mktemp("policy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "LAFAN_FILES", write_lafan(folder, n=100))
        found, size = data.lafan(str(folder)), dict(vocab_size=16, width=16, n_layers=1)
        settings = config("lafan_daps_na", **size, data_dir=str(folder))
        model = build_model(settings, found.shape, found.scale).state_dict()
        state = dict(config=settings, model=model, x_shape=found.shape, step=1, seconds=1.0)
        save(str(folder / "run" / "best.pt"), state)
        assert "history, path, words" in train_here(folder / "run", *FEW, script="policy.py")
        yield folder / "run"


@pytest.fixture
def policy(run):
    return script.load_policy(run)


@needs_robot
def test_the_centre_of_mass_is_mujoco_s():
    mujoco = pytest.importorskip("mujoco", reason="mujoco is not installed")
    model = mujoco.MjModel.from_xml_path(ROBOT)
    state, frames = mujoco.MjData(model), torch.from_numpy(motion_frames(60))
    for frame, ours in zip(frames, centre_of_mass(frames), strict=True):
        state.qpos[:] = frame[[0, 1, 2, 6, 3, 4, 5, *range(7, 26)]]
        mujoco.mj_fwdPosition(model, state)
        np.testing.assert_allclose(ours, state.subtree_com[0], atol=1e-6)


def test_conditions_are_those_around_now_and_the_code_is_that_of_what_begins_there(policy):
    clips, seen = script.Windows(motion.LAFAN_VAL, 1, policy.autoencoder.config["data_dir"]), []
    model = SimpleNamespace(encode=lambda x, noise: seen.append(x) or torch.zeros(1, 64))
    index, frames = torch.tensor([37]), clips.clips[100:164]  # the first window of the second file
    _, (rows, *_) = clips.examples(model, policy, index, torch.rand(1, 1, 64))
    poses, path = poses_and_path(rows)
    torch.testing.assert_close(seen[0][0], frames[31:63].float())
    torch.testing.assert_close(poses[0, :, 9:], frames[:32, 7:].float())
    assert poses[0, -1, :2].abs().max() == 0 and poses[0, -1, 3] > 0.99  # at the origin, x ahead
    steps = centre_of_mass(frames)[:, :2].diff(dim=0).norm(dim=1)
    torch.testing.assert_close(path[0].diff(dim=0).norm(dim=1), steps.float())


def test_the_future_is_seen_only_through_the_path(policy):
    window, z = torch.from_numpy(motion_frames(64)).unsqueeze(0), torch.zeros(1, 1, 64).long()
    changed = window.clone()
    changed[:, 37:, 7:] += 0.3  # bent joints, from the sixth frame after now
    rows, other = describe_window(window), describe_window(changed)
    (poses, path), (same_poses, other_path) = poses_and_path(rows), poses_and_path(other)
    moved = (path != other_path).any(dim=2)[0]
    assert torch.equal(poses, same_poses) and not moved[:37].any() and moved[37:].all()
    for given, equal in (((1, 0, 1), True), ((0, 1, 0), False)):
        rest = policy.text_vectors(["walk"]), torch.tensor([given]).bool()
        memory = (policy.patch_encoder((part, *rest)) for part in (rows, other))
        assert torch.equal(*(policy.score(part, z)[0] for part in memory)) == equal


def test_cached_sampling_equals_teacher_forcing_and_guidance_mixes_two_policies(policy):
    seen = describe_window(torch.from_numpy(np.stack([motion_frames(64, i) for i in range(4)])))
    x = seen, policy.text_vectors(["walk", "run", "", "dance"]), torch.rand(4, 3) < 0.7
    memory, noise, steps = policy.patch_encoder(x), torch.rand(4, 1, 64), []
    z = policy.sample(memory, noise, lambda *a: steps.append(a[0]) or script.draw(*a))
    log_p = torch.stack(steps, dim=2).log_softmax(dim=-1).gather(-1, z.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_p, policy.score(memory, z)[0])
    nothing = *x[:2], torch.zeros_like(x[2])
    free = policy.act(nothing, noise)
    assert torch.equal(policy.act(x, noise), z) and not torch.equal(z, free)
    assert torch.equal(policy.act(x, noise, guidance=0.0), free)
    any_code = torch.zeros(4, 1, 64).long()
    with_x, without = (  # logits of the first token
        policy.tokens.logits(policy.tokens.context(policy.patch_encoder(given)), any_code)[:, :, 0]
        for given in (x, nothing)
    )
    expected = script.draw(3 * with_x - 2 * without, noise[..., :1])
    assert torch.equal(policy.act(x, noise, guidance=3.0)[..., :1], expected)
    assert not torch.equal(expected, z[..., :1])


def test_each_condition_is_hidden_in_a_tenth_of_examples_and_any_subset_equally_often():
    hidden = script.hidden(torch.arange(10_000) / 10_000, 0.1).long()
    counts = (hidden @ torch.tensor([1, 2, 4])).bincount()
    assert counts.tolist() == pytest.approx([8250] + [250] * 7, abs=1)


def test_a_segment_continues_the_last_frame_and_soon_is_itself():
    true = torch.from_numpy(motion_frames(FRAMES)).unsqueeze(0)
    last, off = true[:, :1], 0.2 * (torch.arange(26) > 6)  # joints are 0.2 radians off
    ours, jump = joined(last, seen_from(*motion.ground_frame(last), true) + off)
    assert jump[0, 1].item() == pytest.approx(np.degrees(0.2))
    torch.testing.assert_close(ours[:, :1], last)
    torch.testing.assert_close(ours[:, BLEND:, 7:], true[:, BLEND:, 7:] + 0.2)
    added = (ours - true).diff(dim=1)[..., 7:].abs()  # by joining, to what changes in a frame
    assert added[:, 0].max() < 0.2 / 20 and added.max() < 0.2 / 5


def test_with_perfect_codes_a_rollout_is_the_motion_itself_and_sees_what_training_saw(policy):
    frames, seen = torch.from_numpy(motion_frames(32 + 62 + 32)).unsqueeze(0), []
    true = seen_from(*start(frames[:, :FRAMES]), frames)[:, FRAMES : FRAMES + 62]
    way = centre_of_mass(true)[..., :2]
    policy.act = lambda x, noise, guidance: seen.append(x) or noise
    segments = (frames[:, 31 * i : 31 * i + FRAMES] for i in (1, 2))
    policy.autoencoder.decode = lambda z: SimpleNamespace(mean=next(segments))
    ours, jumps = policy.rollout(frames[:, :FRAMES], "walk", way, n_draws=1)
    torch.testing.assert_close(ours, true)
    assert jumps.max() < 1e-6 and script.path_error(ours, way).max() < 1e-6
    for i, (rows, *_) in enumerate(seen):  # the path ends after 62 frames
        poses, path = poses_and_path(rows)
        expected = poses_and_path(describe_window(frames[:, 31 * i : 31 * i + 64]))
        torch.testing.assert_close(poses, expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(path[:, :63], expected[1][:, :63], atol=1e-5, rtol=0)
    beyond = 2 * path[:, 62] - path[:, 61]  # and goes on as it was going
    torch.testing.assert_close(path[:, 63], beyond, atol=1e-5, rtol=0)


def test_an_error_of_the_path_fades_in_the_path_that_is_commanded(policy):
    frames, seen = torch.from_numpy(motion_frames(32 + 62 + 32)).unsqueeze(0), []
    true = seen_from(*start(frames[:, :FRAMES]), frames)[:, FRAMES : FRAMES + 62]
    way = centre_of_mass(true)[..., :2]
    astray = frames[:, 31 : 31 + FRAMES].clone()
    astray[..., 0] += torch.linspace(0, 0.5, FRAMES)  # half a metre, in the world
    segments = iter([astray, frames[:, 62 : 62 + FRAMES]])
    policy.act = lambda x, noise, guidance: seen.append(x) or noise
    policy.autoencoder.decode = lambda z: SimpleNamespace(mean=next(segments))
    policy.rollout(frames[:, :FRAMES], "walk", way, n_draws=1)
    _, path = poses_and_path(seen[1][0])  # from where it is to where it should be
    _, wanted = poses_and_path(describe_window(frames[:, 31 : 31 + 64]))
    left = (path - path[:, 31:32] - (wanted - wanted[:, 31:32])).norm(dim=2)[0, 32:63]
    expected = 0.5 * torch.arange(1, 32) / 32
    torch.testing.assert_close(left, expected, atol=1e-3, rtol=0)


def test_of_several_draws_the_one_is_kept_that_continues_and_follows_the_path(policy):
    frames = torch.from_numpy(motion_frames(FRAMES + 31)).unsqueeze(0)
    true = seen_from(*start(frames[:, :FRAMES]), frames)[:, FRAMES:]
    way, segment = centre_of_mass(true)[..., :2], frames[:, FRAMES - 1 :]
    bent = segment + 0.4 * (torch.arange(26) > 6)  # joints that do not continue the last frame
    away = segment.clone()
    away[..., 0] += torch.linspace(0, 2, FRAMES)  # which the path does not ask for
    draws = torch.cat([bent, away, segment, away, segment, bent, away, bent])  # of two histories
    policy.act = lambda x, noise, guidance: noise
    policy.autoencoder.decode = lambda z: SimpleNamespace(mean=draws)
    history = frames[:, :FRAMES].expand(2, -1, -1)
    ours, _ = policy.rollout(history, "walk", way[0], n_draws=4)  # with one path for both
    torch.testing.assert_close(ours, true.expand(2, -1, -1))


def test_the_guess_is_a_ridge_regression_for_each_way_to_hide_history_and_path(policy):
    windows = torch.from_numpy(np.stack([motion_frames(64, i) for i in range(40)]))
    scale, net = policy.autoencoder.decoder.scale, policy.patch_encoder
    policy.prepare(windows, scale, torch.randn(16, 16))
    rows = (describe_window(windows) - net.mean) / net.std
    torch.testing.assert_close(rows.flatten(0, 1).mean(dim=0), torch.zeros(32), atol=1e-4, rtol=0)
    poses, path = poses_and_path(rows)
    past = poses[:, [31, 30, 28, 24, 16]].flatten(1), path[:, 3::4].flatten(1)
    y = scale(windows[:, 31:63].float()).flatten(1).double()
    for given in ((0, 0), (1, 0), (0, 1), (1, 1)):
        parts = [part.double() for part, seen in zip(past, given, strict=True) if seen]
        x = torch.cat([*parts, torch.ones(40, 1).double()], dim=1)
        weights = torch.linalg.solve(x.T @ x + 100 * torch.eye(x.size(1)).double(), x.T @ y)
        given = torch.tensor([[*given, 0]]).bool().expand(40, 3)
        ours = net.guess(script.summary(rows, given))
        torch.testing.assert_close(ours.double(), x @ weights, atol=1e-4, rtol=1e-4)


def test_a_rollout_is_exact_under_a_seed_and_depends_on_the_command(policy):
    history, way = motion_frames(FRAMES), torch.zeros(40, 2)
    frames, jumps = policy.rollout(history, "walk", way, n_draws=2)
    again, _ = policy.rollout(history, "walk", way, n_draws=2)
    assert jumps.shape == (2, 2) and torch.equal(again, frames)
    for words, path, seed in (("walk", way, 1), ("dance", way, 0), ("walk", None, 0)):
        other, _ = policy.rollout(history, words, path, 40, n_draws=2, seed=seed)
        assert not torch.equal(other, frames)


def test_a_stopped_and_resumed_training_equals_an_uninterrupted_one(run, tmp_path, monkeypatch):
    (tmp_path / "best.pt").write_bytes((run / "best.pt").read_bytes())
    indices, stop = data.train_indices, lambda: signal.raise_signal(signal.SIGTERM)
    patch = dict(name="train_indices", value=lambda *a: (a[2] == 2 and stop()) or indices(*a))
    monkeypatch.setattr(data, **patch)
    done = run_here("policy.py", tmp_path, *FEW)
    assert done.code == 128 + signal.SIGTERM and "stopped at step 3; the same" in done.output
    monkeypatch.setattr(data, "train_indices", indices)
    train_here(tmp_path, *FEW, script="policy.py")
    ours, theirs = (load_checkpoint(str(folder / "policy.pt")) for folder in (tmp_path, run))
    assert all(torch.equal(ours["model"][key], value) for key, value in theirs["model"].items())
    assert (tmp_path / "policy.jsonl").read_text() == (run / "policy.jsonl").read_text()


def test_a_gradient_that_is_not_finite_ends_training_and_the_last_checkpoint_stands(run, tmp_path):
    (tmp_path / "best.pt").write_bytes((run / "best.pt").read_bytes())
    done = run_here("policy.py", tmp_path, *FEW, "--eval_interval=1", "--lr=1e30")
    assert_one_line(done, "step 2: the gradient is not finite; try a lower --lr")
    saved = load_checkpoint(str(tmp_path / "policy.pt"))
    assert saved.pop("step") == 1 and saved.pop("optimizer")
    save(str(tmp_path / "policy.pt"), saved | {"step": 1})  # as a policy is shared
    done = run_here("policy.py", tmp_path, *FEW, "--eval_interval=1", "--lr=1e30")
    assert_one_line(done, "policy.pt comes without its optimizer; delete it to train another")


def test_a_command_leaves_a_film_and_a_file_that_robots_read_and_there_is_a_table(run, tmp_path):
    assert script.read_path("figure8", 1.5, 8.0)[[0, 119, -1]].abs().amax(dim=1).max() < 0.1
    np.savetxt(tmp_path / "way.csv", np.arange(41)[:, None] * [0.02, 0.01], delimiter=",")
    words = ("--say=run and walk", f"--path={tmp_path / 'way.csv'}")
    assert "path error" in train_here(run, *words, script="policy.py")
    frames = motion.read_motion(run / "command.csv")
    assert frames.shape == (40, 26) and Image.open(run / "command.gif").n_frames > 20
    assert "256 if uniform" in train_here(
        run, "--n_starts=2", "--n_classifier_steps=2", script="experiments/commands.py"
    )


def test_what_a_user_can_fix_is_said_in_one_line(run, tmp_path):
    (tmp_path / "best.pt").write_bytes((run / "best.pt").read_bytes())
    np.savetxt(tmp_path / "one.csv", np.arange(70), delimiter=",")
    for words, message in (
        ((), "name at least one run: python policy.py"),
        (
            (f"{ROOT}/assets/mnist_daps",),
            "is a run of daps_na mnist, must have discrete codes of lafan",
        ),
        ((tmp_path, "--say=walk"), "policy.pt does not exist: train it, or"),
        ((run, "--say=stroll"), "say is 'stroll', must be words of dance, fall, fight, get, jump,"),
        ((run, "--path=spiral"), "path is 'spiral', must be straight, circle"),
        ((run, "--path=circle", "--speed=9"), "asks for 9.0 m/s, must be at most 8"),
        ((run, f"--path={tmp_path / 'one.csv'}"), "has 70 rows of 1, must have x, y at 30 Hz"),
        ((run, *FEW, "--seed=1"), "seed is 1, but"),
    ):
        assert_one_line(run_here("policy.py", *words), message)
