"""``rlinf check`` and ``rlinf play``."""

import json
from pathlib import Path

import pytest

from rlinf.audits.checkpoint import AuditCheckpoint
from rlinf.audits.command import NOT_KNOWN, configured, run_audit, seen_episodes
from rlinf.cli import EXIT_FAULT, EXIT_USER_ERROR, main
from rlinf.commands.hydra_app import parse
from rlinf.contracts.env import PROPERTIES
from rlinf.envs import make_env
from rlinf.seeding import derive_seed

DOT = """
import numpy as np
from rlinf.envs import register_env
from rlinf.envs.base import SimulatorStep, VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.types import Observation


class DotEnv(VectorEnv):
    suite = "one_dot"

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(1), action_high=np.ones(1))
        self._places = np.zeros(num_envs)

    @classmethod
    def all_task_names(cls, config):
        return ["right"]

    @property
    def state_dim(self):
        return 1

    def _reset_env(self, index, spec):
        START

    def _step_envs(self, ids, actions):
        self._places[ids] += 0.1 * actions[:, 0]
        return SimulatorStep(dense_reward=self._places[ids].astype(np.float32), success=self._places[ids] > 2.0)

    def _observe(self, ids):
        return Observation({}, self._places[ids, None].astype(np.float32), ["go right"] * len(ids))


register_env("one_dot", DotEnv)
"""
GOOD, FORGETFUL = "self._places[index] = (spec.init_state_id % 7) / 10", "self._places[index] += 0.01"


@pytest.fixture
def dot(here, monkeypatch):
    """``dot(start)`` writes an env of one's own, without a YAML, and returns how to name it."""

    def write(start: str, name: str) -> list[str]:
        (here / f"{name}.py").write_text(DOT.replace("START", start))
        return ["env=one_dot", f"plugins=[{name}.py]", "env.cameras=[]"]

    return write


def lines_of(printed: str) -> dict[str, str]:
    """Result of each property."""
    rows = [line.rsplit("  ", 1) for line in printed.splitlines() if line.startswith(tuple(PROPERTIES.values()))]
    return {name.strip(): result for name, result in rows}


def test_an_env_that_keeps_the_contract_exits_with_0(dot, capsys):
    assert main(["check", *dot(GOOD, "good_dot")]) == 0
    printed = capsys.readouterr().out
    assert lines_of(printed) == dict.fromkeys(PROPERTIES.values(), "pass")
    assert printed.endswith("one_dot: fulfils the contract\n")


def test_a_violated_property_is_named_with_its_sentence_and_exits_with_1(dot, capsys):
    assert main(["check", *dot(FORGETFUL, "bad_dot")]) == EXIT_FAULT
    printed = capsys.readouterr().out
    assert (
        lines_of(printed)[PROPERTIES["repeatability"]] == "FAIL" and "\n    Not repeatable: two episodes of" in printed
    )
    assert lines_of(printed)[PROPERTIES["splits"]] == "pass"


def test_what_depends_on_a_violated_property_is_not_checked(dot, capsys):
    words = dot(GOOD, "bare_dot")
    path = Path("bare_dot.py")
    path.write_text(path.read_text().replace('["go right"] * len(ids)', '[""] * len(ids)'))
    assert main(["check", *words]) == EXIT_FAULT
    results = lines_of(capsys.readouterr().out)
    assert results[PROPERTIES["observation"]] == "FAIL" and results[PROPERTIES["idle"]] == "not checked"


