"""Imports user code that registers models, envs and algorithms, by module name or by file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from rlinf.errors import ConfigError


def load_plugins(plugins: Iterable[str]) -> None:
    """Import each plugin once per process; a worker process calls this before it builds anything.

    Args:
        plugins: Module names (``my_package.my_env``) or paths that end in ``.py``.

    Raises:
        ConfigError: There is no such module or file. Errors inside the plugin are passed on as they are.
    """
    for plugin in plugins:
        if plugin.endswith(".py"):
            _load_file(Path(plugin).expanduser().resolve())
            continue
        try:
            importlib.import_module(plugin)
        except ModuleNotFoundError as error:
            if error.name is None or not (plugin + ".").startswith(error.name + "."):
                raise  # The plugin is there; something that it imports is not.
            raise ConfigError(
                f"plugins names '{plugin}', but there is no module '{error.name}' in this Python environment. "
                f"Install its package, or give the file: plugins=[path/to/{plugin.rpartition('.')[2]}.py]"
            ) from None


def _load_file(path: Path) -> None:
    """Import a file as the module of its name, from its folder, so that worker processes can import it in turn."""
    if not path.is_file():
        raise ConfigError(f"plugins names the file '{path}', which does not exist. Type plugins=[path/to/file.py]")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # Spawned processes inherit the list.
    module = importlib.import_module(path.stem)
    found = Path(module.__file__ or "").resolve()
    if found != path:
        raise ConfigError(
            f"plugins names the file '{path}', but a module '{path.stem}' is already loaded from '{found}'. Rename your file, "
            f"e.g. my_{path.name}"
        )
