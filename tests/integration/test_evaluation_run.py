"""`rlinf evaluate`: one command to numbers that can be trusted, and rejection where they could not be."""

import json
import logging
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.checkpoints.checkpoint import save_checkpoint
from rlinf.commands.evaluate import evaluate
from rlinf.commands.export import export
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank, world_size
from rlinf.envs import make_env
from rlinf.envs.tabletop import scene
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError, RLinfError
from rlinf.evaluation import baselines
from rlinf.evaluation.evaluator import EvaluationPlan, RankGroup, episode_list, evaluate_policy
from rlinf.evaluation.fingerprint import take_fingerprint
from rlinf.evaluation.partial import PartialResults
from rlinf.evaluation.result import EvaluationResult
from rlinf.manifest import Manifest, hash_files
from rlinf.models import build_policy
from rlinf.options import to_mapping
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import validate
from rlinf.report.compare_folders import compare_folders
from rlinf.training.stop_signal import StopRequested, StopSignal

OVERRIDES = [
    "model=openvla_tiny", "env=tabletop", "env.tasks=[reach,push]", "evaluation.num_episodes=9",
    "evaluation.num_envs=4", "evaluation.video_size=64", "cluster.num_threads=1", "output_dir=unused",
]  # fmt: skip

QUICK = ["model=mlp", *OVERRIDES[1:], "env.cameras=[front]", "evaluation.num_videos_per_task=0"]


def make_checkpoint(folder: Path, overrides: list[str], **loop_state) -> tuple[Path, RunConfig]:
    config = build_config(compose_config(overrides))
    env = make_env(config.env, 1, auto_reset=False)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    env.close()
    save_checkpoint(
        folder, model=model, optimizer=None, loop_state={"step": 3, **loop_state}, run_config=to_mapping(config),
        manifest=build_manifest(config, model, policy_version=3),
    )  # fmt: skip
    return folder, config


def evaluate_a_fraction(folder: str) -> None:
    """Evaluate as a rank of a run; then again with a signal that the last rank alone hears."""
    config = build_config(compose_config(["model=mlp", *OVERRIDES[1:]]))
    env = make_env(config.env, 2 + rank(), auto_reset=False)
    torch.manual_seed(0)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    stop_signal = StopSignal(announce=False)
    ranks = RankGroup(rank(), world_size(), stop_signal.together)
    specs = episode_list(env, "eval", 9)
    plan = EvaluationPlan(Path(folder) / "videos", video_size=64, ranks=ranks)
    result = evaluate_policy(model, env, specs, greedy=False, plan=plan)
    if rank() == 0:
        result.to_json(Path(folder) / "result.json")
    stop_signal.number = signal.SIGTERM if rank() == world_size() - 1 else None
    with pytest.raises(StopRequested):
        evaluate_policy(model, env, specs, plan=EvaluationPlan(ranks=ranks))
    env.close()


def test_two_ranks_write_the_result_file_of_one_and_a_stop_of_one_stops_both(tmp_path):
    for num_ranks in (1, 2):
        launch(evaluate_a_fraction, str(tmp_path / str(num_ranks)), num_ranks, "cpu")
    one, two = (EvaluationResult.from_json(tmp_path / name / "result.json") for name in ("1", "2"))
    assert replace(one, wall_s=0, results=[]) == replace(two, wall_s=0, results=[]) and len(one.videos) >= 2
    assert_alike(one.results, two.results)
    for video in one.videos:
        shown, again = (frames_of(tmp_path / name / video["path"]) for name in ("1", "2"))
        assert shown.shape == again.shape
        assert np.abs(shown - again).mean() < 1, "grey levels: rounding may move an edge, and nothing else"
    other = frames_of(tmp_path / "1" / one.videos[0]["path"])
    count = min(len(shown), len(other))
    assert np.abs(shown[:count, -60:] - other[:count, -60:]).mean() > 1, "a control: another episode, below the text"


def frames_of(path):
    """The frames of a video, int16 ``[T, H, W, 3]``."""
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]).astype(np.int16)


