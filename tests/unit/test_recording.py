"""Recorded episodes: the policy's own numbers, paths that the hand really takes, and an evaluation that nothing changes."""

import json
import math
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from run_results import run_config
from thread_ranks import on_threads

from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.recorded import read_recording, write_recording
from rlinf.evaluation.recording import ScoringPolicy, record_episodes
from rlinf.evaluation.video import overlay, write_video
from rlinf.models import build_policy
from rlinf.preflight.compatibility import check_evaluation
from rlinf.report.episode_player import copy_baseline, divergence_step, executed_actions
from rlinf.run_folder import BASELINE_FOLDER, RECORDINGS_FOLDER
from rlinf.types import EpisodeSpec

MLP = ["model=mlp", "env=tabletop", "env.tasks=[reach,push]", "env.max_episode_steps=6", "model.action_chunks_len=4"]
OPENVLA = ["model=openvla_tiny", "env=tabletop", "env.tasks=[reach]", "env.max_episode_steps=3"]


def policy_and_env(tmp_path, overrides, num_envs=3):
    config = run_config(tmp_path / "unused", *overrides)
    env = make_env(config.env, num_envs, auto_reset=False)
    torch.manual_seed(0)
    return build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}}).eval(), env


def recordings_in(folder):
    return [read_recording(path) for path in sorted(folder.glob("*.js"))]


