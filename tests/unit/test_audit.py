"""Audits of scripted policies: each cheater is found, and an honest policy is not accused."""

from dataclasses import replace

import numpy as np
import pytest

import rlinf
from rlinf.audits.auditor import Audit, Auditor, brighten, paraphrased, shift, swapped
from rlinf.audits.command import check, write_audit
from rlinf.audits.verdicts import NO, UNCLEAR, UNKNOWN, YES, ConditionRow, Effect, verdicts
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.env import MOVED_M, TabletopVectorEnv
from rlinf.envs.tabletop.scene import BLOCK_COLOURS, ZONE_COLOURS
from rlinf.errors import ConfigError
from rlinf.evaluation.compare import Pairs
from rlinf.evaluation.disturbed_env import DisturbedEnv, NoPolicy, TimedPush, draw_push, fixed, pushed
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import Success
from tests.fixtures.audited_policies import (
    Blind,
    Deaf,
    Honest,
    Replays,
    SameTable,
    Sees,
    StateOnly,
    StateOnlyByDay,
    motions_of_the_expert,
)

CONFIG = TabletopConfig(tasks=["reach", "reach_zone"], state="proprio", cameras=["front"], image_size=32)
NUM_EPISODES = 20


@pytest.fixture(scope="module")
def table():
    env = make_env(CONFIG, NUM_EPISODES, auto_reset=False)
    yield env
    env.close()


@pytest.fixture(scope="module")
def full_state():
    env = make_env(replace(CONFIG, state="full"), NUM_EPISODES, auto_reset=False)
    yield env
    env.close()


@pytest.fixture(scope="module")
def same_table():
    env = SameTable(CONFIG, NUM_EPISODES, auto_reset=False)
    yield env
    env.close()


@pytest.fixture(scope="module")
def sees(table):
    return Sees(table)


def audited(policy, env, with_moved: bool = False) -> Audit:
    def moved(what: str):
        return make_env(env.moved(env.config, what), env.num_envs, auto_reset=False) if with_moved else None

    specs, seen = ([env.episode_specs(split)[n] for n in range(NUM_EPISODES)] for split in ("eval", "train"))
    return Auditor(policy, env, specs).run(seen, "", moved)


def answers(audit: Audit) -> dict[str, str]:
    names = ("better", "at reset", "reads", "looks", "state", "reacts", "remembers", "breaks")
    return dict(zip(names, (one.outcome for one in audit.verdicts), strict=True))


def test_an_honest_policy_is_not_accused(table, sees, tmp_path):
    audit = audited(Honest(sees), table, with_moved=True)
    assert list(answers(audit).values()) == [YES, NO, YES, YES, YES, YES, NO, NO] and audit.faults == []
    assert audit.summary() == "Cheats: nothing found. Breaks when: nothing found. Partly: nothing found."
    rates = {row.key: row.success.success_rate for row in audit.rows if row.success is not None}
    assert rates["clean"] == rates["paraphrased"] == rates["moved_objects"] == rates["seen"] == 1.0
    assert rates["idle"] == rates["black"] == rates["blank"] == 0.0
    page = write_audit(audit, tmp_path, "Audit of honesty", {"env": "tabletop"}).read_text()
    assert "Cheats: nothing found." in page and all(row.title in page for row in audit.rows)
    assert (tmp_path / "audit.json").is_file()


def test_a_brighter_camera_that_stops_an_honest_policy_is_a_break_and_no_fault(table, sees):
    honest, usual = Honest(sees), table.reset()[0].images["front"].mean()

    class Dazzled:
        def act(self, observation):
            actions = np.asarray(honest.act(observation))
            actions[observation.images["front"].mean((1, 2, 3)) > 1.2 * usual] = 0.0
            return actions

    audit = audited(Dazzled(), table)
    assert audit.faults == [] and "Breaks when: camera front 30% brighter (-100.0 points)." in audit.summary()


def test_one_motion_that_fits_all_episodes_is_no_fault_of_an_honest_policy(same_table, sees):
    audit = audited(Honest(sees), same_table)
    assert audit.faults == [] and answers(audit)["remembers"] == UNCLEAR
    assert "one motion fits all episodes" in audit.verdicts[-2].reason


def test_a_policy_that_ignores_the_instruction_is_found(full_state, sees):
    audit = audited(Deaf(sees), full_state)
    assert [one.question for one in audit.faults] == ["Does it read the instruction?"]
    found = answers(audit)
    assert (found["reads"], found["looks"], found["reacts"]) == (NO, YES, YES)