def recorded(model, lengths):
    """``model.preprocess``, which adds the lengths of the prompts that it gets together."""
    preprocess = model.preprocess
    return lambda observation: lengths.append(set(model.prompt_lengths(observation))) or preprocess(observation)


def assert_alike(one, other):
    """Equal but for the rounding of returns: a matrix product of other rows rounds otherwise on some processors."""
    assert [replace(row, episode_return=0.0) for row in one] == [replace(row, episode_return=0.0) for row in other]
    assert [row.episode_return for row in one] == pytest.approx([row.episode_return for row in other], abs=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, RunConfig]:
    return make_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints" / "rl_000003", OVERRIDES)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[Path, RunConfig]:
    """A policy of the state, for what does not depend on the policy."""
    return make_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints" / "rl_000003", QUICK)


def configured(checkpoint, output: Path, **sections) -> RunConfig:
    """The checkpoint's configuration with keys of some sections replaced."""
    folder, config = checkpoint
    config = replace(config, checkpoint=str(folder), output_dir=str(output))
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def test_evaluation_writes_results_videos_manifest_and_report(checkpoint, tmp_path, capsys):
    result = evaluate(configured(checkpoint, tmp_path / "out"))
    assert result.episodes == 9 and {task: s.episodes for task, s in result.per_task.items()} == {"reach": 5, "push": 4}
    assert EvaluationResult.from_json(tmp_path / "out" / "result.json") == result
    files = ["config.yaml", "manifest.json", "report.html", "result.json", "videos"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    assert result.videos and all((tmp_path / "out" / video["path"]).is_file() for video in result.videos)
    assert Manifest.load(tmp_path / "out").policy_version == 3
    printed = capsys.readouterr().out
    assert f"{result.successes}/9" in printed and "95 % interval" in printed and "report.html" in printed
    assert result.videos[0]["path"] in (tmp_path / "out" / "report.html").read_text()


def test_baselines_start_from_the_policy_before_rl_and_are_saved_with_the_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "plane_offsets", lambda dim: np.array([[0.0, 0.1]]))
    folder, state = (
        tmp_path / "run" / "checkpoints",
        {"evaluations": {"before_rl": {"checkpoint": "sft_000002", "success_rate": 0.0}}},
    )
    before, _ = make_checkpoint(folder / "sft_000002", QUICK)
    after, rows = make_checkpoint(folder / "rl_000003", QUICK, **state), []
    for name in ("there", "deleted"):
        result = evaluate(configured(after, tmp_path / name, evaluation={"num_episodes": 4, "baselines": True}))
        rows.append(result.baselines)
        assert result.summary()["baselines"] == result.baselines
        printed, page = capsys.readouterr().out, (tmp_path / name / "report.html").read_text()
        assert all(row["name"] in printed and row["name"] in page for row in result.baselines)
        shutil.rmtree(before, ignore_errors=True)
    assert [row["success"] == other["success"] for row, other in zip(*rows, strict=True)] == [False] * 5 + [True] * 5
    assert [row["name"].startswith("BC policy") for row in rows[0]] == [True] * 5 + [False] * 5
    assert not rows[0][0]["note"] and rows[1][0]["note"]


def test_recording_changes_no_result_and_its_failure_loses_none(quick, tmp_path, monkeypatch):
    few = {"num_episodes": 3, "num_videos_per_task": 0}

    def result_of(name):
        found = json.loads((tmp_path / name / "result.json").read_text())
        return {key: value for key, value in found.items() if key != "wall_s"}

    evaluate(configured(quick, tmp_path / "off", evaluation=few))
    evaluate(configured(quick, tmp_path / "on", evaluation=few | {"record_episodes": 1}))
    assert len(list((tmp_path / "on" / "episodes").glob("*.js"))) == 2 and not (tmp_path / "off" / "episodes").exists()
    assert result_of("on") == result_of("off")
    with monkeypatch.context() as patch:
        patch.setattr("rlinf.evaluation.recording._image", lambda frame: 1 / 0)
        with pytest.raises(RLinfError, match=r"ZeroDivisionError.*its result is saved.*evaluation\.record_episodes=0"):
            evaluate(configured(quick, tmp_path / "failed", evaluation=few | {"record_episodes": 1}))
    assert result_of("failed") == result_of("off"), "the result was written before"
    evaluate(configured(quick, tmp_path / "failed", evaluation=few))
    assert result_of("failed") == result_of("off") and (tmp_path / "failed" / "report.html").exists()


