"""Registries of models, envs and algorithms, which may be built in, or registered by user code or other packages."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from rlinf.errors import ConfigError, did_you_mean
from rlinf.imports import import_string
from rlinf.wings import missing

T = TypeVar("T")

installed_points = functools.cache(entry_points)
"""Return the entry points of all installed packages, cached because this reads hundreds of files."""

BUILTIN, USER_CODE = "rlinf", "user code"
_origins = [USER_CODE]


@dataclass(frozen=True)
class Entry:
    """A registered name with its object, or with a ``"module:attribute"`` that is imported at first use."""

    name: str
    target: Any
    origin: str
    """Source of the registration: ``rlinf``, a distribution and its version, a plugin, or ``user code``."""


@contextmanager
def registering(origin: str) -> Iterator[None]:
    """Record ``origin`` as the source of names registered inside the block."""
    _origins.append(origin)
    try:
        yield
    finally:
        _origins.pop()


class Registry(Generic[T]):
    """Maps names to lazily imported objects.

    Args:
        kind: Kind of the objects, for messages (``"env"``).
        group: Entry-point group for other packages (``"rlinf.envs"``).
        builtin: Maps built-in names to ``"module:attribute"``.
        configs: Maps names of built-in classes to the ``"module:attribute"`` of their ``config_class``, if it is faster to import.

    Attributes:
        hidden: Entry points that are ignored because their names were already taken.
    """

    def __init__(self, kind: str, group: str, builtin: dict[str, str], configs: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.group = group
        self.hidden: list[Entry] = []
        self._entries = {name: Entry(name, target, BUILTIN) for name, target in builtin.items()}
        self._configs = configs or {}
        self._scanned = False

    def register(self, name: str, target: Any, origin: str | None = None) -> None:
        """Add or replace a name. By default, ``origin`` is set by ``registering``."""
        self._entries[name] = Entry(name, target, origin or _origins[-1])

    def entries(self) -> dict[str, Entry]:
        """Return all entries. Entry points are read on the first call, and never replace registered names."""
        if not self._scanned:
            self._scanned = True
            for point in installed_points().select(group=self.group):
                origin = f"{point.dist.name} {point.dist.version}" if point.dist else "entry point"
                entry = Entry(point.name, f"{point.module}:{point.attr}", origin)
                if self._entries.setdefault(point.name, entry) is not entry:
                    self.hidden.append(entry)
        return self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.entries()))

    def __contains__(self, name: str) -> bool:
        return name in self.entries()

    def config_class(self, name: str) -> type:
        """Return the configuration dataclass of a registered class; raise ConfigError like ``get``."""
        entry = self.entries().get(name)
        # If a user's class has replaced a built-in one, use its own configuration.
        is_known = name in self._configs and entry.origin == BUILTIN
        return import_string(self._configs[name]) if is_known else self.get(name).config_class

    def get(self, name: str) -> T:
        """Import and return the target of ``name``.

        Raise ConfigError if ``name`` is not registered, or its module has no such attribute.
        """
        entries = self.entries()
        if name not in entries:
            if (reason := missing(self.group.removeprefix("rlinf."), name)) is not None:
                raise ConfigError(reason)
            raise ConfigError(f"Unknown {self.kind} '{name}'.{did_you_mean(name, entries)}")
        entry = entries[name]
        if not isinstance(entry.target, str):
            return entry.target
        name_of_module, _, attribute = entry.target.partition(":")
        module = importlib.import_module(name_of_module)
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            raise ConfigError(
                f"The {self.kind} '{name}' of {entry.origin} is registered as '{entry.target}', which does not exist: {error}. "
                f"Required: module:attribute. Fix the registration, or set a different {self.kind}"
            ) from error
