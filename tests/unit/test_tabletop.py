"""The built-in simulator: goals, rewards, experts, images."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.envs.tabletop.scene import BLOCK_COLOURS, WORKSPACE_M, ZONE_COLOURS
from rlinf.envs.tabletop.tasks import FAMILIES, MIN_DISTANCE_M
from rlinf.errors import ConfigError


def build(num_envs, auto_reset=False, **settings):
    return make_env(TabletopConfig(**settings), num_envs, auto_reset=auto_reset)


def start(env, split="eval", first=0):
    """Reset to consecutive episodes of a split."""
    return env.reset(options={"episodes": env.episode_specs(split)[first : first + env.num_envs]})[0]


def run(env, act):
    start(env)
    results = []
    for _ in range(env.max_episode_steps):
        results += env.chunk_step(act()[:, None]).episodes
    assert len(results) == env.num_envs
    return np.mean([result.success for result in results])


@pytest.mark.parametrize("distractors", [False, True])
@pytest.mark.parametrize("task", list(FAMILIES))
def test_expert_succeeds_and_idling_does_not(task, distractors):
    env = build(80, tasks=[task], cameras=[], distractors=distractors)
    assert run(env, env.expert_actions) >= 0.95
    assert run(env, lambda: np.zeros((80, 2))) == 0.0


def test_miscalibrated_expert_succeeds_sometimes():
    env, generator = build(200, tasks=["reach"], cameras=[]), np.random.default_rng(0)
    rates = [
        run(env, lambda: env.expert_actions((offset, 0.0)) + 0.2 * generator.normal(size=(200, 2)))  # noqa: B023
        for offset in (0.0, 0.055, 0.07)
    ]
    assert rates[0] >= 0.95 and 0.6 < rates[1] < 0.9 and 0.15 < rates[2] < 0.45


def aims(env, **options):
    """Where the expert leads the pusher after many steps, seen from the target in metres: ``[B, 2]``."""
    for _ in range(15):
        env.chunk_step(env.expert_actions(**options)[:, None])
    scene, families = env._scene(np.arange(env.num_envs)), env._by_family(np.arange(env.num_envs))
    target = np.zeros((env.num_envs, 2))
    for rows, family in families:
        target[rows] = family.aim(env._scene(rows))
    return scene.pusher - target


def test_an_error_by_instruction_has_six_directions_evenly_over_the_circle():
    env = build(60, tasks=["reach", "reach_zone"], cameras=[], terminate_on_success=False)
    sentences = np.array(start(env).instruction)
    error = aims(env, aim_offset_m=(0.07, 0.0), aim_offset_rule="by_instruction")
    angles = np.degrees(np.arctan2(error[:, 1], error[:, 0])) % 360
    np.testing.assert_allclose(np.linalg.norm(error, axis=1), 0.07, atol=0.01)
    order = [f"reach the {each} block" for each in BLOCK_COLOURS] + [f"go to the {each} zone" for each in ZONE_COLOURS]
    for number, sentence in enumerate(order):
        own = angles[sentences == sentence]
        away = (own - 60 * number + 180) % 360 - 180
        assert len(own) and np.abs(away).max() < 10, (sentence, own)
    start(env)
    constant = aims(env, aim_offset_m=(0.07, 0.0))
    np.testing.assert_allclose(constant, [[0.07, 0.0]] * 60, atol=0.01)  # a control: without the rule there is one


def test_tolerance_is_the_distance_of_success():
    rates = []
    for tolerance in (0.1, 0.045, 0.02):
        env = build(200, tasks=["reach"], cameras=[], tolerance_m=tolerance)
        rates.append(run(env, env.expert_actions))
        assert run(env, lambda: env.expert_actions((tolerance - 0.008, 0.0))) > 0.9  # noqa: B023
        assert run(env, lambda: env.expert_actions((tolerance + 0.03, 0.0))) < 0.5  # noqa: B023
    assert min(rates) > 0.95


def paths_and_results(act, num_steps, **settings):
    """Return distances to all objects ``[num_steps, B, 3]`` and the targets' colours ``[B]``, and success and length of each episode."""
    free = build(100, tasks=["reach", "reach_zone"], cameras=[], terminate_on_success=False)
    held = build(100, tasks=["reach", "reach_zone"], cameras=[], **settings)
    distances, results = [], {}
    for env in (free, held):
        start(env)
    for _ in range(num_steps):
        free.chunk_step(act(free)[:, None])
        scene = free._scene(np.arange(100))
        objects = np.where(np.isnan(scene.blocks[:, :, :1]) | (scene.blocks[:, :, :1] > 1), scene.zones, scene.blocks)
        distances.append(np.linalg.norm(objects - scene.pusher[:, None], axis=2))
        step = held.chunk_step(act(held)[:, None])
        results |= {
            int(row): (episode.success, episode.num_env_steps)
            for row, episode in zip(step.final_env_ids, step.episodes, strict=True)
        }
    return np.stack(distances), scene.first, [results[row] for row in range(100)]