def test_result_does_not_depend_on_the_number_of_envs_and_run_folder_and_export_give_the_same(checkpoint, tmp_path):
    quiet = {"num_videos_per_task": 0}
    results = [
        evaluate(configured(checkpoint, tmp_path / str(n), evaluation=quiet | {"num_envs": n})).results for n in (4, 9)
    ]
    assert results[0] == results[1]
    assert not (tmp_path / "4" / "videos").exists()
    exported = export(checkpoint[0], tmp_path / "exported")
    for source in (exported, checkpoint[0].parents[1]):
        config = replace(
            configured(checkpoint, tmp_path / f"of_{source.name}", evaluation=quiet), checkpoint=str(source)
        )
        assert evaluate(config).results == results[0]


MODELS = {name: [] for name in ("openvla_tiny", "hf_vla_tiny", "cnn", "mlp")}
MODELS |= {name: ["env.state=proprio"] for name in ("pi0_tiny", "openvla_oft_tiny")}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_several_lengths_give_the_same_results_side_by_side_and_apart(name, monkeypatch):
    """No row is padded to the prompt of a neighbour, which a flow-matching policy shows in its actions."""
    words = [f"model={name}", "env=tabletop", *MODELS[name], "env.max_episode_steps=6", "output_dir=unused"]
    config = build_config(compose_config(words))
    results, lengths, model = [], [], None
    for num_envs in (3, 8):
        env = make_env(config.env, num_envs, auto_reset=False)
        if model is None:
            model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
            monkeypatch.setattr(model, "preprocess", recorded(model, lengths))
        specs = episode_list(env, "eval", 8)
        observation, _ = env.reset(options={"episodes": [*specs[:num_envs]]})
        assert len({len(text.split()) for text in observation.instruction}) > 1, "a control: prompts must differ"
        results.append(evaluate_policy(model, env, specs).results)
        env.close()
    assert lengths and all(len(each) == 1 for each in lengths)
    assert_alike(*results)
    assert len({one.episode_return for one in results[0]}) == 8, "each has its own"


def no_episode_is_run(monkeypatch) -> None:
    name = "rlinf.commands.evaluate.evaluate_policy"
    monkeypatch.setattr(name, lambda *_, **__: pytest.fail("no episode may be run"))


def test_mismatch_is_refused_before_any_episode_and_can_be_allowed(quick, tmp_path, monkeypatch, caplog):
    words = r"env.max_episode_steps.reach: saved 16, present 8\n.*present 8\n.*allow_mismatch=\[env.max"
    with monkeypatch.context() as patch, pytest.raises(ManifestMismatchError, match=words):
        no_episode_is_run(patch)
        evaluate(configured(quick, tmp_path / "out", env={"max_episode_steps": 8}))
    assert not (tmp_path / "out").exists()
    allowed = {"allow_mismatch": ["env.max_episode_steps"], "num_videos_per_task": 0}
    with caplog.at_level(logging.WARNING, "rlinf"):
        result = evaluate(configured(quick, tmp_path / "out", env={"max_episode_steps": 8}, evaluation=allowed))
    assert "allowed by evaluation.allow_mismatch: env.max_episode_steps" in caplog.text
    assert result.warnings == EvaluationResult.from_json(tmp_path / "out" / "result.json").warnings
    assert len(result.warnings) == 2 and "env.max_episode_steps.push: saved 48, present 8" in result.warnings[1]
    assert "Before you trust these numbers" in (tmp_path / "out" / "report.html").read_text()
    assert max(r.num_env_steps for r in result.results) <= 8


