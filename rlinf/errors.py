"""Errors that a user can cause, and suggestions for misspelt names.

Every message states the actual value, the requirement, and the fix.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any


class RLinfError(Exception):
    """Base of every error that the user can fix; the CLI prints it without a traceback and exits with 2.

    ``fix`` holds arguments that fix it, and their new values. The message ends with them: ``Pass name=value``.
    ``rlinf.options.fixed_by_settings`` turns them into the override to set.
    """

    def __init__(self, message: str = "", **fix: Any) -> None:
        super().__init__(message)
        self.fix = fix

    def __str__(self) -> str:
        values = {name: value if str(value).startswith("<") else repr(value) for name, value in self.fix.items()}
        fix = " or ".join(f"{name}={value}" for name, value in values.items())
        return f"{self.args[0]} Pass {fix}" if fix else self.args[0]

    def __reduce__(self) -> tuple:
        return _with_message, (type(self), self.args[0] if self.args else "", self.__dict__)

    def finished(self, message: str) -> RLinfError:
        """Return an error of this class whose whole text is ``message``."""
        kept = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return _with_message(type(self), message, {**kept, "fix": {}})


def _with_message(cls: type[RLinfError], message: str, attributes: dict[str, Any]) -> RLinfError:
    """Make an error from its message; ``cls`` itself may take what the message is composed of."""
    error = cls.__new__(cls, message)
    error.__dict__.update(attributes)
    return error


class ConfigError(RLinfError, ValueError):
    """A configuration value is unknown, out of range or contradicts another one."""


class RejectedInputError(ConfigError):
    """A policy rejects an observation, or does not answer with actions; it may take other observations."""


class MissingDependencyError(RLinfError, ImportError):
    """An optional package or system library is missing; the message holds the command that installs it."""


class CheckpointError(RLinfError):
    """A folder is not a checkpoint, is incomplete, or does not fit the run that wants to load it."""


class UploadError(CheckpointError):
    """A run is complete on the disk, and not all of it was uploaded."""


class SimulatorError(RLinfError):
    """A simulator crashed, hung or raised more often than ``env.max_restarts`` allows."""


class PolicyServerError(RLinfError):
    """A policy that acts elsewhere does not answer, answers what does not fit, or rejects what it is asked."""


class RejectedRequestError(PolicyServerError):
    """A policy server is there and rejects one request; it may take another one."""


class ManifestMismatchError(CheckpointError):
    """A checkpoint was made under conditions that differ from the present ones."""


class ParityError(RLinfError):
    """Rollout and trainer disagree about log-probabilities or values."""


class NonFiniteError(RLinfError):
    """A loss, a gradient, a weight or a value from an environment is NaN or infinite."""


class RankError(RuntimeError):
    """A rank was killed or hit a bug. The message holds the rank's traceback; the CLI adds none."""


class RankKilledError(RankError):
    """A signal from outside, or a crash in native code, ended a rank."""


EXIT_FAULT = 1
EXIT_USER_ERROR = 2


def exit_status(error: Exception) -> int:
    """Return the exit status of a command that ends with an error: 2 for one that the user can fix, else 1."""
    return EXIT_USER_ERROR if isinstance(error, RLinfError) else EXIT_FAULT


def print_error(error: Exception) -> None:
    """Print the name, the message and the notes of an error, without a traceback."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
    print(f"{type(error).__name__}: {error}{notes}", file=sys.stderr, flush=True)


ALIASES = {
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
"""Names that users know from other libraries, and the names accepted here, most likely first."""

SIMILARITY = 0.7
"""Smallest similarity (``difflib``'s ratio) of a suggested name; below it a hint is more likely wrong than right."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that the user probably meant, or None.

    Tried in this order: ``ALIASES``, a name with these initials, the most similar name, the first name with this prefix.
    """
    name, known = str(name).lower(), {str(option).lower(): str(option) for option in names}
    for alias in (name, *ALIASES.get(name, ())):
        if alias in known:
            return known[alias]
    found = [o for o in known if "_" in o and name == "".join(word[:1] for word in o.split("_"))]
    found += difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY)
    found += [o for o in known if len(name) > 2 and o.startswith(name)]
    return known[found[0]] if found else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the option closest to ``name``, followed by the list of all options."""
    names = sorted(str(option) for option in options)
    close = closest(name, names)
    hint = f" Did you mean '{close}'?" if close else ""
    return f"{hint} Known: {', '.join(names) or '(none)'}."
