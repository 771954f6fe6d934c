"""Rules of style that a machine can check. Each check is shown to catch a violation."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf import run_folder

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlinf", "examples", "benchmarks", "scripts", "tests", "docs", ".ci")
MAX_LINES = 600
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
# Built from pieces so that this file does not contain what it looks for.
EXTRA_OF_INDEX = re.compile(r"\brlinf\[[a-z]")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|root|home|Users)/[\w.-]+|" + r"\b10\.\d+\.\d+\.\d+\b")
DISPATCH_NAMES = {"model_type", "env_type", "env_name", "algorithm_name"}
OWNERS = (ROOT / "rlinf" / "models" / "embodiment", *(ROOT / "rlinf" / "envs").glob("*/"))
"""Folders of the files that own one model or one simulator, and may know its name."""


def source_files(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_files(*folders: str) -> list[Path]:
    return source_files(".py", folders=folders or FOLDERS)


def swallowing_handlers(code: str) -> list[int]:
    """Lines of ``except`` clauses that catch everything and do nothing about it."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            acts = any(
                isinstance(inner, ast.Raise) or (isinstance(inner, ast.Name) and inner.id == node.name)
                for inner in ast.walk(ast.Module(node.body, []))
            )
            if broad and not acts:
                lines.append(node.lineno)
    return lines


def name_dispatch(code: str) -> list[int]:
    """Lines that compare a model's, env's or algorithm's name with a literal, which the registry is for."""

    def is_name(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            return node.attr in DISPATCH_NAMES or (node.attr == "name" and owner in ("env", "algorithm", "model"))
        return isinstance(node, ast.Name) and node.id in DISPATCH_NAMES

    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.In, ast.NotIn)):
            sides = [node.left, *node.comparators]
            if any(is_name(side) for side in sides) and any(holds_text(side) for side in sides):
                lines.append(node.lineno)
    return lines


def holds_text(node: ast.AST) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(holds_text(item) for item in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def file_names(code: str, names: set[str]) -> list[int]:
    """Lines with a text that is one of ``names``, or a path with one of them."""
    texts = (
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [node.lineno for node in texts if names & set(node.value.split("/"))]


def test_no_file_is_longer_than_the_limit():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_file_has_a_name_that_says_nothing():
    assert [name_of(path) for path in python_files() if path.stem in FORBIDDEN_NAMES] == []


def test_no_handler_swallows_everything():
    found = {name_of(path): lines for path in python_files("rlinf", "scripts", "benchmarks", "examples")
             if (lines := swallowing_handlers(path.read_text(encoding="utf-8")))}  # fmt: skip
    assert found == {}


def test_no_dispatch_on_names_of_models_envs_or_algorithms():
    files = [path for path in python_files("rlinf", "examples") if not any(owner in path.parents for owner in OWNERS)]
    found = {name_of(path): lines for path in files
             if (lines := name_dispatch(path.read_text(encoding="utf-8")))}  # fmt: skip
    assert found == {}


def test_files_of_a_run_are_named_in_one_place():
    texts = [value for value in vars(run_folder).values() if isinstance(value, str)]
    names = {text for text in texts if re.fullmatch(r"\.?[a-z_.]+\.[a-z]+", text)}
    owners = {"run_folder", "libero"}  # LIBERO has a config.yaml of its own
    files = [path for path in python_files("rlinf") if not owners & {path.stem, path.parent.name}]
    found = {name_of(path): lines for path in files if (lines := file_names(path.read_text(encoding="utf-8"), names))}
    assert found == {} and "summary.json" in names


def test_no_path_of_a_particular_machine():
    files = source_files(".py", ".md", ".yaml", ".toml", ".sh", ".json", ".html")
    lines = [(name_of(path), line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(name, line) for name, line in lines if MACHINE_PATH.search(line)] == []


def test_extras_are_those_of_a_clone():
    """On the public index, `rlinf` is another project: `pip install 'rlinf[serve]'` would put it in place of this one."""
    files = [
        *source_files(".py", ".md", ".ipynb", ".yaml", ".sh", folders=("rlinf", "docs", "examples")),
        ROOT / "README.md",
    ]
    assert [name_of(path) for path in files if EXTRA_OF_INDEX.search(path.read_text(encoding="utf-8"))] == []


def test_the_checks_above_catch_what_they_look_for():
    assert swallowing_handlers("try:\n    f()\nexcept Exception:\n    pass\n") == [3]
    assert swallowing_handlers("try:\n    f()\nexcept:\n    x = 1\n") == [3]
    assert swallowing_handlers("try:\n    f()\nexcept Exception as error:\n    log(error)\n") == []
    assert swallowing_handlers("try:\n    f()\nexcept OSError:\n    pass\n") == []
    assert name_dispatch("if cfg.model.model_type == 'openvla':\n    pass\n") == [1]
    assert name_dispatch("if env.name in ('a', 'b'):\n    pass\n") == [1]
    assert name_dispatch("if other.title == 'openvla':\n    pass\n") == []
    assert file_names("f'{run}/eval/*/result.json'\nread(run / 'result.json')", {"result.json"}) == [1, 2]
    assert file_names("'There is no result.json.'", {"result.json"}) == []
    assert EXTRA_OF_INDEX.search("pip install 'rlinf[serve]'") and EXTRA_OF_INDEX.search('"rlinf[vllm-cpu]"')
    assert not EXTRA_OF_INDEX.search("pip install -e '.[serve]'")
    assert MACHINE_PATH.search("open('/" + "home/someone/data')")
    assert not MACHINE_PATH.search("docs/home/page.md")


def test_scripts_are_executable():
    scripts = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
    assert len(scripts) >= 4
    assert [name_of(script) for script in scripts if not os.access(script, os.X_OK)] == []


@pytest.mark.parametrize(
    "command",
    [
        "import rlinf",
        "import rlinf.envs, rlinf.models, rlinf.algorithms",
        "from rlinf.cli import main; main(['--help'])",
    ],
)
def test_imports_and_help_are_fast_and_pull_in_nothing_heavy(command):
    code = (
        "import time, sys; start = time.process_time()\n"  # not the clock: other tests run next to this one
        f"{command}\n"
        "heavy = [m for m in ('torch', 'transformers', 'mujoco', 'hydra', 'wandb', 'tensorboard') if m in sys.modules]\n"
        "print('\\n', time.process_time() - start, *heavy)"
    )
    words, times = [sys.executable, "-c", code], []
    for _ in range(3):  # the first one may have to compile
        result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
        seconds, *heavy = result.stdout.splitlines()[-1].split()
        assert heavy == []
        times.append(float(seconds))
    assert min(times) <= 2.0


def missing_imports(source: str) -> list[str]:
    """Return the names that a script imports from the package, and that are not there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlinf":
            module = importlib.import_module(node.module)
            for alias in node.names:
                is_module = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}")
                found += [] if is_module or hasattr(module, alias.name) else [f"{node.module}.{alias.name}"]
    return found


@pytest.mark.parametrize(
    "path", source_files(".py", folders=("benchmarks", "scripts", "examples", "tests")), ids=name_of
)
def test_scripts_and_tests_import_names_that_exist(path):
    assert not missing_imports(path.read_text())


def test_a_missing_import_is_found():
    assert missing_imports("from rlinf.errors import RLinfError, NoSuchError") == ["rlinf.errors.NoSuchError"]