def test_a_gymnasium_id_is_checked_and_long_episodes_are_cut(capsys):
    assert main(["check", "env=gymnasium", "env.id=Pendulum-v1", "env.num_processes=0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("episodes of up to 200 env steps are truncated at 64; env.max_episode_steps=<number>")
    assert "FAIL" not in printed and "not checked" not in printed
    assert main(["check", "env=gymnasium", "env.id=Pendulum-v1", "env.num_processes=0", "env.max_episode_steps=9"]) == 0
    assert "are cut" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of a policy with random weights."""
    import rlinf

    return rlinf.train([
        "experiment=tabletop_ppo_mlp", "rollout.num_envs=8", "trainer.minibatch_size=64", "evaluation.num_episodes=3",
        "evaluation.num_videos_per_task=0", "env.cameras=[]", "trainer.max_steps=1", "tracking.tensorboard=false",
        f"output_dir={tmp_path_factory.mktemp('outputs') / 'run'}",
    ])  # fmt: skip


def test_an_episode_becomes_a_video_and_ends_as_in_the_evaluation(run, here, capsys):
    import json

    counted = json.loads((run / "eval" / "after_rl" / "result.json").read_text())["results"][2]
    words = [f"checkpoint={run}", "episode=2", "window=false", "evaluation.video_size=64"]
    assert main(["play", *words]) == 0
    outcome = "success" if counted["success"] else "failure"
    first, last = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith(f"episode 2: {counted['task']}, '")
    assert f": {outcome} after {counted['num_env_steps']} env steps, return {counted['episode_return']:.3g}" in first
    path = Path(last.removeprefix("video: "))
    assert path == Path(f"outputs/tabletop_ppo_mlp/play/rl_000001_episode_002_{outcome}.mp4")
    assert path.read_bytes()[4:8] == b"ftyp"
    assert main(["play", *words, "output=mine.mp4"]) == 0 and Path("mine.mp4").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["episode=3"], "needs a checkpoint or run folder"), 
     (["checkpoint=RUN", "episode=999999", "env.num_eval_init_states=5"], "from 0. Set episode="),
     (["checkpoint=RUN", "output=RUN/metrics.jsonl"], "which exists and is not an .mp4 file"),
     (["checkpoint=RUN", "experiment_name=../../x", "output_dir=a"], "experiment_name is '../../x', which leads out of"),
     ],
)  # fmt: skip
def test_what_cannot_be_played_is_one_line(words, said, run, here, capsys):
    assert main(["play", *(word.replace("RUN", str(run)) for word in words)]) == EXIT_USER_ERROR
    printed = capsys.readouterr().err
    assert said in printed and len(printed.splitlines()) == 1
    assert list(here.iterdir()) == []


def test_an_audit_prints_its_rows_and_answers_and_writes_a_page(run, here, capsys):
    words = [f"checkpoint={run}", "evaluation.num_episodes=3"]
    assert main(["audit", *words]) == 0
    printed = capsys.readouterr().out
    for part in ("as evaluated", "/3", "all cameras black", "not possible here: the env shows no images", "of its first rollouts",
                 "Does it read the instruction?", "Does it use the robot's state?"):  # fmt: skip
        assert part in printed, part
    (folder,) = here.glob("outputs/tabletop_ppo_mlp/audit_*")
    data = json.loads((folder / "audit.json").read_text())
    assert data["num_episodes"] == 3 and data["rows"][0]["success"]["episodes"] == 3 and len(data["verdicts"]) == 8
    counted = json.loads((run / "eval" / "after_rl" / "result.json").read_text())["results"][:3]
    assert data["rows"][0]["success"]["successes"] == sum(one["success"] for one in counted), "as in the evaluation"
    assert "Does it react to changes during an episode?" in (folder / "report.html").read_text()
    assert main(["audit", *words, f"output_dir={folder}"]) == EXIT_USER_ERROR
    assert "output_dir=<new folder>" in capsys.readouterr().err
    assert main(["audit", "env=tabletop"]) == EXIT_USER_ERROR and "needs a checkpoint" in capsys.readouterr().err


def test_an_interrupted_audit_goes_on_where_it_stopped_and_with_the_same_policy_only(run, here, capsys, monkeypatch):
    words = [f"checkpoint={run}", "env.tasks=[reach]", "evaluation.num_episodes=2"]
    assert main(["audit", *words, "output_dir=whole"]) == 0 and not (here / "whole" / "audit.partial").exists()
    add, played = AuditCheckpoint.add, []

    def counted(self, key, result):
        played.append(key)
        add(self, key, result)

    def stopped(self, key, result):
        if len(played) == 5:
            raise KeyboardInterrupt
        counted(self, key, result)

    monkeypatch.setattr(AuditCheckpoint, "add", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_audit(configured(parse([*words, "output_dir=parts"])))
    hint = "to continue, run the same command with output_dir=parts"
    assert f"5 conditions are saved in parts; {hint}" in capsys.readouterr().err
    for changed, both in (
        (["evaluation.greedy=false"], "greedy: saved true, present false"),
        (["model=mlp", "env=tabletop"], "rl_000001, but this audit is of model.model_type=mlp without a checkpoint"),
    ):
        other = [*(words if len(changed) == 1 else words[1:]), *changed, "output_dir=parts"]
        assert main(["audit", *other]) == EXIT_USER_ERROR
        printed = capsys.readouterr().err
        assert both in printed and "contains 5 conditions" in printed and "output_dir=<new folder>" in printed
    monkeypatch.setattr(AuditCheckpoint, "add", counted)
    assert main(["audit", *words, "output_dir=parts"]) == 0
    found = [(here / name / "audit.json").read_text() for name in ("whole", "parts")]
    assert found[0] == found[1] and "5 conditions were already done" in capsys.readouterr().out
    rows = [row["key"] for row in json.loads(found[0])["rows"] if row["success"] is not None]
    assert sorted(played) == sorted(rows), "each condition was played once"
    assert [path.name for path in sorted((here / "parts").iterdir())] == ["audit.json", "report.html"]


def test_what_a_policy_has_seen_follows_from_its_own_run_and_not_from_the_settings_of_the_audit(run):
    def known(*overrides: str):
        config = configured(parse([f"checkpoint={run}", *overrides]))
        env = make_env(config.env, 1, auto_reset=False)
        seen, note = seen_episodes(config, env, 100)
        split = env.episode_specs("train")
        env.close()
        return list(seen), note, split

    seen, note, split = known()
    draws = [derive_seed(0, "episode", 0, group, 0, 0) % 100_000 for group in range(8)]
    num_tasks = len(split) // 100_000
    played = [split[draw * num_tasks + group % num_tasks] for group, draw in enumerate(draws)]
    assert (seen, note) == (played, "of its first rollouts"), "one iteration of eight envs"
    others = [
        "seed=7",
        "trainer.max_steps=50",
        "rollout.num_envs=64",
        "env.num_eval_init_states=500",
        "sft.num_demonstrations=3",
    ]
    assert known(*others)[:2] == (seen, note)
    for changed in ("env.tasks=[reach_zone]", "env.num_train_init_states=1000"):
        assert known(changed)[1] == NOT_KNOWN
