"""Imports user code that registers models, envs and algorithms, by module name or by file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.registry import registering

user_folders: list[Path] = []
"""Where plugins are looked up besides the current folder and Python's path: ``--config-dir``."""


def load_plugins(plugins: Iterable[str]) -> list[str]:
    """Import each plugin once per process; a worker process calls this before it builds anything.

    A plugin is a module (``my_package.my_env``) or a path that ends in ``.py``, relative to the present folder or to ``--config-dir``.
    Return the plugins with absolute paths, which mean the same files to every process.
    """
    found = [str(_find_file(plugin)) if plugin.endswith(".py") else plugin for plugin in plugins]
    for plugin in found:
        with registering(plugin):
            _load_file(Path(plugin)) if plugin.endswith(".py") else _load_module(plugin)
    return found


def _load_module(plugin: str) -> None:
    # Spawned processes inherit the list.
    sys.path += [str(folder) for folder in user_folders if str(folder) not in sys.path]
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if error.name is None or not (plugin + ".").startswith(error.name + "."):
            raise  # The plugin is there; something that it imports is not.
        fix = f"Install its package, or set plugins=[path/to/{plugin.rpartition('.')[2]}.py]"
        raise ConfigError(f"plugins names '{plugin}', and there is no module '{error.name}'. {fix}") from None


def _find_file(plugin: str) -> Path:
    given = Path(plugin).expanduser()
    candidates = list(dict.fromkeys(folder / given for folder in (Path.cwd(), *user_folders)))
    path = next((path.resolve() for path in candidates if path.is_file()), None)
    if path is None:
        looked = ", ".join(map(str, candidates))
        raise ConfigError(f"plugins=[{plugin}] does not exist (looked for {looked}). Set plugins=[path/to/file.py]")
    return path


def _load_file(path: Path) -> None:
    """Import a file as the module of its name, from its folder, so that worker processes can import it in turn."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    found = Path(module.__file__ or "").resolve()
    if found != path:
        taken = f"plugins=[{path}], and a module '{path.stem}' is already loaded from '{found}'"
        raise ConfigError(f"{taken}. Rename your file, e.g. my_{path.name}")