def test_a_policy_that_reads_only_the_state_is_found_in_python():
    audit = rlinf.audit(StateOnlyByDay().act, replace(CONFIG, state="full"), episodes=NUM_EPISODES)
    found = answers(audit)
    assert {row.key: row for row in audit.rows}["black"].success.successes == 0, "which is no sign that it looks"
    assert audit.num_episodes == NUM_EPISODES and "not known" in {row.key: row.note for row in audit.rows}["seen"]
    with pytest.raises(
        ConfigError, match="An audit has 1 episodes; expected at least 2.*Set evaluation.num_episodes=100"
    ):
        rlinf.audit(StateOnly(), CONFIG, episodes=1)
    with pytest.raises(ConfigError, match="split=train would make the audit compare .* Set evaluation.split=eval"):
        rlinf.audit(StateOnly(), CONFIG, overrides=["evaluation.split=train"])
    assert (found["reads"], found["looks"], found["state"], found["reacts"]) == (NO, NO, YES, YES)


def test_a_blind_policy_is_found(same_table):
    places = dict(zip([*BLOCK_COLOURS, *ZONE_COLOURS], [*SameTable.places] * 2, strict=True))
    found = answers(audited(Blind(places), same_table))
    assert (found["reads"], found["looks"], found["reacts"]) == (YES, NO, YES)


def test_a_policy_that_replays_one_motion_for_each_sentence_is_found(same_table):
    specs = [same_table.episode_specs("train")[number] for number in range(NUM_EPISODES)]
    motions = {seen.instruction[0]: motion for seen, motion in motions_of_the_expert(same_table, specs)}
    found = answers(audited(Replays(motions), same_table))
    assert (found["better"], found["looks"], found["reacts"], found["remembers"]) == (YES, NO, NO, YES)


def test_a_policy_that_remembers_its_training_is_found(table):
    specs = [table.episode_specs("train")[number] for number in range(NUM_EPISODES)]
    motions = {seen.images["front"][0].tobytes(): motion for seen, motion in motions_of_the_expert(table, specs)}
    audit = audited(Replays(motions, by_picture=True), table)
    found = answers(audit)
    assert (found["better"], found["remembers"], found["reads"], found["looks"]) == (NO, YES, UNKNOWN, UNKNOWN)
    assert "+100.0 points" in audit.verdicts[-2].reason


def test_replayed_actions_give_the_same_episodes_and_pushes_are_where_they_are_said_to_be(full_state):
    specs = [full_state.episode_specs("eval")[number] for number in range(NUM_EPISODES)]
    records: dict = {}
    played = evaluate_policy(StateOnly(), DisturbedEnv(full_state, records=records), specs).results
    actions = {spec: np.stack(record.actions) for spec, record in records.items()}
    assert [len(actions[one.spec]) for one in played] == [one.num_env_steps for one in played]
    for num_actions in (1, 3, 16):
        again = DisturbedEnv(full_state, motion=fixed(actions))
        assert evaluate_policy(NoPolicy(2, num_actions), again, specs).results == played
    pushes = {spec: TimedPush(2, 4, np.array([1.0, -1.0])) for spec in specs}
    after: dict = {}
    disturbed = DisturbedEnv(full_state, motion=pushed(pushes, fixed(actions)), records=after)
    evaluate_policy(NoPolicy(2, 3), disturbed, specs)
    for spec, record in after.items():
        expected = np.zeros((full_state.max_episode_steps, 2), np.float32)
        expected[: len(actions[spec])] = actions[spec]
        expected[2:4] = 1.0, -1.0
        assert np.array_equal(record.actions, expected[: len(record.actions)])


def test_pushes_go_to_a_corner_of_the_action_space_after_a_third_of_the_episode(table):
    low, high = table.action_low, table.action_high
    pushes = [draw_push(spec, low, high, 12) for spec in table.episode_specs("eval")[:20]]
    assert {(push.start, push.end) for push in pushes} == {(4, 7)}
    assert {tuple(push.action.tolist()) for push in pushes} == {(-1, -1), (-1, 1), (1, -1), (1, 1)}
    assert draw_push(table.episode_specs("eval")[0], low, high, 2).end == 2


def test_an_answer_needs_an_interval_on_one_side_of_a_quarter_of_the_stake():
    assert Effect(0.5, 0.21, 0.7, 0.8).outcome == YES
    assert Effect(0.5, 0.19, 0.7, 0.8).outcome == UNCLEAR
    assert Effect(0.1, -0.1, 0.19, 0.8).outcome == NO
    assert Effect(0.1, -0.1, 0.21, 0.8).outcome == UNCLEAR


