"""Imports user code that registers models, envs and algorithms, by module name or by file."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.registry import registering

user_folders: list[Path] = []
"""Folders of ``--config-dir``, searched for plugins in addition to the current folder and Python's path."""


def load_plugins(plugins: Iterable[str]) -> list[str]:
    """Import each plugin (a module, or a .py file relative to here or ``--config-dir``); return absolute paths."""
    resolved = [str(_find_file(plugin)) if plugin.endswith(".py") else plugin for plugin in plugins]
    for plugin in resolved:
        with registering(plugin):
            _load_file(Path(plugin)) if plugin.endswith(".py") else _load_module(plugin)
    return resolved


def _load_module(plugin: str) -> None:
    # Spawned processes inherit sys.path, so they find the module as well.
    sys.path += [str(folder) for folder in user_folders if str(folder) not in sys.path]
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if error.name is None or not (plugin + ".").startswith(error.name + "."):
            raise  # the plugin exists, but one of its imports does not
        fix = f"Install its package, or set plugins=[path/to/{plugin.rpartition('.')[2]}.py]"
        raise ConfigError(f"plugins names '{plugin}', but there is no module '{error.name}'. {fix}") from None


def _find_file(plugin: str) -> Path:
    relative = Path(plugin).expanduser()
    candidates = list(dict.fromkeys(folder / relative for folder in (Path.cwd(), *user_folders)))
    path = next((path.resolve() for path in candidates if path.is_file()), None)
    if path is None:
        searched = ", ".join(map(str, candidates))
        raise ConfigError(f"plugins=[{plugin}] does not exist (looked for {searched}). Set plugins=[path/to/file.py]")
    return path


def _load_file(path: Path) -> None:
    # Import it as a module of its folder, not by its path, because worker processes unpickle its classes by module name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    loaded = Path(module.__file__ or "").resolve()
    if loaded != path:
        actual = f"plugins=[{path}], but a module '{path.stem}' is already loaded from '{loaded}'"
        raise ConfigError(f"{actual}. Rename your file, e.g. my_{path.name}")
