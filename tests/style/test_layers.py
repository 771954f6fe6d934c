"""Imports go strictly down: an ordered list of layers, and no circle of modules. The core imports no wing."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf.wings import WINGS

PACKAGE = Path(__file__).parents[2] / "rlinf"

LAYERS = (
    ("errors", "imports", "number_formats", "run_folder", "seeding", "types"),
    ("files", "flags", "images", "memory", "options", "wings"),
    ("manifest", "registry"),
    ("distributed",),
    ("optim",),
    ("tracking",),
    ("algorithms",),
    ("envs",),
    ("data",),
    ("engines", "serving"),
    ("models",),
    ("checkpoints",),
    ("evaluation",),
    ("report",),
    ("rollout",),
    ("config",),
    ("contracts",),
    ("preflight",),
    ("cluster",),
    ("training",),
    ("offpolicy",),
    ("policy",),
    ("commands", "models.embodiment.lerobot.check"),
    ("api",),
    ("llm",),
    ("audits", "recipes", "robot"),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A module may import what is in its own package, and what is in a layer further down."""

FACES = {
    "rlinf.algorithms",
    "rlinf.distributed",
    "rlinf.models",
    "rlinf.models.generation",
    "rlinf.models.generation.interfaces",
    "rlinf.models.interfaces",
    "rlinf.models.validation",
    "rlinf.wings",
}
"""Modules that name modules of a higher layer in texts: import paths that users know, and registries."""

WING_FACES = {
    "rlinf",
    "rlinf.algorithms",
    "rlinf.distributed",
    "rlinf.models",
    "rlinf.models.generation",
    "rlinf.models.generation.interfaces",
    "rlinf.models.interfaces",
    "rlinf.models.validation",
    "rlinf.wings",
}
"""Modules of the core that name modules of wings: the table of wings, and import paths that users know."""

FAMILIES = {"rlinf.models.embodiment": {"modules"}, "rlinf.envs": {"graphics", "process", "remote"}}
"""Packages with a folder for each model or simulator, and their folders that all of these share."""

FAMILY_IMPORTS = {
    ("rlinf.models.embodiment.openvla_oft", "rlinf.models.embodiment.openvla"),  # the same network with another head
    ("rlinf.recipes.build", "rlinf.models.embodiment.hf_vla"),  # loads the same processors
    ("rlinf.data.hdf5", "rlinf.envs.libero"),  # reads the instructions from names of files as LIBERO does
}
"""Who imports a family. All others know it by the name in a registry."""

HEAVY = {
    "av", "gym_pusht", "gymnasium", "hydra", "libero", "mani_skill", "megatron", "metaworld", "msgpack", "mujoco", "numpy", "peft", "pyarrow", "ray", "robosuite",
    "safetensors", "sapien", "so101_nexus", "tensorboard", "torch", "transformers", "vllm", "wandb", "websockets",
}  # fmt: skip
"""Libraries that are slow to import or optional: the reasons for an import inside a function."""


parsed = functools.cache(ast.parse)
"""Every test reads the whole package."""


def modules(package: Path) -> dict[str, Path]:
    """Return dotted name to file of every module."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a piece of code imports, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def named_in_texts(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """Return the modules that a piece of code names in texts: ``"module"`` of lazy attributes, ``"module:name"`` of registries."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text.partition(":")[0] for text in texts} & set(known) - {"rlinf"}


def layer_of(module: str) -> int:
    """Return the number of a module's layer, counted from the ground; the longest listed path decides."""
    parts = module.split(".")[1:] or ["__main__"]
    paths = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(number for path in paths for number, names in enumerate(LAYERS) if path in names)


def arrows_up(package: Path, faces: set[str] = FACES) -> list[str]:
    """Return each import that does not go down, and each such name in a text except in ``faces``."""
    known, found = modules(package), []
    for module, path in known.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        targets = set(imports(tree, known))
        if module not in faces:
            targets |= named_in_texts(tree, known)
        for target in sorted(targets - {"rlinf"}):
            same = module.split(".")[1:2] == target.split(".")[1:2]
            if not same and layer_of(target) >= layer_of(module):
                found.append(f"{module} imports {target}")
    return found


def wing_of(module: str) -> str | None:
    """Return the wing that a module belongs to; None: it belongs to the core."""
    path = module.removeprefix("rlinf.").replace(".", "/") + "/"
    return next((name for name, wing in WINGS.items() if any(path.startswith(f"{f}/") for f in wing.folders)), None)


def wing_imports(package: Path, faces: set[str] = WING_FACES) -> list[str]:
    """Return each import of a wing's module, and each such name in a text, outside the wing and outside ``faces``."""
    known, lines = modules(package), []
    for module, path in known.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        targets = set(imports(tree, known)) | named_in_texts(tree, known)
        crossed = {target for target in targets if wing_of(target) not in (None, wing_of(module))}
        lines += [f"{module} imports {target}" for target in sorted(crossed) if module not in faces]
    return lines


