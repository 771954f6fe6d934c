"""Imports user code that registers models, envs and algorithms, by module name or by file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
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
    if not path.is_file():
        raise ConfigError(f"plugins names the file '{path}', which does not exist. Type plugins=[path/to/file.py]")
    name = f"rlinf_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