def by_hand(model, prediction, inputs):
    """Value, entropy and log-probability of one row, from the logits alone."""
    value = float(prediction.values[0])
    if prediction.logits.shape[-1] == 2:  # mean and log-std
        mean, log_std = prediction.logits[0].unbind(-1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        return value, float(normal.entropy().sum()), float(normal.log_prob(prediction.sequences[0]).sum())
    logprobs = torch.log_softmax(prediction.logits[0].double(), -1)
    tokens = prediction.sequences[0, -len(logprobs) :] - model.action_tokenizer.first_token
    entropy = -(logprobs.exp() * logprobs).sum()
    return value, float(entropy), float(logprobs.gather(1, tokens[:, None]).sum())


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("overrides", [MLP, OPENVLA], ids=["mlp", "openvla_tiny"])
def test_recorded_numbers_are_those_of_the_policy_on_what_it_saw(tmp_path, overrides, greedy, monkeypatch):
    model, env = policy_and_env(tmp_path, overrides)
    streams = ["a twin"] * len(env.task_names)
    monkeypatch.setattr(type(env), "stream_names", streams)
    specs = env.episode_specs("eval")[:4]
    result = evaluate_policy(model, env, specs, greedy=greedy, seed=5)
    record_episodes(model, env, result, tmp_path / "episodes", 2, 48)
    recorded = recordings_in(tmp_path / "episodes")
    assert len(recorded) == min(4, 2 * len(env.task_names))
    alone = make_env(env.config, 1, auto_reset=False)
    counted = {one.spec: one for one in result.results}
    differences = []
    for recording in recorded:
        spec = EpisodeSpec(**recording["spec"])
        assert recording["as_counted"]
        assert sum(recording["rewards"]) == pytest.approx(counted[spec].episode_return, abs=1e-5)
        assert len(recording["frames"]) == len(recording["rewards"]) + 1 == counted[spec].num_env_steps + 1
        observation, _ = alone.reset(options={"episodes": [spec]})
        stream = ScoringPolicy(model, streams, greedy, 1.0, 5).start_episode(spec)
        for call in recording["calls"]:
            draws = None if greedy else torch.from_numpy(stream.random((1, model.num_uniforms), dtype=np.float32))
            with torch.no_grad():
                inputs = model.preprocess(observation)
                prediction = model.predict_action_batch(do_sample=not greedy, uniforms=draws, **inputs)
                value, entropy, logprob = by_hand(model, prediction, inputs)
            found = [call["value"], call["entropy"], call["logprob"]]
            assert found == pytest.approx([value, entropy, logprob], rel=1e-3, abs=1e-3)
            np.testing.assert_allclose(call["chunk"], prediction.actions[0].float(), atol=1e-5)
            differences.append(abs(call["value"] - recorded[0]["calls"][0]["value"]))
            observation = alone.chunk_step(np.array([call["chunk"]], np.float32)).observation
        assert all(alone._finished)
    assert max(differences) > 1e-3, "control: values of other steps would not pass"


def test_recording_changes_nothing_of_the_evaluation_and_replaces_what_is_old(tmp_path, monkeypatch):
    model, env = policy_and_env(tmp_path, MLP)
    specs = env.episode_specs("eval")[:10]
    result = evaluate_policy(model, env, specs)
    before = json.dumps(result.as_dict())
    record_episodes(model, env, result, tmp_path / "episodes", 3, 48)
    assert json.dumps(result.as_dict()) == before
    assert [path.name for path in sorted((tmp_path / "episodes").iterdir())] == [
        "push_001.js", "push_003.js", "push_005.js", "reach_000.js", "reach_002.js", "reach_004.js",
    ]  # fmt: skip
    assert evaluate_policy(model, env, specs).results == result.results
    old = {path.name: path.read_bytes() for path in (tmp_path / "episodes").iterdir()}

    def kept():
        return {path.name: path.read_bytes() for path in (tmp_path / "episodes").iterdir()} == old

    record_episodes(model, env, result, tmp_path / "episodes", 0, 48)
    assert kept(), "without recordings nothing is touched"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("rlinf.evaluation.recording._image", lambda frame: (_ for _ in ()).throw(OSError("full")))
        record_episodes(model, env, result, tmp_path / "episodes", 1, 48)
    assert kept(), "old recordings stay until the new ones are written"
    (tmp_path / "episodes" / "notes.js").write_text("mine")
    with pytest.raises(CheckpointError, match="contains 'notes.js', which is not a recorded episode"):
        record_episodes(model, env, result, tmp_path / "episodes", 1, 48)
    (tmp_path / "episodes" / "notes.js").unlink()
    assert kept(), "files of others are not deleted"
    record_episodes(model, env, result, tmp_path / "episodes", 1, 48)
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["push_001.js", "reach_000.js"]
    assert [path.name for path in tmp_path.iterdir()] == ["episodes"]


def test_two_ranks_write_the_recordings_of_one(tmp_path):
    model, env = policy_and_env(tmp_path, MLP)
    result = evaluate_policy(model, env, env.episode_specs("eval")[:10])
    record_episodes(model, env, result, tmp_path / "one", 3, 48)
    pairs = [policy_and_env(tmp_path, MLP) for _ in range(2)]
    on_threads(2, lambda ranks: record_episodes(*pairs[ranks.rank], result, tmp_path / "two", 3, 48, ranks))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and len(one) == 6


def pusher_in(image):
    """Where the white pusher is seen: the middle of the pixels that are neither dark nor coloured."""
    dark, bright = image.min(-1).astype(float), image.max(-1).astype(float)
    rows, columns = np.nonzero((dark > 120) & (bright - dark < 30))
    assert len(rows) > 20
    return np.array([columns.mean() + 0.5, rows.mean() + 0.5])


@pytest.mark.parametrize(("task", "offset_m"), [("reach", 0.0), ("push", 0.0), ("reach_zone", 0.05)])
def test_the_path_of_a_chunk_is_where_the_pusher_is_seen_later(task, offset_m):
    config = TabletopConfig(tasks=[task], cameras=[], camera_offset_m=offset_m, tolerance_m=1e-3, max_episode_steps=40)
    size, env = 320, make_env(config, 3, auto_reset=False)
    env.reset(options={"episodes": env.episode_specs("eval")[:3]})
    chunks = np.random.default_rng(1).uniform(-1, 1, (3, 6, 2)).astype(np.float32)
    paths = env.chunk_paths(np.arange(3), chunks, size)
    other = env.chunk_paths(np.arange(3), -chunks, size)
    assert paths.shape == (3, 7, 2)
    seen = [[pusher_in(image) for image in env.render_frames(np.arange(3), size)]]
    for position in range(6):
        env.chunk_step(chunks[:, position : position + 1])
        seen.append([pusher_in(image) for image in env.render_frames(np.arange(3), size)])
    inside = ((paths > 25) & (paths < size - 25)).all(-1)  # the image's edge does not cut the pusher
    errors = np.linalg.norm(np.stack(seen, 1) - paths, axis=-1)[inside]
    assert len(errors) > 15 and errors.max() < 1.0, "pixels of 320"
    assert np.linalg.norm(np.stack(seen, 1) - other, axis=-1).max() > 20, "control: another chunk leads elsewhere"


def test_asking_for_a_path_moves_nothing():
    def states(ask):
        env = make_env(TabletopConfig(tasks=["push"], cameras=[]), 2, auto_reset=False)
        env.reset(options={"episodes": env.episode_specs("eval")[:2]})
        generator, found = np.random.default_rng(2), []
        for _ in range(6):
            chunk = generator.uniform(-1, 1, (2, 3, 2)).astype(np.float32)
            if ask:
                env.chunk_paths([0, 1], -chunk, 64)
            found.append([env.chunk_step(chunk).observation.state, env.render_frames([0, 1], 32), env.poses([0, 1])])
        return found

    for asked, quiet in zip(states(True), states(False), strict=True):
        np.testing.assert_array_equal(asked[0], quiet[0])
        np.testing.assert_array_equal(asked[1], quiet[1])
        assert asked[2] == quiet[2]


def recording_of(actions, chunk_len, low=(-1.0, -math.inf), high=(1.0, math.inf)):
    starts = range(0, len(actions), chunk_len)
    calls = [{"step": start, "chunk": [*actions[start : start + chunk_len], [9.0, 9.0]]} for start in starts]
    return {"rewards": [0.0] * len(actions), "calls": calls, "low": list(low), "high": list(high)}


def test_two_policies_part_where_an_executed_action_differs():
    actions = [[0.0, 0.0], [0.5, 2.0], [0.2, 0.0], [3.0, 1.0]]
    assert executed_actions(recording_of(actions, 3)).tolist() == [*actions[:3], [1.0, 1.0]], "clipped to the bounds"

    def part(changed):
        return divergence_step(recording_of(actions, 3), recording_of(changed, 2))

    assert part(actions) is None, "chunks of another length with the same actions"
    assert part([*actions[:2], [0.39, 0.0], actions[3]]) is None, "below 10 % of the range of 2"
    assert part([*actions[:2], [0.41, 0.0], actions[3]]) == 2
    assert part([actions[0], [0.5, 2.09], *actions[2:]]) is None and part([actions[0], [0.5, 2.11], *actions[2:]]) == 1
    assert part([*actions[:3], [7.0, 1.0]]) is None, "both are clipped to the same action"
    assert part(actions[:3]) == 3, "one has ended"


def test_copies_of_the_baseline_are_replaced_as_a_whole(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        (folder / RECORDINGS_FOLDER).mkdir(parents=True)
        (folder / RECORDINGS_FOLDER / "reach_000.js").write_text(folder.name)
    for name in ("reach_000.js", "push_001.js"):
        (a / RECORDINGS_FOLDER / name).write_text("new")
        copy_baseline(a, b)
    assert sorted(path.name for path in (b / BASELINE_FOLDER).iterdir()) == ["push_001.js", "reach_000.js"]
    assert sorted(path.name for path in b.iterdir()) == [RECORDINGS_FOLDER, BASELINE_FOLDER]
    copy_baseline(tmp_path / "nothing", b)
    assert not (b / BASELINE_FOLDER).exists(), "copies of another baseline would be shown under its name"


def whole_recording():
    call = {
        "step": 0,
        "chunk": [[0.5], [0.5]],
        "path": [[1.0, 2.0], None],
        "value": 1.0,
        "entropy": None,
        "logprob": None,
    }
    return {
        "number": 0, "spec": {"suite": "t", "task_id": 0, "init_state_id": 0, "seed": 0}, "task": "reach", "instruction": "reach it",
        "success": True, "as_counted": True, "size": 48, "low": [-1.0], "high": [1.0], "rewards": [0.0, 1.0],
        "calls": [call], "frames": ["a", "b", "c"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"seed": 0}}, {"spec": None}, {"frames": ["a"]}, {"calls": []}, {"calls": {}}, {"calls": [{"step": 0}]},
        {"rewards": 3}, {"low": [-1.0, -1.0]}, {"task": None}, {"success": "yes"}, {"rewards": [0.0] * 3, "frames": ["a"] * 4},
    ],
    ids=str,
)  # fmt: skip
def test_json_of_another_shape_is_no_recording(tmp_path, change):
    path = write_recording(tmp_path / "reach_000.js", whole_recording())
    assert read_recording(path) == whole_recording(), "control"
    write_recording(path, whole_recording() | change)
    with pytest.raises(CheckpointError, match=r"reach_000\.js is not a recorded episode"):
        read_recording(path)