def family_of(module: str) -> str | None:
    """Return the folder of the model or simulator that a module belongs to; None: it belongs to none."""
    for home, shared in FAMILIES.items():
        if module.startswith(f"{home}."):
            name = module.removeprefix(f"{home}.").partition(".")[0]
            if name not in shared and (PACKAGE.parent / home.replace(".", "/") / name).is_dir():
                return f"{home}.{name}"
    return None


def mixed_families(package: Path) -> set[tuple[str, str]]:
    """Return each module outside a family that imports it, as importer and family; of another family, that family."""
    known, found = modules(package), set()
    for module, path in known.items():
        own = family_of(module)
        for target in imports(parsed(path.read_text(encoding="utf-8")), known):
            if family_of(target) not in (None, own):
                found.add((own or module, family_of(target)))
    return found


def circles(package: Path) -> list[list[str]]:
    """Return the groups of modules that import each other at module level, in one or several steps."""
    known = modules(package)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        top = [node for node in parsed(path.read_text(encoding="utf-8")).body if not is_type_checking(node)]
        graph[module] = {name for node in top for name in imports(node, known) if not inside_function(node)} - {module}
    reached = {module: reachable(graph, module) for module in graph}
    found = {tuple(sorted(m for m in graph if m in reached[n] and n in reached[m])) for n in graph if n in reached[n]}
    return sorted(map(list, found))


