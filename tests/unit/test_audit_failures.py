"""Audits in which something fails: what the policy rejects is a row, and what is lost or broken ends the audit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlinf.audits.auditor import Auditor
from rlinf.audits.checkpoint import AuditCheckpoint
from rlinf.audits.verdicts import NO, UNKNOWN, YES, ConditionRow, success_label_verdict
from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    PolicyServerError,
    RejectedRequestError,
    SimulatorError,
)
from rlinf.evaluation.disturbed_env import EpisodeRecord
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.intervals import wilson_interval
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.types import EpisodeResult, EpisodeSpec
from tests.fixtures.audited_policies import StateOnly

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIG = TabletopConfig(tasks=["reach"], state="full", cameras=["front"], image_size=8, max_episode_steps=12)


@pytest.fixture(scope="module")
def table():
    env = make_env(CONFIG, 6, auto_reset=False)
    yield env
    env.close()


class Fails(StateOnly):
    """Raises in the calls that ``when`` is true of, or returns what is given instead of an error."""

    def __init__(self, when, failure) -> None:
        self.when, self.failure = when, failure

    def act(self, seen):
        if not self.when(seen):
            return super().act(seen)
        if isinstance(self.failure, Exception):
            raise self.failure
        return self.failure


def is_blank(seen) -> bool:
    return "" in seen.instruction


def audited(policy, env):
    specs, seen = ([env.episode_specs(split)[n] for n in range(6)] for split in ("eval", "train"))
    audit = Auditor(policy, env, specs).run(seen, "not known", lambda what: None)
    return audit, {row.key: row for row in audit.rows}


@pytest.mark.parametrize(
    ("rejection", "note"),
    [
        (ConfigError("no instruction"), "no instruction"),
        (RejectedRequestError("ws://a answers: no instruction"), "ws://a answers: no instruction"),
        (np.full((6, 2), np.nan), "returned actions of the shape [6, 1, 2]"),
    ],
    ids=["error", "server", "nan"],
)
def test_what_a_policy_refuses_is_a_row(rejection, note, table):
    audit, rows = audited(Fails(is_blank, rejection), table)
    assert rows["blank"].success is None and note in rows["blank"].note
    assert rows["black"].success is not None and rows["pushed"].success is not None and len(audit.verdicts) == 8


@pytest.mark.parametrize("error", [PolicyServerError("lost"), SimulatorError("lost"), NonFiniteError("NaN")])
def test_what_is_lost_or_broken_ends_the_audit(error, table):
    with pytest.raises(type(error), match=str(error)):
        audited(Fails(is_blank, error), table)


def test_a_policy_that_refuses_everything_from_then_on_ends_the_audit(table):
    class IsGone:
        gone = False

        def __call__(self, seen) -> bool:
            self.gone = self.gone or is_blank(seen)
            return self.gone

    with pytest.raises(RejectedRequestError, match="out of memory"):
        audited(Fails(IsGone(), RejectedRequestError("out of memory")), table)


def test_planted_false_successes_have_the_given_rate_and_are_a_function_of_the_episode(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Imported here because the import registers an env, which the test's end removes again.
    from label_noise import NoisyTabletopConfig, NoisyTabletopEnv

    def outcomes(num_envs: int) -> list[tuple[bool, int, bool]]:
        config = NoisyTabletopConfig(
            tasks=["reach"], cameras=[], max_episode_steps=8, tolerance_m=1e-3, success_label_noise=0.3
        )
        env = NoisyTabletopEnv(config, num_envs, auto_reset=False)
        specs = [EpisodeSpec("tabletop", 0, 0, seed) for seed in range(200)]
        episodes = evaluate_policy(lambda seen: np.zeros((len(seen), 2), dtype=np.float32), env, specs).results
        env.close()
        return [(bool(episode.success), episode.num_env_steps, episode.true_success) for episode in episodes]

    first = outcomes(40)
    assert first == outcomes(7) and not any(true for _, _, true in first)
    low, high = wilson_interval(sum(success for success, _, _ in first), 200)
    assert low < 0.3 < high and {steps for success, steps, _ in first if success} == set(range(1, 9))


@pytest.mark.parametrize(("rate", "answer"), [(1.0, NO), (1e-9, UNKNOWN)])
def test_an_audit_says_whether_detected_successes_are_true(monkeypatch, rate, answer):
    """Planted errors alone make an idle policy succeed: in all episodes, or in none."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from label_noise import NoisyTabletopConfig, NoisyTabletopEnv

    config = NoisyTabletopConfig(
        tasks=["reach"], state="full", cameras=["front"], image_size=8, max_episode_steps=12, success_label_noise=rate
    )
    env = NoisyTabletopEnv(config, 6, auto_reset=False)

    class Idle:
        def act(self, seen):
            return np.zeros((len(seen), 2), dtype=np.float32)

    audit, rows = audited(Idle(), env)
    env.close()
    assert rows["clean"].success.successes == 6 * (rate == 1.0)
    assert (audit.verdicts[-1].outcome, audit.verdicts[-1].is_fault, len(audit.verdicts)) == (answer, answer == NO, 9)