def test_a_policy_no_better_than_random_is_not_accused_of_deafness():
    """And what was not possible is told, by hand-made rows."""
    rate, none = Success(15, 20), ConditionRow("", "", note="the env shows no images")
    pairs = Pairs(15, 0, 0, 5)
    keys = "clean idle random swapped frozen pushed_replay other_actions".split()
    rows = {key: ConditionRow(key, key, rate, pairs) for key in keys}
    rows |= {key: none for key in ("other_images", "black", "other_state", "seen")}
    found = verdicts(rows, 2, {"baseline": pairs})
    assert [one.outcome for one in found] == [NO, YES, *[UNKNOWN] * 6]
    assert [one.is_fault for one in found] == [True, True, *[False] * 6]
    better = rows | {"idle": ConditionRow("", "", Success(0, 20)), "random": ConditionRow("", "", Success(0, 20))}
    found = verdicts(better, 0, {"baseline": Pairs(0, 0, 15, 5)})
    assert found[3].reason == "the env shows no images" and not found[3].is_fault
    brighter = ConditionRow("", "camera front brighter", Success(0, 20), Pairs(0, 15, 0, 5))
    broken = verdicts(better | {"brighter_front": brighter}, 0, {"baseline": Pairs(0, 0, 15, 5)})[-1]
    assert (broken.outcome, broken.is_fault, broken.is_good) == (YES, False, False), "a yes that is bad news"
    assert broken.breaks == ("camera front brighter (-75.0 points)",), "the sign of the answer"
    assert "camera front brighter: -75.0 points of 75.0" in broken.reason


def test_other_sentences_ask_for_something_else():
    red, blue = "reach the red block", "reach the blue block"
    pairs = [(one, other) for one in ("red", "green", "blue") for other in ("cyan", "yellow")]
    pushes = [f"push the {one} block to the {other} zone" for one, other in pairs]
    tasks = {"reach": [red, blue, red], "push": pushes, "open": ["open the drawer"]}
    found = swapped(tasks)
    assert found[red] == blue and found[blue] == red
    assert all(one.split()[2] != found[one].split()[2] for one in tasks["push"]), "the first object, too"
    assert found["open the drawer"] not in ("open the drawer", None)
    assert swapped({"open": ["open the drawer"]}) == {}
    assert paraphrased(["go to the cyan zone", "reach the red block"]) == {
        "go to the cyan zone": "please drive to the cyan area now",
        "reach the red block": "please move to the red cube now",
    }


def test_pictures_are_shifted_to_the_right_and_brightened_up_to_white():
    image = np.arange(16, dtype=np.uint8).reshape(1, 1, 16, 1).repeat(3, axis=3) * 16
    assert shift(image)[0, 0, :, 0].tolist() == [0, *range(0, 240, 16)]
    assert brighten(image)[0, 0, [0, 5, 15], 0].tolist() == [0, 104, 255]


def test_the_table_moves_its_objects_and_its_cameras_and_nothing_else(table):
    specs = [table.episode_specs("eval")[number] for number in range(6)]

    def begin(config: TabletopConfig) -> tuple[np.ndarray, list[dict]]:
        env = make_env(config, 6, auto_reset=False)
        observation, _ = env.reset(options={"episodes": specs})
        poses = env.poses(range(6))
        env.close()
        return observation.images["front"], poses

    images, poses = begin(CONFIG)
    with_objects, moved = begin(TabletopVectorEnv.moved(CONFIG, "objects"))
    for before, after in zip(poses, moved, strict=True):
        for name in before:
            gap = np.linalg.norm(np.array(after[name][:2]) - before[name][:2])
            is_shown = abs(before[name][0]) < 1 and name.startswith(("block", "zone"))
            assert gap == pytest.approx(MOVED_M if is_shown else 0, abs=1e-9), name
    from_elsewhere, same = begin(TabletopVectorEnv.moved(CONFIG, "cameras"))
    assert same == poses and not np.array_equal(from_elsewhere, images) and not np.array_equal(with_objects, images)
    assert TabletopVectorEnv.moved(CONFIG, "lamps") is None


def test_what_an_audit_does_not_do_is_refused(tmp_path):
    config = build_config(compose_config(["model=cnn", "env=tabletop", f"output_dir={tmp_path / 'new'}"]))
    check(config)
    wrongs = {
        "evaluation": {"stop_when": 0.1, "compare": "a", "split": "train"},
        "cluster": {"num_rollout_workers": 2, "num_processes": 2},
    }
    for section, key, value in ((section, *item) for section, values in wrongs.items() for item in values.items()):
        wrong = replace(config, **{section: replace(getattr(config, section), **{key: value})})
        said = f"{section}.{key}={value} (with `rlinf audit`|in an audit|would make the audit).* Set {section}.{key}="
        with pytest.raises(ConfigError, match=said):
            check(wrong)
