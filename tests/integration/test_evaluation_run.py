"""`rlinf evaluate`: one command to numbers that can be trusted, and refusal where they could not be."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.config.compose import compose_config
from rlinf.config.options import to_mapping
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs import make_env
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.run import episode_list, evaluate
from rlinf.manifest import Manifest, build_manifest, hash_files
from rlinf.models import build_policy
from rlinf.training.checkpoint import save_checkpoint
from rlinf.training.export import export

OVERRIDES = [
    "model=openvla_tiny", "env=tabletop", "env.tasks=[reach,push]", "evaluation.num_episodes=9",
    "evaluation.num_envs=4", "evaluation.video_size=64", "cluster.num_threads=1", "output_dir=unused",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, RunConfig]:
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "rl_000003"
    config = build_config(compose_config(OVERRIDES))
    env = make_env(config.env, 1, auto_reset=False)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    env.close()
    save_checkpoint(
        folder, model=model, optimizer=None, loop_state={"step": 3}, run_config=to_mapping(config),
        manifest=build_manifest(config, model, policy_version=3),
    )  # fmt: skip
    return folder, config


def configured(checkpoint, output: Path, **sections) -> RunConfig:
    """The checkpoint's configuration with keys of some sections replaced."""
    folder, config = checkpoint
    config = replace(config, checkpoint=str(folder), output_dir=str(output))
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def test_evaluation_writes_results_videos_manifest_and_report(checkpoint, tmp_path, capsys):
    result = evaluate(configured(checkpoint, tmp_path / "out"))
    assert result.episodes == 9 and {task: s.episodes for task, s in result.per_task.items()} == {"reach": 5, "push": 4}
    assert EvaluationResult.from_json(tmp_path / "out" / "result.json") == result
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "result.json",
        "videos",
        "manifest.json",
        "config.yaml",
        "report.html",
    }
    assert result.videos and all((tmp_path / "out" / video["path"]).is_file() for video in result.videos)
    assert Manifest.load(tmp_path / "out").policy_version == 3
    printed = capsys.readouterr().out
    assert f"{result.successes}/9" in printed and "95 % interval" in printed and "report.html" in printed
    assert result.videos[0]["path"] in (tmp_path / "out" / "report.html").read_text()


def test_result_does_not_depend_on_the_number_of_envs_and_run_folder_and_export_give_the_same(checkpoint, tmp_path):
    quiet = {"num_videos_per_task": 0}
    results = [
        evaluate(configured(checkpoint, tmp_path / str(n), evaluation=quiet | {"num_envs": n})).results for n in (4, 9)
    ]
    assert results[0] == results[1]
    assert not (tmp_path / "4" / "videos").exists()
    exported = export(checkpoint[0], tmp_path / "exported")
    for source in (exported, checkpoint[0].parents[1]):
        config = replace(configured(checkpoint, tmp_path / "other", evaluation=quiet), checkpoint=str(source))
        assert evaluate(config).results == results[0]


def test_mismatch_is_refused_before_any_episode_and_can_be_allowed(checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rlinf.evaluation.run.evaluate_policy", lambda *_, **__: pytest.fail("no episode may be run"))
    other = configured(checkpoint, tmp_path / "out", env={"max_episode_steps": 8})
    with pytest.raises(
        ManifestMismatchError, match=r"env.max_episode_steps: saved .*, present 8\n.*allow_mismatch=\[env.max"
    ):
        evaluate(other)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    allowed = {"allow_mismatch": ["env.max_episode_steps"], "num_videos_per_task": 0}
    with caplog.at_level(logging.WARNING, "rlinf"):
        result = evaluate(configured(checkpoint, tmp_path / "out", env={"max_episode_steps": 8}, evaluation=allowed))
    assert "allowed by evaluation.allow_mismatch: env.max_episode_steps" in caplog.text
    assert max(r.num_env_steps for r in result.results) <= 8


def edited(checkpoint, target: Path, **changes) -> Path:
    """Copy the checkpoint with another manifest."""
    import shutil

    folder = Path(shutil.copytree(checkpoint[0], target))
    replace(Manifest.load(folder), **changes).save(folder)
    return folder


@pytest.mark.parametrize("change", ["versions", "normalization", "lora"])
def test_other_versions_statistics_or_adapters_are_refused(checkpoint, tmp_path, change):
    saved = Manifest.load(checkpoint[0])
    value = {
        "versions": {**saved.versions, "mujoco": "2.0.0"},
        "normalization": {**saved.normalization, "statistics": {"action": {"q01": [-9.0, -9.0]}}},
        "lora": {"state": "merged"},
    }[change]
    folder = edited(checkpoint, tmp_path / "rl_000003", **{change: value})
    with pytest.raises(ManifestMismatchError, match=change):
        evaluate(replace(configured(checkpoint, tmp_path / "out"), checkpoint=str(folder)))


def test_edited_statistics_file_is_refused(checkpoint, tmp_path):
    import shutil

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


def test_a_policy_without_checkpoint_is_evaluated_as_configured(checkpoint, tmp_path):
    config = replace(
        configured(checkpoint, tmp_path, evaluation={"num_videos_per_task": 0, "num_episodes": 2}), checkpoint=None
    )
    assert evaluate(config).episodes == 2


def test_more_episodes_than_the_split_has_is_an_error(checkpoint):
    config = replace(checkpoint[1].env, num_eval_init_states=3)
    env = make_env(config, 2, auto_reset=False)
    assert len({spec for spec in episode_list(env, "eval", 6)}) == 6
    with pytest.raises(ConfigError, match="num_episodes=7.*has 6 episodes.*num_episodes=6"):
        episode_list(env, "eval", 7)
    env.close()