@pytest.mark.parametrize("hold_steps, wrong_object_ends", [(1, False), (3, False), (3, True)])
def test_success_and_failure_need_consecutive_steps_at_an_object(hold_steps, wrong_object_ends):
    """By a loop over each episode's distances, for a policy that visits all objects."""

    def act(env):
        return np.array([[0.8, 0.0], [0.0, 0.8], [-0.8, 0.0], [0.0, -0.8]], dtype=np.float32)[np.arange(100) % 4] * (
            np.arange(100)[:, None] % 3 / 2
        ).astype(np.float32)

    distances, first, results = paths_and_results(
        act, 16, tolerance_m=0.08, hold_steps=hold_steps, wrong_object_ends=wrong_object_ends
    )
    expected = []
    for row in range(100):
        counts, outcome = [0, 0, 0], (False, 16)
        for step in range(16):
            counts = [counts[c] + 1 if distances[step, row, c] < 0.08 else 0 for c in range(3)]
            right = counts[first[row]] >= hold_steps
            wrong = any(counts[c] >= hold_steps for c in range(3) if c != first[row])
            if right or (wrong and wrong_object_ends):
                outcome = (right, step + 1)
                break
        expected.append(outcome)
    assert results == expected
    assert (
        5 < sum(success for success, _ in results)
        and any(not success and steps < 16 for success, steps in results) == wrong_object_ends
    )


def test_visiting_all_objects_succeeds_unless_a_wrong_one_ends_the_episode():
    rates = []
    for settings in ({}, {"hold_steps": 3}, {"hold_steps": 3, "wrong_object_ends": True}):
        env = build(200, tasks=["reach", "reach_zone"], cameras=[], **settings)
        rates.append(run(env, env.uninstructed_actions))
        assert run(env, env.expert_actions) > 0.95
    assert rates[0] > 0.95 > rates[1] > 0.7 and 0.2 < rates[2] < 0.45  # one object in three is right
    with pytest.raises(ConfigError, match="without the instruction"):
        env = build(1, tasks=["push"], cameras=[])
        start(env)
        env.uninstructed_actions()


def test_wrong_objects_end_episodes_of_reach_tasks_only():
    with pytest.raises(ConfigError, match=r"env.tasks=\[reach,push\]; .*Set env.tasks=\[reach\]"):
        build(1, tasks=["push", "reach"], cameras=[], wrong_object_ends=True)


def test_a_goal_cannot_be_held_longer_than_the_shortest_episode():
    with pytest.raises(ConfigError, match=r"env.hold_steps=17.*at most 16.*Set env.hold_steps=16"):
        build(1, tasks=["push", "reach"], cameras=[], hold_steps=17)
    build(1, tasks=["push", "reach"], cameras=[], hold_steps=16)


def test_an_expert_that_sees_the_table_turned_aims_at_the_rotated_target():
    env = build(60, tasks=["reach", "reach_zone"], cameras=[], terminate_on_success=False)
    start(env)
    error = aims(env, aim_turn_deg=25)
    scene = env._scene(np.arange(60))
    target = scene.pusher - error
    angle = np.radians(25)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    np.testing.assert_allclose(scene.pusher, np.clip(target @ rotation.T, -0.28, 0.28), atol=0.01)


