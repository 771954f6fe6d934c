"""Names to classes: models, envs and algorithms, built in, registered by user code, or by entry points of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from rlinf.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A registered name.

    Attributes:
        name: What the configuration says.
        target: The object, or ``"module:attribute"`` that is imported at first use.
        origin: Who registered it: ``rlinf``, the name of a distribution, or ``user code``.
    """

    name: str
    target: Any
    origin: str


class Registry(Generic[T]):
    """Lazily imported objects by name.

    Args:
        kind: Word for messages (``"env"``).
        group: Entry-point group in which other packages announce theirs (``"rlinf.envs"``).
        builtin: Name to ``"module:attribute"``.
    """

    def __init__(self, kind: str, group: str, builtin: dict[str, str]) -> None:
        self.kind = kind
        self.group = group
        self._entries = {name: Entry(name, target, "rlinf") for name, target in builtin.items()}
        self._scanned = False

    def register(self, name: str, target: Any, origin: str = "user code") -> None:
        """Add or replace a name; the same name twice keeps the last one."""
        self._entries[name] = Entry(name, target, origin)

    def entries(self) -> dict[str, Entry]:
        """Return all entries; entry points are read at the first call and never hide a registered name."""
        if not self._scanned:
            self._scanned = True
            for point in entry_points(group=self.group):
                origin = point.dist.name if point.dist else "entry point"
                self._entries.setdefault(point.name, Entry(point.name, point.value, origin))
        return self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.entries()))

    def __contains__(self, name: str) -> bool:
        return name in self.entries()

    def get(self, name: str) -> T:
        """Import and return what ``name`` stands for.

        Raises:
            ConfigError: ``name`` is not registered; lists what is.
        """
        entries = self.entries()
        if name not in entries:
            raise ConfigError(f"Unknown {self.kind} '{name}'.{did_you_mean(name, entries)}")
        target = entries[name].target
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = getattr(importlib.import_module(module), attribute)
        return target
