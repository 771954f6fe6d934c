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


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest option, and the list of all options.

    Args:
        name: What the user typed.
        options: What would have been accepted.
    """
    names = sorted(str(option) for option in options)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Known: {', '.join(names) if names else '(none)'}."