def test_layouts_are_spread_over_the_workspace():
    env = build(100, tasks=["push"], cameras=[])
    start(env)
    scene = env._scene(np.arange(100))
    points = np.concatenate([scene.pusher[:, None], scene.blocks, scene.zones], axis=1)
    gaps = np.linalg.norm(points[:, :, None] - points[:, None], axis=-1) + 9 * np.eye(7)
    assert gaps.min() >= MIN_DISTANCE_M and np.abs(points).max() <= WORKSPACE_M
    assert {*env._goals[:, 0]} == {0, 1, 2} and {*env._goals[:, 1]} == {0, 1, 2}


@pytest.mark.parametrize(("offset_m", "tolerance_m"), [(0.03, 0.045), (0.05, 0.1)])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_moved_objects_touch_nothing_and_no_episode_begins_with_success(family, offset_m, tolerance_m):
    """And a push is still possible. A single draw of directions, the control, breaks this in some layouts."""

    def is_fine(layout) -> bool:
        gaps = [
            np.linalg.norm(a - b)
            for a, b in itertools.combinations([layout.pusher, *layout.blocks, *layout.zones], 2)
            if not np.isnan(a).any() and not np.isnan(b).any()
        ]
        return min(gaps) >= max(0.08, tolerance_m) and family.accepts(layout)

    num_unfit = 0
    for seed in range(60):
        layout = family.sample(np.random.default_rng(seed), distractors=True)
        found = family.moved(layout, np.random.default_rng(seed), offset_m, tolerance_m)
        for before, after in ((layout.blocks, found.blocks), (layout.zones, found.zones)):
            np.testing.assert_allclose(np.linalg.norm(after - before, axis=1), offset_m)
        assert is_fine(found) and (found.pusher == layout.pusher).all()
        angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, 6)
        once = offset_m * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        num_unfit += not is_fine(replace(layout, blocks=layout.blocks + once[:3], zones=layout.zones + once[3:]))
    assert num_unfit > 0


def test_objects_for_which_there_is_no_place_are_an_error():
    layout = FAMILIES["reach"].sample(np.random.default_rng(0), distractors=False)
    layout = replace(layout, pusher=layout.blocks[0])
    with pytest.raises(ConfigError, match="Set env.object_offset_m"):
        FAMILIES["reach"].moved(layout, np.random.default_rng(0), 0.0, 0.045)


def test_instructions_name_colours():
    env = build(200, cameras=[])
    sentences = set(start(env).instruction)
    assert {f"reach the {colour} block" for colour in BLOCK_COLOURS} <= sentences
    assert {f"go to the {colour} zone" for colour in ZONE_COLOURS} <= sentences
    assert "touch the red block, then the blue block" in sentences
    assert "push the red block to the yellow zone" in sentences and len(sentences) == 3 + 3 + 6 + 9


def test_shaped_rewards_are_three_per_metre_of_progress():
    env = build(32, tasks=["reach", "reach_zone"], cameras=[], success_bonus=1.0)
    before = np.linalg.norm(start(env).state[:, 4:6], axis=1) * WORKSPACE_M
    step = env.chunk_step(env.expert_actions()[:, None].repeat(3, axis=1))
    after = np.linalg.norm(step.observation.state[:, 4:6], axis=1) * WORKSPACE_M
    np.testing.assert_allclose(step.rewards.sum(1), 3 * (before - after) + step.success, atol=1e-5)
    assert step.success.any() and not step.success.all()


def test_an_action_moves_by_about_five_centimetres_and_a_wrong_block_does_not_end_the_episode():
    env = build(1, tasks=["reach"], cameras=[])
    first = start(env).state[0, :2]
    signs = -np.sign(first)
    moved = (env.chunk_step(signs[None, None]).observation.state[0, :2] - first) * WORKSPACE_M
    np.testing.assert_allclose(moved, 0.05 * signs, atol=0.012)
    start(env)
    wrong = (env._goals[0, 0] + 1) % 3
    for _ in range(10):
        scene = env._scene(np.array([0]))
        way = scene.blocks[0, wrong] - scene.pusher[0]
        step = env.chunk_step(np.clip(way / 0.05, -1, 1)[None, None])
    assert np.linalg.norm(way) < 0.03 and not step.terminated.any()