@pytest.mark.parametrize(
    "text", ["", "rlinfEpisode({", "rlinfEpisode(no json);\n", "alert(1);\n", "rlinfEpisode([1]);\n"]
)
def test_a_file_that_is_no_recording_is_named(tmp_path, text):
    (tmp_path / "reach_000.js").write_text(text)
    with pytest.raises(CheckpointError, match=r"reach_000\.js is not a recorded episode"):
        read_recording(tmp_path / "reach_000.js")


class Remembers:
    """A policy without values or probabilities, whose actions grow with its calls in an episode."""

    def reset(self):
        self.calls = 0

    def act(self, observation):
        self.calls += 1
        return np.full((1, 2, 2), 0.1 * self.calls, np.float32)


def test_a_policy_that_tells_nothing_has_no_numbers(tmp_path):
    env = make_env(TabletopConfig(tasks=["reach"], max_episode_steps=4, cameras=[]), 1, auto_reset=False)
    result = evaluate_policy(Remembers(), env, env.episode_specs("eval")[:2])
    record_episodes(Remembers(), env, result, tmp_path / "episodes", 1, 48)
    (recording,) = recordings_in(tmp_path / "episodes")
    assert [call["step"] for call in recording["calls"]] == [0, 2]
    assert all(call[name] is None for call in recording["calls"] for name in ("value", "entropy", "logprob"))
    assert recording["calls"][1]["chunk"] == pytest.approx(np.full((2, 2), 0.2)), "the policy was reset"