def test_false_seen_successes_are_counted_by_hand():
    def played(*outcomes) -> EvaluationResult:
        spec = EpisodeSpec("lamp", 0, 0, 0)
        return EvaluationResult([EpisodeResult(spec, "a", seen, 1.0, 3, true_success=true) for seen, true in outcomes])

    good, idle = [(True, True)] * 7 + [(False, False), (False, True)], Success(2, 9)
    found = success_label_verdict(played(*good), idle)
    assert (found.outcome, found.is_fault) == (YES, False) and "0 of 7" in found.reason
    found = success_label_verdict(played(*good, (True, False)), idle)
    assert (found.outcome, found.is_fault) == (NO, True)
    assert "1 of 8 detected successes are false (95 % 2.2% - 47.1%)" in found.reason and "80.0% (8/10)" in found.reason
    blind = success_label_verdict(played((True, None), (False, None)), idle)
    assert (blind.outcome, blind.is_fault) == (
        UNKNOWN,
        False,
    ) and "22.2% (2/9) are detected without a policy" in blind.reason


def test_conditions_that_need_another_episode_play_those_that_have_one():
    """Three episodes of a task and one of another task, which has no other one."""
    env = make_env(replace(CONFIG, tasks=["reach", "reach_zone"], max_episode_steps=None), 4, auto_reset=False)
    reach, zone = ([spec for spec in env.episode_specs("eval")[:8] if spec.task_id == task] for task in (0, 1))

    def rows_of(specs) -> dict[str, ConditionRow]:
        auditor = Auditor(StateOnly(), env, specs)
        return {row.key: row for row in auditor.run([], "not known", lambda what: None).rows}

    rows = rows_of([*reach[:3], zone[0]])
    assert rows["clean"].success == Success(4, 4)
    for key in ("other_actions", "other_images", "other_state"):
        assert rows[key].success.episodes == rows[key].pairs.episodes == rows[key].pairs.a.successes == 3, key
    rows = rows_of([reach[0], zone[0]])
    env.close()
    assert rows["other_actions"].note == "for most episodes, no other episode of the task succeeded"


def test_conditions_of_an_interrupted_audit_are_rejected_where_they_differ_or_are_damaged(tmp_path):
    specs = [EpisodeSpec("dots", 0, number, 1) for number in range(3)]
    numbers = np.zeros((2, 2), np.float32)
    records = {
        spec: EpisodeRecord({"front": np.zeros((4, 5, 3), np.uint8)}, numbers[0], "go", [*numbers]) for spec in specs
    }
    result = EvaluationResult([EpisodeResult(spec, "dot", True, 1.0, 2) for spec in specs], warnings=["a warning"])
    kept = AuditCheckpoint(tmp_path, "one", {"weights": {"a": 1}})
    (tmp_path / "audit.partial").mkdir()
    kept.add_records(records, specs)
    for key in ("clean", "black_front/left"):
        kept.add(key, result)
    again = AuditCheckpoint(tmp_path, "one", {"weights": {"a": 1}})
    assert again.num_known == 2 and again.result("black_front/left", specs) == result
    said = "2 conditions .* audit of one, but this audit is of two and differs: .*weights.a: saved 1, present 2"
    with pytest.raises(ConfigError, match=said):
        AuditCheckpoint(tmp_path, "two", {"weights": {"a": 2}})
    with pytest.raises(CheckpointError, match="its episodes differ from this audit's"):
        again.result("clean", specs[::-1])
    for name, read in (
        ("records.npz", lambda: again.records(specs)),
        ("clean.json", lambda: again.result("clean", specs)),
        ("conditions.json", lambda: AuditCheckpoint(tmp_path, "one", {"weights": {"a": 1}})),
    ):
        path = tmp_path / "audit.partial" / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(CheckpointError, match=f"{name}, saved by an interrupted audit, cannot.*output_dir="):
            read()
