"""LIBERO's tasks and their asset files, read from its package without importing LIBERO, robosuite or torch."""

import ast
import functools
import importlib.metadata
import importlib.util
import io
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.options import override_text

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Maps each suite to its env steps per episode after settling, as in OpenVLA's, OpenVLA-OFT's and openpi's scripts."""

ASSETS_VARIABLE = "RLINF_LIBERO_ASSETS"
REQUIRED = {"robosuite": ((1, 4), (1, 5), "robosuite==1.4.0"), "mujoco": ((2, 3), (3, 3, 3), "mujoco==3.3.0")}
"""Maps each distribution to its first supported version, first unsupported version and pip requirement."""
_INSTALL = (
    "Install LIBERO with `bash scripts/setup.sh --sims`, or with `pip install --no-deps hf-libero==0.1.4 "
    "robosuite==1.4.0 bddl==1.0.1`."
)
_ASSETS_HINT = (
    "They are in the folder libero/libero/assets of https://github.com/Lifelong-Robot-Learning/LIBERO. Get it with "
    "`git clone`, and set env.assets_dir=LIBERO/libero/libero/assets, or set RLINF_LIBERO_ASSETS."
)


@functools.cache
def package_folder() -> Path:
    """Return the folder that contains LIBERO's files in the installed package."""
    spec = importlib.util.find_spec("libero")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / "libero" / "bddl_files").is_dir():
            return Path(folder) / "libero"
    raise _missing("libero")


def check_packages() -> None:
    """Check that robosuite and MuJoCo have versions that reproduce LIBERO's published results."""
    # MuJoCo renders floors darker since 3.3.3 and collides boxes differently since 3.4, which costs published policies 20 to 86 points.
    package_folder()
    for name in ("robosuite", "bddl"):
        if importlib.util.find_spec(name) is None:
            raise _missing(name)
    for name, (first, end, wanted) in REQUIRED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise _missing(name) from None
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        if not first <= numbers < end:
            lowest, limit = (".".join(map(str, bound)) for bound in (first, end))
            raise MissingDependencyError(
                f"{name} has version {version}; expected at least {lowest} and below {limit} (later "
                f"versions change contacts and brightness, which affects success rates). Run pip install {wanted}"
            )


def _missing(name: str) -> MissingDependencyError:
    return MissingDependencyError(f"The package '{name}' is missing, and env.name=libero needs it. {_INSTALL}")


@functools.cache
def suite_tasks(suite: str) -> tuple[str, ...]:
    """Return the task names of a suite in LIBERO's order, as in the published evaluations."""
    source = (package_folder() / "benchmark" / "libero_suite_task_map.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return tuple(ast.literal_eval(node.value)[suite])
    raise MissingDependencyError(f"{package_folder()} has no list of tasks. {_INSTALL}")


def instruction(task: str) -> str:
    """Return the instruction: the task's name with spaces and without the scene's name."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", task).replace("_", " ")


def bddl_file(suite: str, task: str) -> Path:
    return package_folder() / "bddl_files" / suite / f"{task}.bddl"


class _ArrayUnpickler(pickle.Unpickler):
    """Reads only NumPy arrays, because an arbitrary pickle could run any code."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise ConfigError(f"it contains {module}.{name}, but only numeric arrays are allowed")
        return self.ALLOWED[module, name]


def read_states(path: Path) -> np.ndarray:
    """Read initial states, float64 ``[N, 1 + nq + nv]`` (time, positions, velocities), from a pickle in a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
        if not isinstance(states, np.ndarray) or states.dtype != np.float64 or states.ndim != 2:
            raise ConfigError(f"it contains a {type(states).__name__}, not a float64 matrix")
    except (OSError, StopIteration, zipfile.BadZipFile, pickle.UnpicklingError, ConfigError, EOFError) as error:
        raise ConfigError(f"The initial states in {path} cannot be read: {error}. {_INSTALL}") from error
    return states


@functools.cache
def recorded_states(suite: str, task: str) -> np.ndarray:
    """Return the task's 50 initial states used in published evaluations."""
    return read_states(package_folder() / "init_files" / suite / f"{task}.pruned_init")


def find_assets(configured: str | None) -> Path:
    """Find LIBERO's assets in env.assets_dir, RLINF_LIBERO_ASSETS, the package, or the folders of its settings or downloads."""
    settings = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml"
    named = {"env.assets_dir": configured, ASSETS_VARIABLE: os.environ.get(ASSETS_VARIABLE)}
    for key, folder in named.items():
        if folder and not _has_assets(Path(folder).expanduser()):
            raise MissingDependencyError(f"{key}={folder} is not LIBERO's assets folder. {_ASSETS_HINT}")
        if folder:
            return Path(folder).expanduser().resolve()
    places = [package_folder() / "assets", _assets_of_settings(settings), Path("~/.cache/libero/assets").expanduser()]
    for place in places:
        if place is not None and _has_assets(place):
            return place.resolve()
    looked = ", ".join(str(place) for place in places if place is not None)
    raise MissingDependencyError(f"LIBERO's assets (meshes and textures) are not in any of {looked}. {_ASSETS_HINT}")


def _has_assets(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in ("scenes", "articulated_objects", "stable_scanned_objects"))


def _assets_of_settings(settings: Path) -> Path | None:
    if not settings.is_file():
        return None
    import yaml

    content = yaml.safe_load(settings.read_text(encoding="utf-8"))
    return Path(content["assets"]) if isinstance(content, dict) and "assets" in content else None


def check_assets(assets: Path, suite: str, tasks: Sequence[str]) -> None:
    """Check that the tasks' scenes, objects and meshes exist."""
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
    """Return a task's files that are missing in ``assets``, relative to this folder."""
    text = bddl_file(suite, task).read_text(encoding="utf-8")
    problem = re.search(r"\(problem (\w+)\)", text).group(1).lower()
    source = (package_folder() / "envs" / "problems" / f"{problem}.py").read_text(encoding="utf-8")
    models = object_models()
    categories = sorted(set(re.findall(r" - (\w+)", text)) & models.keys())
    needed = [re.search(r"scenes/\w+\.xml", source).group(), *(models[category] for category in categories)]
    return [lost for name in needed for lost in _missing_behind(assets, name)]


@functools.cache
def object_models() -> dict[str, str]:
    """Map object categories to model files. LIBERO's base classes define a path with a placeholder, subclasses the name."""
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
    # Textures are not checked, because LIBERO replaces some and robosuite drops unused ones.
    named = [mesh.get("file") for mesh in ElementTree.parse(model).iter("mesh")]
    return [f"{file} of {name}" for file in dict.fromkeys(named) if not (model.parent / file).is_file()]