def edited(checkpoint, target: Path, **changes) -> Path:
    """Copy the checkpoint with another manifest."""
    folder = Path(shutil.copytree(checkpoint[0], target))
    replace(Manifest.load(folder), **changes).save(folder)
    return folder


def test_other_versions_statistics_or_adapters_are_refused(quick, tmp_path):
    saved = Manifest.load(quick[0])
    for name, value in {
        "versions": {**saved.versions, "transformers": "2.0.0"},
        "simulators": {"mujoco": "3.2.99"},
        "renderer": "another",
        "normalization": {**saved.normalization, "statistics": {"action": {"q01": [-9.0, -9.0]}}},
        "lora": {"state": "merged"},
    }.items():
        folder = edited(quick, tmp_path / name / "rl_000003", **{name: value})
        with pytest.raises(ManifestMismatchError, match=f"  {name}"):
            evaluate(replace(configured(quick, tmp_path / "out"), checkpoint=str(folder)))


def test_another_version_of_a_library_is_told_where_it_is_not_refused(quick, tmp_path, caplog):
    saved = Manifest.load(quick[0])
    assert evaluate(configured(quick, tmp_path / "same")).warnings == []
    changes = {"versions": {**saved.versions, "torch": "1.0.0"}, "seed": 9, "policy_version": 8}
    folder = edited(quick, tmp_path / "rl_000003", **changes)
    result = evaluate(replace(configured(quick, tmp_path / "other"), checkpoint=str(folder)))
    line = f'versions.torch: saved "1.0.0", present "{saved.versions["torch"]}"'
    assert result.warnings == [f"the checkpoint was written with a different version: {line}"]
    assert line in caplog.text and line in (tmp_path / "other" / "report.html").read_text().replace("&#34;", '"')


def test_edited_statistics_file_is_refused(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "rl_000003"))
    path = folder / "model" / "dataset_statistics.json"
    statistics = json.loads(path.read_text())
    statistics["tabletop"]["action"]["q99"][0] *= 2
    path.write_text(json.dumps(statistics))
    config = replace(configured(checkpoint, tmp_path / "out"), checkpoint=str(folder))
    with pytest.raises(CheckpointError, match="model/dataset_statistics.json"):
        evaluate(config)
    replace(Manifest.load(folder), files=hash_files(folder)).save(folder)  # whoever hides the edit is found out too
    with pytest.raises(ManifestMismatchError, match="normalization.statistics.action.q99"):
        evaluate(config)


def test_a_policy_without_checkpoint_is_evaluated_as_configured(quick, tmp_path):
    config = replace(configured(quick, tmp_path, evaluation={"num_episodes": 2}), checkpoint=None)
    assert evaluate(config).episodes == 2