def import_statements(node: ast.AST, is_hidden: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield each import that is not for type checkers, and whether it is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_hidden
        elif not is_type_checking(child):
            yield from import_statements(child, is_hidden or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def heavy_libraries(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the heavy libraries that one statement imports."""
    is_from = isinstance(statement, ast.ImportFrom)
    names = [statement.module or ""] if is_from else [alias.name for alias in statement.names]
    return {name.partition(".")[0] for name in names} & HEAVY


def needlessly_hidden(package: Path) -> list[str]:
    """Return each import of a module of the package inside a function that keeps no heavy library out of the module."""
    known = modules(package)
    hidden: dict[str, set[str]] = {}
    graph: dict[str, set[str]] = {}
    own: dict[str, set[str]] = {}
    for module, path in known.items():
        statements = list(import_statements(parsed(path.read_text(encoding="utf-8"))))
        shown = [statement for statement, is_hidden in statements if not is_hidden]
        hidden[module] = {name for each, is_hidden in statements if is_hidden for name in imports(each, known)}
        parent = {module.rpartition(".")[0]} & set(known)  # importing a module imports its package
        graph[module] = parent.union(*(imports(statement, known) for statement in shown))
        own[module] = set().union(*map(heavy_libraries, shown))
    loaded = {module: own[module].union(*(own[name] for name in reachable(graph, module))) for module in known}
    return [f"{m} imports {name}" for m in known for name in sorted(hidden[m]) if loaded[name] <= loaded[m]]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def inside_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def test_every_module_has_a_layer():
    names = {name.split(".")[1] for name in modules(PACKAGE) if "." in name}
    listed = [name for names in LAYERS for name in names if "." not in name]
    assert names == set(listed) and len(listed) == len(set(listed))


def test_imports_go_down():
    assert arrows_up(PACKAGE) == []


def test_every_face_names_a_higher_layer():
    found = {line.split(" imports ")[0] for line in arrows_up(PACKAGE, faces=set())}
    assert found == FACES


def test_only_the_listed_modules_name_a_wing():
    assert wing_imports(PACKAGE) == []
    assert {line.split(" imports ")[0] for line in wing_imports(PACKAGE, faces=set())} == WING_FACES


@pytest.mark.parametrize("importer", ["envs/base.py", "robot/loop.py", "audits/auditor.py"])
@pytest.mark.parametrize(
    "line",
    [
        "from rlinf.audits import auditor",
        "def f():\n    from rlinf.audits.auditor import Auditor",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlinf.audits.auditor",
        "AUDITORS = {'usual': 'rlinf.audits.auditor:Auditor'}",
    ],
)
def test_an_import_of_a_wing_is_seen_in_the_core_and_in_a_different_wing(tmp_path, importer, line):
    package = tmp_path / "rlinf"
    for name in ("audits/__init__.py", "audits/auditor.py", importer):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / importer).write_text(line)
    module = f"rlinf.{importer.removesuffix('.py').replace('/', '.')}"
    assert wing_imports(package) == ([] if "audits" in importer else [f"{module} imports rlinf.audits.auditor"])


def test_only_the_listed_modules_import_a_family():
    assert mixed_families(PACKAGE) == FAMILY_IMPORTS


def test_no_modules_import_each_other():
    assert circles(PACKAGE) == []


def test_an_import_inside_a_function_keeps_a_heavy_library_out():
    assert needlessly_hidden(PACKAGE) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def f():\n    from rlinf import light", ["rlinf.user imports rlinf.light"]),
        ("class A:\n    def f(self):\n        import rlinf.heavy", []),
        ("import torch\ndef f():\n    import rlinf.heavy", ["rlinf.user imports rlinf.heavy"]),
        ("import rlinf.other\ndef f():\n    import rlinf.heavy", ["rlinf.user imports rlinf.heavy"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlinf.light", []),
    ],
)
def test_an_import_that_is_hidden_for_nothing_is_seen(tmp_path, line, found):
    package = tmp_path / "rlinf"
    package.mkdir()
    texts = {
        "__init__": "",
        "light": "",
        "heavy": "from torch import nn",
        "other": "from rlinf import heavy",
        "user": line,
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert needlessly_hidden(package) == found


@pytest.mark.parametrize(
    "line",
    [
        "from rlinf.config import schema",
        "def f():\n    from rlinf.config.schema import RunConfig",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlinf.config.schema",
        "__getattr__ = lazy_attributes(__name__, {'RunConfig': 'rlinf.config.schema'})",
        "ROWS = Registry('row', 'rlinf.data', {'run': 'rlinf.config.schema:RunConfig'})",
    ],
)
def test_an_import_that_goes_up_is_seen(tmp_path, line):
    package = tmp_path / "rlinf"
    for name in ("config", "data"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "config" / "schema.py").write_text("import rlinf.data.rows\n")
    (package / "data" / "rows.py").write_text("import numpy\n")
    assert arrows_up(package) == [] and circles(package) == []
    (package / "data" / "rows.py").write_text(line)
    assert arrows_up(package) == ["rlinf.data.rows imports rlinf.config.schema"]


@pytest.mark.parametrize(
    ("importer", "seen_as"),
    [
        ("models/embodiment/pi0/policy.py", "rlinf.models.embodiment.pi0"),
        ("models/embodiment/base.py", "rlinf.models.embodiment.base"),
        ("rollout.py", "rlinf.rollout"),
        ("models/embodiment/openvla/policy.py", None),
    ],
)
def test_an_import_of_another_family_is_seen(tmp_path, importer, seen_as):
    package = tmp_path / "rlinf"
    for name in ("models/embodiment/openvla/config.py", importer):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / importer).write_text("import rlinf.models.embodiment.openvla.config")
    assert mixed_families(package) == ({(seen_as, "rlinf.models.embodiment.openvla")} if seen_as else set())


def test_a_circle_of_modules_is_seen(tmp_path):
    package = tmp_path / "rlinf"
    package.mkdir()
    for name, line in (("__init__", ""), ("types", "import rlinf.files"), ("files", "from rlinf import types")):
        (package / f"{name}.py").write_text(line)
    assert circles(package) == [["rlinf.files", "rlinf.types"]]


def node_of(module: str) -> str:
    """Return what a module belongs to in the picture: its wing, or its package in the core."""
    return wing_of(module) or module.split(".")[1]


def package_graph(package: Path) -> dict[str, set[str]]:
    """Return each wing, and each package above the ground, to what it needs directly, without what others among these imply."""
    known, ground = modules(package), {name for names in LAYERS[:3] for name in names}
    needs: dict[str, set[str]] = {}
    for module in set(known) - {"rlinf"}:
        tree = parsed(known[module].read_text(encoding="utf-8"))
        targets = {node_of(target) for target in imports(tree, known) if "." in target}
        needs[node_of(module)] = needs.get(node_of(module), set()) | (targets - ground - {node_of(module)})
    needs = {name: targets for name, targets in needs.items() if name not in ground}
    return {
        name: {target for target in targets if not any(target in reachable(needs, t) for t in targets - {target})}
        for name, targets in needs.items()
    }


def diagram(package: Path) -> str:
    """Draw wings and core as the Mermaid flow chart that docs/architecture.md shows."""
    graph = package_graph(package)
    core = [name for names in reversed(LAYERS) for name in names if name in set(graph) - set(WINGS)]
    wings = [f"        {name}([{name}])" for name in sorted(WINGS)]
    lines = ["    subgraph wings", *wings, "    end"]
    lines += [f"    {name} --> {' & '.join(sorted(graph[name]))}" for name in [*sorted(WINGS), *core] if graph[name]]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def test_the_architecture_page_has_one_picture_of_core_and_wings_and_2000_words():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = diagram(PACKAGE)
    assert drawn in page, f"docs/architecture.md needs this diagram:\n{drawn}"
    assert page.count("```mermaid") == 1 and len(page.split()) <= 2000