@pytest.mark.parametrize("setting", ["cluster.num_rollout_workers=2", "cluster.placement=disaggregated"])
def test_recordings_by_players_are_refused(tmp_path, setting):
    base = ["model=mlp", "env=tabletop", "evaluation.num_episodes=8"]
    check_evaluation(run_config(tmp_path, *base, "evaluation.record_episodes=1"))
    check_evaluation(run_config(tmp_path, *base, setting))
    with pytest.raises(ConfigError, match=r"record_episodes=1 with cluster.*evaluation\.record_episodes=0"):
        check_evaluation(run_config(tmp_path, *base, setting, "evaluation.record_episodes=1"))


def frames_of(num_frames: int, size: int = 64) -> list[np.ndarray]:
    return [np.full((size, size, 3), 255 * i // num_frames, np.uint8) for i in range(num_frames)]


def test_video_is_h264_yuv420p_with_the_index_first(tmp_path):
    path = write_video(tmp_path / "a" / "episode.mp4", frames_of(9), "reach the red block", True, fps=8, hold_s=1)
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    frames = list(reader)
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p")
    assert len(frames) == 9 + 8
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")
    assert [p.name for p in path.parent.iterdir()] == ["episode.mp4"], "no temporary file may stay"
    odd = write_video(tmp_path / "odd.mp4", frames_of(3, size=65), "x", False)
    meta = next(imageio_ffmpeg.read_frames(str(odd)))
    assert meta["size"][0] % 2 == 0 and meta["size"][1] % 2 == 0


def test_picture_is_intact_below_the_band():
    frame = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    image = overlay(frame, "push the green block to the yellow zone and then back to where it came from", 3, 16, False)
    assert image.shape[1] == 64 and image.shape[0] > 64 and image.shape[0] % 2 == 0
    assert np.array_equal(image[-63:], frame[-63:])
    assert not np.array_equal(overlay(frame, "other", 3, 16, False)[:20], image[:20])
    bands = [
        overlay(frame, "reach", step, 16, outcome) for step, outcome in ((4, None), (4, True), (4, False), (5, None))
    ]
    assert len({band.tobytes() for band in bands}) == 4, "step and outcome are shown"


def test_a_video_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "false")
    with pytest.raises(OSError, match=r"MiB free.*episode.mp4"):
        write_video(tmp_path / "episode.mp4", frames_of(3), "reach", True)
    assert not list(tmp_path.iterdir())


def test_a_video_is_written_by_a_process_that_begins_without_python_code(tmp_path, monkeypatch):
    """Such code can wait for ever for a lock that another thread held as the process was forked."""
    write_video(tmp_path / "first.mp4", frames_of(1), "reach", True)  # the first call also asks ffmpeg for its version
    started = []
    popen = subprocess.Popen.__init__

    def recorded(self, *arguments, **keywords):
        started.append(keywords)
        popen(self, *arguments, **keywords)

    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    write_video(tmp_path / "episode.mp4", frames_of(3), "reach", True)
    (keywords,) = started
    assert keywords.get("preexec_fn") is None and keywords["process_group"] == 0