def test_the_list_is_the_beginning_of_the_split_or_with_null_the_whole_and_more_episodes_are_an_error(quick):
    config = replace(quick[1].env, num_eval_init_states=3)
    env = make_env(config, 2, auto_reset=False)
    assert len(set(episode_list(env, "eval", 6))) == 6
    assert episode_list(env, "eval", None) == list(env.episode_specs("eval")) == episode_list(env, "eval", 6)
    with pytest.raises(ConfigError, match="num_episodes=7.*has 6 episodes.*num_episodes=6"):
        episode_list(env, "eval", 7)
    env.close()
    for num_episodes in (None, 6, 7):
        evaluation = replace(quick[1].evaluation, num_episodes=num_episodes)
        checked = replace(quick[1], env=config, evaluation=evaluation)
        if num_episodes == 7:
            with pytest.raises(ConfigError, match="num_episodes=7, but .* = 6. Set evaluation.num_episodes=6"):
                validate(checked, "evaluate")
        else:
            validate(checked, "evaluate")
    for settings, message in (
        ({"first_episode": 6, "num_episodes": None}, "first_episode=6, but .* = 6. Set evaluation.first_episode=0"),
        ({"first_episode": 4, "num_episodes": 3}, "num_episodes=3 after the first 4.*Set evaluation.num_episodes=2"),
        ({"num_episodes": 4, "num_fresh_episodes": 3}, "num_fresh_episodes=3.*at most 2"),
    ):
        checked = replace(quick[1], env=config, evaluation=replace(quick[1].evaluation, **settings))
        with pytest.raises(ConfigError, match=message):
            validate(checked, "train")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_of_a_run_a_checkpoint_an_export_or_an_evaluation_is_overwritten(quick, tmp_path, monkeypatch):
    evaluate(configured(quick, tmp_path / "a", evaluation={"num_episodes": 2}))
    (tmp_path / "metrics" / "deep").mkdir(parents=True)
    (tmp_path / "metrics" / "metrics.jsonl").write_text("{}\n")
    exported = export(quick[0], tmp_path / "exported")
    before = contents(tmp_path), contents(quick[0].parents[1])
    monkeypatch.setattr("rlinf.cluster.factory.make_env", lambda *_, **__: pytest.fail("nothing may be started"))
    run = quick[0].parents[1]
    for output in (quick[0], quick[0] / "model", run, run / "eval" / "mine", exported, tmp_path / "metrics" / "deep"):
        with pytest.raises(
            ConfigError, match=r"output_dir is '.*', .* inside a run, checkpoint or export.*Set output_dir="
        ):
            evaluate(configured(quick, output))
    with pytest.raises(ConfigError, match=r"is '.*a', which contains the result.json of a finished.*output_dir="):
        evaluate(configured(quick, tmp_path / "a", evaluation={"greedy": False}))
    with pytest.raises(ConfigError, match=r"compare=.*a and output_dir=.*a are the same folder.*Set output_dir="):
        evaluate(configured(quick, tmp_path / "b" / ".." / "a", evaluation={"compare": str(tmp_path / "a")}))
    assert (contents(tmp_path), contents(run)) == before


def test_no_more_simulators_are_started_than_episodes_and_probe_need(quick, tmp_path, monkeypatch):
    started = []

    def make(config, num_envs, **options):
        started.append(num_envs)
        return make_env(config, num_envs, **options)

    monkeypatch.setattr("rlinf.cluster.factory.make_env", make)
    cases = (
        {"num_episodes": 2},
        {"num_episodes": 2, "probe": False},
        {"num_episodes": 6},
        {"num_episodes": 6, "num_envs": 5},
    )
    for number, settings in enumerate(cases):
        evaluate(configured(quick, tmp_path / str(number), evaluation={"num_envs": 64} | settings))
    assert started == [4, 2, 6, 5]


def test_adapters_are_not_put_on_other_base_weights(checkpoint, tmp_path):
    """Neither those of an export, whose base lies elsewhere, nor without a word those of a checkpoint."""
    base = export(checkpoint[0], tmp_path / "base")
    model = replace(checkpoint[1].model, model_path=str(base), init_config={}, is_lora=True)
    config = replace(checkpoint[1], model=model)
    policy = build_policy(config)
    adapters = save_checkpoint(
        tmp_path / "rl_000004", model=policy, optimizer=None, loop_state={"step": 4}, run_config=to_mapping(config),
        manifest=build_manifest(config, policy, policy_version=4),
    )  # fmt: skip
    exported = export(adapters, tmp_path / "exported")
    quiet = {"num_episodes": 2, "num_videos_per_task": 0}

    def evaluated(source, name, **settings):
        return evaluate(replace(configured((source, config), tmp_path / name, evaluation=quiet | settings)))

    assert evaluated(exported, "same").warnings == []
    weights = load_file(base / "model.safetensors")
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    weights[name] = weights[name] + torch.ones_like(weights[name]) / 64
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    words = r"weights that differ from model.model_path=.*base:\n  lora.base_sha256: .*\n.*=\[lora.base_sha256\]"
    with pytest.raises(ManifestMismatchError, match=words):
        evaluated(exported, "other")
    with pytest.raises(ManifestMismatchError, match="lora.base_sha256: saved"):
        evaluated(adapters, "other")
    assert "lora.base_sha256" in evaluated(exported, "allowed", allow_mismatch=["lora.base_sha256"]).warnings[0]


