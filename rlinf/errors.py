"""Errors caused by users, the functions that raise them, and suggestions for misspelt names.

Every message states the actual value, the requirement and the fix.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn


class RLinfError(Exception):
    """Base class of errors that the user can fix. The CLI prints them without a traceback and exits with status 2.

    ``fix`` maps arguments to values that would fix the error. They are appended to the message as ``Pass name=value``, or inside
    ``rlinf.options.fixed_by_settings``, as ``Set key=value``.
    """

    def __init__(self, message: str = "", **fix: Any) -> None:
        super().__init__(message)
        self.fix = fix

    def __str__(self) -> str:
        values = {name: value if str(value).startswith("<") else repr(value) for name, value in self.fix.items()}
        fix = " or ".join(f"{name}={value}" for name, value in values.items())
        return f"{self.args[0]} Pass {fix}" if fix else self.args[0]

    def __reduce__(self) -> tuple:
        return _restored, (type(self), self.args[0] if self.args else "", self.__dict__)

    def with_message(self, message: str) -> RLinfError:
        """Return an error of the same class with ``message`` as its full text."""
        attributes = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return _restored(type(self), message, {**attributes, "fix": {}})


def _restored(cls: type[RLinfError], message: str, attributes: dict[str, Any]) -> RLinfError:
    """Create an error from its message and attributes."""
    # Do not call `cls(message)`: some subclasses' constructors build the message from other arguments.
    error = cls.__new__(cls, message)
    error.__dict__.update(attributes)
    return error


class ConfigError(RLinfError, ValueError):
    """A configuration value is unknown, out of range, or contradicts a different value."""


class RejectedInputError(ConfigError):
    """A policy rejects an observation or does not return valid actions. It may accept other observations."""


class MissingDependencyError(RLinfError, ImportError):
    """An optional package or system library is missing. The message contains the command that installs it."""


class CheckpointError(RLinfError):
    """A folder is not a checkpoint, is incomplete, or is incompatible with the run that loads it."""


class UploadError(CheckpointError):
    """The run is complete on disk, but not all of it was uploaded."""


class SimulatorError(RLinfError):
    """A simulator crashed, hung or raised errors more often than ``env.max_restarts`` allows."""


class PolicyServerError(RLinfError):
    """A policy server does not reply, sends an invalid reply, or rejects a request."""


class RejectedRequestError(PolicyServerError):
    """A policy server rejected one request. It may accept the next one."""


class ManifestMismatchError(CheckpointError):
    """A checkpoint was made under conditions that differ from the current ones."""


class ParityError(RLinfError):
    """Log-probabilities or values differ between rollout and trainer."""


class NonFiniteError(RLinfError):
    """A loss, a gradient, a weight or a value from an environment is NaN or infinite."""


class RankError(RuntimeError):
    """A rank was killed or encountered a bug. The message contains the rank's traceback, so the CLI does not add one."""


class RankKilledError(RankError):
    """A rank was ended by an external signal or a crash in native code."""


EXIT_FAULT = 1
EXIT_USER_ERROR = 2


def exit_status(error: Exception) -> int:
    """Return the exit status for an error: 2 if the user can fix it, otherwise 1."""
    return EXIT_USER_ERROR if isinstance(error, RLinfError) else EXIT_FAULT


def print_error(error: Exception) -> None:
    """Print an error's class name, message and notes without a traceback."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
    print(f"{type(error).__name__}: {error}{notes}", file=sys.stderr, flush=True)


SYNONYMS = {
    "batch": ("batch_size", "minibatch_size"),
    "batch_size": ("minibatch_size", "micro_batch_size"),
    "ckpt": ("checkpoint",),
    "clip_eps": ("clip_range_high", "clip_range_low"),
    "clip_range": ("clip_range_high", "clip_range_low"),
    "dtype": ("precision",),
    "ent_coef": ("entropy_coef",),
    "envs": ("num_envs",),
    "episodes": ("num_episodes",),
    "epochs": ("max_steps", "update_epochs"),
    "gae": ("gae_lambda",),
    "gpu": ("cuda",),
    "gpus": ("num_processes",),
    "horizon": ("max_episode_steps",),
    "iterations": ("max_steps",),
    "lam": ("gae_lambda",),
    "lr": ("learning_rate",),
    "model_name": ("model_path",),
    "n_envs": ("num_envs",),
    "n_epochs": ("update_epochs",),
    "n_steps": ("max_steps",),
    "num_epochs": ("max_steps", "update_epochs"),
    "num_gpus": ("num_processes",),
    "num_steps": ("max_steps",),
    "out_dir": ("output_dir",),
    "random_seed": ("seed",),
    "steps": ("max_steps",),
    "task": ("tasks",),
    "total_steps": ("max_steps",),
    "vf_coef": ("value_coef",),
    "world_size": ("num_processes",),
}
"""Maps names from other libraries to the names accepted here, most likely first. Used only for suggestions."""

SIMILARITY = 0.7
"""Minimum similarity (``difflib``'s ratio) of a suggestion; less similar names are more likely wrong than right."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that the user probably meant, or None.

    Candidates in order of preference: ``SYNONYMS``, a name with these initials, the most similar name, the first name with this prefix.
    """
    name, known = str(name).lower(), {str(option).lower(): str(option) for option in names}
    for synonym in (name, *SYNONYMS.get(name, ())):
        if synonym in known:
            return known[synonym]
    matches = [o for o in known if "_" in o and name == "".join(part[:1] for part in o.split("_"))]
    matches += difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY)
    matches += [o for o in known if len(name) > 2 and o.startswith(name)]
    return known[matches[0]] if matches else None


MOST_LISTED = 100
"""Maximum number of options listed in an error message."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the option closest to ``name``, followed by the list of options (at most ``MOST_LISTED``)."""
    names = sorted(str(option) for option in options)
    close = closest(name, names)
    hint = f" Did you mean '{close}'?" if close else ""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{hint} Known: {', '.join(names[:MOST_LISTED]) or '(none)'}{more}."


def reject(actual: str, required: str, fix: str) -> NoReturn:
    """Raise a ``ConfigError`` with the actual values, the requirement, and overrides that fix it."""
    raise ConfigError(f"{actual}; expected {required}. Set {fix}")


class UnreadableRowError(ConfigError):
    """A row of a dataset has no readable image."""


def damaged(place: object, reason: str | Exception, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Return an error reporting that a dataset or one of its files is damaged or incomplete."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
    return kind(f"{place} is damaged or incomplete ({text}). Copy the dataset again, or use a different one")


def import_extra(module: str, needed_by: str, extra: str, instead: str = "") -> ModuleType:
    """Import an optional package; if it is missing, raise MissingDependencyError with the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"Run pip install -e '.[{extra}]' in the clone of rlinf{instead}"
        raise MissingDependencyError(
            f"{needed_by} needs the package {module}, which cannot be imported ({error}). {install}"
        ) from error
