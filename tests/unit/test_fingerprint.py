"""The fingerprint shows that a simulator has changed, and is silent if it has not."""

import json
import re

import numpy as np
import pytest

from rlinf.envs import make_env
from rlinf.envs.tabletop import scene
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.evaluation import fingerprint
from rlinf.evaluation.fingerprint import compare_fingerprints, pose_gap, take_fingerprint

TABLETOP_XML = scene.tabletop_xml


def fingerprint_of(monkeypatch, old: str = "", new: str = "", num_envs: int = 4, **settings) -> dict:
    """Return the fingerprint of a tabletop whose XML has ``old`` replaced by ``new``, as a manifest returns it."""
    assert not old or old in TABLETOP_XML()
    monkeypatch.setattr(scene, "tabletop_xml", lambda: TABLETOP_XML().replace(old, new) if old else TABLETOP_XML())
    env = make_env(TabletopConfig(image_size=32, **settings), num_envs, auto_reset=False)
    try:
        return json.loads(json.dumps(take_fingerprint(env)))
    finally:
        env.close()


CHANGES = {
    "darker table": ('rgba="0.23 0.23 0.25 1"', 'rgba="0.15 0.15 0.17 1"', "camera front differs by up to .*brightness -1"),
    "red block is green": ("0.90 0.10 0.10 1", "0.10 0.90 0.10 1", "at the start: camera front"),
    "gravity": ('gravity="0 0 0"', 'gravity="0 0 -9.81"', "after 12 fixed actions: pusher is .* mm"),
    "friction of the blocks": ('frictionloss="0.2"', 'frictionloss="0.5"', "block_.* mm and .* degrees from its earlier pose"),
    "softer motors": ('kp="400.0"', 'kp="360.0"', "state dimensions differ"),
    "camera": ('pos="0 -0.28 0.86"', 'pos="0.04 -0.28 0.86"', "at the start: camera front"),
    "pusher higher": ('<joint name="pusher_z" type="slide"', '<joint name="pusher_z" ref="0.01" type="slide"', "at the start: pusher is 10.0 mm"),
    "name": ('name="block_red"', 'name="cube_red"', "the object block_red is missing"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_simulator_is_noticed(monkeypatch, change):
    old, new, words = CHANGES[change]
    settings = {"friction of the blocks": {"tasks": ["push"]}, "softer motors": {"cameras": []}}.get(change, {})
    before, after = fingerprint_of(monkeypatch, **settings), fingerprint_of(monkeypatch, old, new, **settings)
    assert set(before["episodes"][0]["start"]["images"]) == set(settings.get("cameras", ["front"]))
    lines = compare_fingerprints(before, after)
    assert [line for line in lines if re.search(words, line)], lines


NAN = float("nan")
EDITS = {
    "instruction": (lambda episode: episode.update(instruction="reach it"), "the instruction is 'reach it', was 're.*'$"),
    "position": (lambda episode: episode["end"]["poses"]["pusher"].__setitem__(0, NAN), "nan"),
    "orientation": (lambda episode: episode["end"]["poses"]["pusher"].__setitem__(4, NAN), "nan"),
    "state": (lambda episode: episode["end"]["state"].__setitem__(1, NAN), "nan"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_number_or_sentence_is_one_difference(monkeypatch, edit):
    before, (change, words) = fingerprint_of(monkeypatch), EDITS[edit]
    after = json.loads(json.dumps(before))
    change(after["episodes"][0])
    (line,) = compare_fingerprints(before, after)
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "damaged", [{}, [], {"num_actions": 12}, {"num_actions": 12, "episodes": [{}]}, {"num_actions": 12, "episodes": 3}]
)
def test_a_damaged_fingerprint_is_one_line(monkeypatch, damaged):
    present = fingerprint_of(monkeypatch)
    for saved, now in ((damaged, present), (present, damaged)):
        (line,) = compare_fingerprints(saved, now)
        assert "a fingerprint cannot be read" in line
    broken = json.loads(json.dumps(present))
    broken["episodes"][0]["start"]["images"]["front"] |= {"sha256": "0", "thumbnail": "no digits"}
    assert "a fingerprint cannot be read" in compare_fingerprints(broken, present)[0]


def test_an_unchanged_simulator_is_not(monkeypatch):
    before = fingerprint_of(monkeypatch, cameras=["front", "wrist"])
    assert before["episodes"][0]["start"]["images"].keys() == {"front", "wrist"}
    assert compare_fingerprints(before, fingerprint_of(monkeypatch, cameras=["front", "wrist"])) == []


def test_fingerprint_does_not_depend_on_the_number_of_envs_and_compares_what_is_common(monkeypatch):
    four = fingerprint_of(monkeypatch)
    nine = fingerprint_of(monkeypatch, num_envs=9)
    assert nine == four
    one = fingerprint_of(monkeypatch, num_envs=1)
    assert len(one["episodes"]) == 1 and compare_fingerprints(four, one) == [] and compare_fingerprints(one, four) == []
    assert compare_fingerprints(four, fingerprint_of(monkeypatch, tasks=["push"])) == []
    assert compare_fingerprints(four, fingerprint_of(monkeypatch, cameras=["side"])) == []
    assert compare_fingerprints(None, four) == compare_fingerprints(four, None) == []


def test_small_differences_of_a_rasteriser_are_not_reported_and_larger_ones_are(monkeypatch):
    before = fingerprint_of(monkeypatch)
    for gap, noticed in ((1, False), (3, False), (4, True)):
        after = json.loads(json.dumps(before))
        image = after["episodes"][0]["start"]["images"]["front"]
        levels = np.frombuffer(bytes.fromhex(image["thumbnail"]), np.uint8)
        image["thumbnail"], image["sha256"] = (levels.clip(max=200) + gap).astype(np.uint8).tobytes().hex(), "other"
        assert bool(compare_fingerprints(before, after)) is noticed


def test_gap_of_poses_is_that_of_geometry():
    half = np.radians(30) / 2
    turned = [np.cos(half), 0, 0, np.sin(half)]
    assert pose_gap([0, 0, 0, 1, 0, 0, 0], [0.003, 0.004, 0, *turned]) == pytest.approx((0.005, 30.0))
    assert pose_gap([0, 0, 0, 1, 0, 0, 0], [0, 0, 0, -1, 0, 0, 0]) == pytest.approx((0.0, 0.0))


def test_every_body_of_the_tabletop_has_a_pose_where_the_simulator_puts_it():
    env = make_env(TabletopConfig(cameras=[], tasks=["push"]), 2, auto_reset=False)
    env.reset(options={"episodes": env.episode_specs("eval")[0:2]})
    pusher, _, blocks = env._simulator.read(np.arange(2))
    for row, poses in enumerate(env.poses([0, 1])):
        assert poses["block_green"][:2] == pytest.approx(blocks[row, 1])
        assert poses["pusher"][:2] == pytest.approx(pusher[row]) and all(len(pose) == 7 for pose in poses.values())
    env.close()


def test_actions_stay_within_bounds_and_a_thumbnail_is_the_mean_of_its_cells():
    low, high = np.array([-1.0, 0.0, 5.0]), np.array([1.0, 0.5, 6.0])
    actions = fingerprint.fixed_actions(low, high, 3)
    assert (actions == actions[0]).all() and (actions >= low).all() and (actions <= high).all()
    assert len(np.unique(actions[0], axis=0)) == fingerprint.NUM_ACTIONS / fingerprint.HOLD_STEPS
    image = np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)
    # 50 = 7 + 7 + 6 * 6: numpy splits the remainder over the first cells
    assert (fingerprint.thumbnail(image)[1, 2] == image[7:14, 14:20].reshape(-1, 3).mean(0).round()).all()