def stop_after(monkeypatch, number: int) -> None:
    """Have Ctrl-C pressed as the result after ``number`` others is written."""
    add = PartialResults.add

    def interrupted(self, result):
        if self.num_results == number:
            raise KeyboardInterrupt
        add(self, result)

    monkeypatch.setattr(PartialResults, "add", interrupted)


def test_an_interrupted_evaluation_goes_on_where_it_stopped(quick, tmp_path, monkeypatch, capsys):
    whole = evaluate(configured(quick, tmp_path / "whole"))
    config = configured(quick, tmp_path / "out")
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        stop_after(context, 5)
        evaluate(config)
    path = tmp_path / "out" / "result.partial.jsonl"
    said = f"5 results are saved in {path.parent}; to continue, run the same command with output_dir={tmp_path / 'out'}"
    assert said in capsys.readouterr().err
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"wall_s": 100.0})]) + "\n")
    with open(path, "a") as file:
        file.write('{"spec": {"suite": "tabl')  # the process was killed as it wrote
    runs = []
    add = PartialResults.add
    monkeypatch.setattr(PartialResults, "add", lambda self, result: (runs.append(result.spec), add(self, result)))
    other_envs = configured(quick, tmp_path / "out", evaluation={"num_envs": 3})
    assert_alike(evaluate(other_envs).results, whole.results)
    assert len(runs) == 4, "five were known"
    assert (waited := EvaluationResult.from_json(tmp_path / "out" / "result.json").wall_s) > 100, waited
    assert "evaluation 5/9" in (err := capsys.readouterr().err) and "9/9" in err and not path.exists()