def test_touching_in_the_wrong_order_does_not_succeed():
    env = build(100, tasks=["touch_two"], cameras=[])
    start(env)

    def wrong() -> np.ndarray:
        env._goals = env._goals[:, ::-1].copy()  # the expert is told the wrong order
        actions = env.expert_actions()
        env._goals = env._goals[:, ::-1].copy()
        return actions

    assert not np.allclose(wrong(), env.expert_actions())
    for _ in range(8):
        step = env.chunk_step(wrong()[:, None])
        assert not (step.success & (env._stages != 1)).any()


def test_horizons_are_the_tasks_own_unless_set_and_an_episode_does_not_depend_on_the_task_filter():
    everything, filtered = build(4), build(1, tasks=["push"])
    assert everything.max_episode_steps == 48 and build(1, tasks=["reach"], cameras=[]).max_episode_steps == 16
    assert build(1, max_episode_steps=9, cameras=[]).max_episode_steps == 9
    assert everything.longest_horizon(TabletopConfig(tasks=["touch_two", "reach"])) == 28
    first, second = start(everything).select([everything.task_names.index("push")]), start(filtered)
    assert np.array_equal(first.images["front"], second.images["front"]) and first.instruction == second.instruction


@pytest.mark.parametrize("camera", ["front", "side"])
@pytest.mark.parametrize("size", [64, 128])
def test_every_named_colour_is_visible(camera, size):
    env = build(64, tasks=["push"], cameras=[camera], image_size=size)
    image = start(env).images[camera].astype(int)
    assert image.shape == (64, size, size, 3)
    hues = {
        "red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "purple": (1, 0, 1), "cyan": (0, 1, 1),
    }  # fmt: skip
    for name, hue in hues.items():
        high, low = image[..., np.array(hue) == 1].min(-1), image[..., np.array(hue) == 0].max(-1)
        seen = (high > low + 50).sum((1, 2)) * (64 / size) ** 2
        assert np.median(seen) > 8, name
        if camera == "front":
            assert seen.min() >= 8, name


def test_pictures_are_upright_and_follow_the_pusher():
    env = build(16, tasks=["reach_zone"], image_size=64)
    first = start(env)
    step = env.chunk_step(np.tile(np.array([0.0, 1.0], np.float32), (16, 1, 1)))

    def centre(images):
        white = (images.min(-1) > 180).astype(float)
        rows, columns = np.mgrid[:64, :64]
        return np.array([(white * axis).sum((1, 2)) / white.sum((1, 2)) for axis in (rows, columns)])

    (rows, columns) = centre(step.observation.images["front"]) - centre(first.images["front"])
    away = np.abs(first.state[:, 1]) < 0.8  # not at the rim
    assert (rows[away] < -3).all() and (np.abs(columns[away]) < 1.5).all()


def test_the_first_touch_is_marked_in_the_picture():
    env = build(8, tasks=["touch_two"], image_size=64)

    def num_black(images):
        return (images["front"].max(-1) < 15).sum((1, 2))

    before = num_black(start(env).images)
    for _ in range(env.max_episode_steps):
        step = env.chunk_step(env.expert_actions()[:, None])
        marked = num_black(step.observation.images) > before + 3
        touched = env._stages == 1
        assert not marked[~touched].any()
    assert touched.all() and marked.all()


def test_frames_show_what_the_camera_shows():
    env = build(3, image_size=64)
    first = start(env).images["front"]
    assert np.array_equal(env.render_frames([2, 0], 64), first[[2, 0]])
    assert env.render_frames([1], 224).shape == (1, 224, 224, 3)
    assert np.array_equal(start(env).images["front"], first)
