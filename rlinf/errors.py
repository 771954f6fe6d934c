"""The errors that a user can cause, and the did-you-mean that goes with them.

Every message says what is wrong with the actual value, what was required, and the override to type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLinfError(Exception):
    """Base of every error that the user can mend; the CLI prints it without a traceback and exits with 2."""


class ConfigError(RLinfError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class MissingDependencyError(RLinfError, ImportError):
    """An optional package or system library is missing; the message holds the command that installs it."""


class CheckpointError(RLinfError):
    """A folder is no checkpoint, is incomplete, or does not fit the run that wants to load it."""


class SimulatorError(RLinfError):
    """A simulator crashed, hung or raised more often than ``env.max_restarts`` allows."""


class ManifestMismatchError(CheckpointError):
    """A checkpoint was made under conditions that differ from the present ones."""


class ParityError(RLinfError):
    """Rollout and trainer disagree about log-probabilities."""


class NonFiniteError(RLinfError):
    """A loss or a gradient is NaN or infinite."""


class RankError(RuntimeError):
    """A rank was killed, or failed by what is no user error: the message has its traceback, and the CLI adds none."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that looks most like ``name``, or for which it is short (``lr``, ``gpu_mem``), or None."""
    name, known = str(name), [str(option) for option in names]
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not found and len(name) > 1:
        found = [o for o in known if o.startswith(name) or name == "".join(word[:1] for word in o.split("_"))]
    return found[0] if found else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest option, and the list of all options.

    Args:
        name: What the user typed.
        options: What would have been accepted.
    """
    names = sorted(str(option) for option in options)
    close = closest(name, names)
    hint = f" Did you mean '{close}'?" if close else ""
    return f"{hint} Known: {', '.join(names) if names else '(none)'}."