def test_an_evaluation_that_was_killed_before_its_report_is_finished_without_an_episode(quick, tmp_path, monkeypatch):
    """Between any two of the files that it writes."""
    baseline = evaluate(configured(quick, tmp_path / "a"))
    config = configured(quick, tmp_path / "b", evaluation={"compare": str(tmp_path / "a")})
    for step in ("EvaluationResult.to_json", "compare_folders", "write_report"):
        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
            context.setattr(f"rlinf.commands.evaluate.{step}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            evaluate(config)
    monkeypatch.setattr(PartialResults, "add", lambda self, result: pytest.fail(f"{result.spec} is run again"))
    assert evaluate(config).results == baseline.results
    files = ["compare.json", "config.yaml", "manifest.json", "report.html", "result.json"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == files
    assert "Paired comparison" in (tmp_path / "b" / "report.html").read_text()


def test_results_of_other_conditions_are_not_continued(quick, tmp_path, monkeypatch):
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        stop_after(context, 3)
        evaluate(configured(quick, tmp_path / "out"))
    other = configured(quick, tmp_path / "out", evaluation={"greedy": False})
    with pytest.raises(ConfigError, match=r"contains 3 results .* under different conditions \(greedy\).*output_dir="):
        evaluate(other)
    path = tmp_path / "out" / "result.partial.jsonl"
    path.write_text(path.read_text().replace('"success"', '"sucess"'))
    with pytest.raises(CheckpointError, match="result.partial.jsonl cannot be read"):
        evaluate(configured(quick, tmp_path / "out"))


def test_nothing_stays_of_an_evaluation_that_had_no_result_yet(quick, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        evaluate(configured(quick, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == [] and "continues" not in capsys.readouterr().err


def test_a_baseline_is_compared_with_episode_by_episode(quick, tmp_path, monkeypatch, capsys):
    evaluate(configured(quick, tmp_path / "a"))
    against = {"compare": str(tmp_path / "a")}
    allowed = against | {"greedy": False, "allow_mismatch": ["greedy"]}
    evaluate(configured(quick, tmp_path / "b", evaluation=allowed))
    data = json.loads((tmp_path / "b" / "compare.json").read_text())
    assert data["total"]["episodes"] == 9 and data["a"] == str(tmp_path / "a")
    assert "b - a = " in capsys.readouterr().out
    assert data["mismatches"] == ["greedy: saved true, present false"]
    assert "Paired comparison" in (tmp_path / "b" / "report.html").read_text()
    evaluate(configured(quick, tmp_path / "short", evaluation={"stop_when": 0.8, "num_envs": 3}))
    short = EvaluationResult.from_json(tmp_path / "short" / "result.json")
    assert 1 < short.episodes < 9 and f"ended after {short.episodes} of 9 episodes" in short.warnings[-1]
    evaluate(configured(quick, tmp_path / "same", evaluation=against | {"stop_when": "decided"}))
    assert "Not decided after 9 of 9 episodes." in capsys.readouterr().out
    no_episode_is_run(monkeypatch)
    few = {"compare": str(tmp_path / "short"), "allow_mismatch": ["episodes"]}
    for settings, error, words in (
        (few, ConfigError, f"ended after .* of 9 episodes.*Set evaluation.num_episodes={short.episodes}"),
        (against | {"num_episodes": 5}, ConfigError, "9 episodes and the second 5, 5 of them in common"),
        (against | {"greedy": False}, ManifestMismatchError, r"greedy: saved true, present false\n.*=\[greedy\]"),
        ({"compare": str(tmp_path / "no")}, CheckpointError, "contains no result.json"),
    ):
        with pytest.raises(error, match=words):
            evaluate(configured(quick, tmp_path / "c", evaluation=settings))


def test_a_simulator_that_has_drifted_since_the_checkpoint_is_warned_of(quick, tmp_path, monkeypatch, caplog):
    env = make_env(quick[1].env, 4, auto_reset=False)
    folder = edited(quick, tmp_path / "rl_000003", probe=take_fingerprint(env))
    env.close()
    config = replace(configured(quick, tmp_path / "same", evaluation={"num_episodes": 2}), checkpoint=str(folder))
    result = evaluate(config)
    assert result.warnings == [] and Manifest.load(tmp_path / "same").probe == Manifest.load(folder).probe
    description = scene.tabletop_xml()
    monkeypatch.setattr(scene, "tabletop_xml", lambda: description.replace("0.23 0.23 0.25", "0.15 0.15 0.17"))
    with caplog.at_level(logging.WARNING, "rlinf"):
        warned = evaluate(replace(config, output_dir=str(tmp_path / "darker"))).warnings
    assert warned and all("has changed since the checkpoint was written: " in line for line in warned)
    assert all("grey levels" in line for line in warned)
    assert warned[0] in caplog.text
    off = replace(config, output_dir=str(tmp_path / "off"), evaluation=replace(config.evaluation, probe=False))
    assert evaluate(off).warnings == [] and Manifest.load(tmp_path / "off").probe is None


def test_training_records_what_its_evaluation_is_compared_by_and_the_saved_policy_gives_the_same_results(tmp_path):
    overrides = [
        "model=mlp", "env=tabletop", "env.tasks=[reach]", "sft.max_steps=3", "sft.num_demonstrations=8", "sft.batch_size=16",
        "trainer.max_steps=0", "evaluation.num_episodes=6", "evaluation.num_envs=3", "evaluation.num_videos_per_task=0",
        "cluster.num_threads=1", "tracking.tensorboard=false", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    config = build_config(compose_config(overrides))
    train(config)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert Manifest.load(saved).probe["episodes"][0]["task"] == "reach"
    result = evaluate(replace(config, checkpoint=str(saved), output_dir=str(tmp_path / "out")))
    during = tmp_path / "run" / "eval" / "after_sft"
    assert result.warnings == [] and result.results == EvaluationResult.from_json(during / "result.json").results
    comparison = compare_folders(during, tmp_path / "out")
    assert comparison.total.p_value == 1.0 and comparison.mismatches == []
