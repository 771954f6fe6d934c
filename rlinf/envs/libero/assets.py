"""The asset files that a LIBERO task needs, read from LIBERO's source without importing it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rlinf.envs.libero.tasks import bddl_file, package_folder
from rlinf.errors import MissingDependencyError
from rlinf.options import override_text


def check_assets(assets: Path, suite: str, tasks: Sequence[str]) -> None:
    """Check that the scene and all objects of the tasks exist, with their meshes."""
    missing = {task: lost for task in tasks if (lost := missing_files(assets, suite, task))}
    if not missing:
        return
    files = sorted({name for lost in missing.values() for name in lost})
    complete = [task for task in tasks if task not in missing]
    named = ", ".join(list(missing)[:3]) + (", ..." if len(missing) > 3 else "")
    shorter = f", or set env.tasks={override_text(complete)}" if complete else ""
    raise MissingDependencyError(
        f"LIBERO's assets in {assets} lack {files[0]}{f' and {len(files) - 1} more files' if files[1:] else ''}, which "
        f"{len(missing)} of {len(tasks)} tasks of env.suite={suite} need ({named}). Set env.assets_dir=<the "
        f"folder libero/libero/assets of https://github.com/Lifelong-Robot-Learning/LIBERO>{shorter}"
    )


def missing_files(assets: Path, suite: str, task: str) -> list[str]:
    """Return the files of a task that ``assets`` lacks, relative to that folder."""
    text = bddl_file(suite, task).read_text(encoding="utf-8")
    problem = re.search(r"\(problem (\w+)\)", text).group(1).lower()
    source = (package_folder() / "envs" / "problems" / f"{problem}.py").read_text(encoding="utf-8")
    models = object_models()
    categories = sorted(set(re.findall(r" - (\w+)", text)) & models.keys())
    needed = [re.search(r"scenes/\w+\.xml", source).group(), *(models[category] for category in categories)]
    return [lost for name in needed for lost in _missing_behind(assets, name)]


@functools.cache
def object_models() -> dict[str, str]:
    """Return a mapping from object category, as in task files, to model file within the assets.

    LIBERO's classes name the file in two parts: a base class has a path with a placeholder, its subclasses the name.
    """
    folders, models = {}, {}
    for file in sorted((package_folder() / "envs" / "objects").glob("*_objects.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            path = re.search(r"f'(\w+/\S+\.xml)'", ast.unparse(node))
            name = re.search(r"obj_name='(\w+)'", ast.unparse(node))
            if path:
                folders[node.name] = path.group(1)
            elif name:
                category = re.sub(r"(?<!^)([A-Z0-9])", r"_\1", node.name).lower()
                models[category] = folders[node.bases[0].id].replace("{obj_name}", name.group(1))
    return models


@functools.cache
def _missing_behind(assets: Path, name: str) -> list[str]:
    model = assets / name
    if not model.is_file():
        return [name]
    # Textures are not checked: LIBERO replaces some, and robosuite drops those that no material uses.
    named = [mesh.get("file") for mesh in ElementTree.parse(model).iter("mesh")]
    return [f"{file} of {name}" for file in dict.fromkeys(named) if not (model.parent / file).is_file()]
