"""Results kept by an interrupted evaluation: continued under equal conditions only, and never written again."""

import errno
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest

from rlinf.commands.open_evaluation import conditions
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs import make_env
from rlinf.errors import ConfigError
from rlinf.evaluation.evaluator import episode_list
from rlinf.evaluation.partial import PartialResults
from rlinf.models import build_policy
from rlinf.preflight.conditions import build_manifest


def test_what_a_result_depends_on_is_told_apart(tmp_path):
    """Each of these changes a condition under which kept results may be continued."""
    words = "model=mlp env=tabletop env.tasks=[reach] output_dir=unused seed=1"
    config = build_config(compose_config(words.split()))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    env = make_env(config.env, 1, auto_reset=False)
    specs = episode_list(env, "eval", 9)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    env.close()

    def found(changed: RunConfig, number: int = 9) -> dict:
        return conditions(changed, build_manifest(changed, model, policy_version=0), None, specs[:number])

    def with_(section: str, **values) -> RunConfig:
        return replace(config, **{section: replace(getattr(config, section), **values)})

    changes = {
        "seed": replace(config, seed=2), "env.reward_mode": with_("env", reward_mode="sparse"),
        "env.success_bonus": with_("env", success_bonus=2.0), "greedy": with_("evaluation", greedy=False),
        "env.image_size": with_("env", image_size=config.env.image_size + 8),
        "temperature": with_("rollout", temperature=0.5), "precision": with_("model", precision="bf16"),
        "weights": with_("model", model_path=str(tmp_path)),
    }  # fmt: skip
    before = found(config)
    assert found(config) == before, "a control"
    for name, changed in changes.items():
        assert found(changed).get(name) != before.get(name), name
    assert found(config, 8)["episodes"] != before["episodes"]


def test_kept_results_are_not_continued_where_one_condition_differs(tmp_path):
    before = {"weights": None, "env.success_bonus": 1.0, "greedy": True}
    PartialResults(tmp_path, before)._file.close()
    for name in (*before, "a_new_one"):
        with pytest.raises(ConfigError, match=rf"different conditions \({name}\)"):
            PartialResults(tmp_path, before | {name: "other"})
    assert PartialResults(tmp_path, before).known == [], "a control"


def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    with (
        PartialResults(tmp_path, {}),
        pytest.raises(ConfigError, match="A different evaluation is writing .* output_dir="),
    ):
        PartialResults(tmp_path, {})
    PartialResults(tmp_path, {})._file.close()  # a control: the first one has ended


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks_will_do_and_one_that_fails_will_not(tmp_path, monkeypatch, caplog, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rlinf.files.fcntl.flock", flock)
    with nullcontext() if number != errno.EIO else pytest.raises(OSError, match="Input/output"):
        PartialResults(tmp_path, {})._file.close()
    assert ("cannot be locked" in caplog.text) == (number != errno.EIO)


def test_a_kept_file_is_only_cut_where_a_line_is_not_whole(tmp_path):
    partial = PartialResults(tmp_path, {"a": "é\u2028\x85"})
    partial._file.close()
    whole = partial.path.read_bytes()
    inode = partial.path.stat().st_ino
    for rest in (b"", b'{"spec": "\xc3'):  # in the middle of a letter, too
        partial.path.write_bytes(whole + rest)
        PartialResults(tmp_path, {"a": "é\u2028\x85"})._file.close()
        assert partial.path.read_bytes() == whole
        assert partial.path.stat().st_ino == inode, "the kept results may not be written again"
