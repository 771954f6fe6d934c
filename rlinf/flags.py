"""Validation of flags (such as success, end of episode, intervention) and rewards from external code or files."""

import numpy as np

from rlinf.errors import ConfigError


def flags_of(values: object, what: str) -> np.ndarray:
    """Convert flags to bool, preserving their shape. Raise ConfigError, naming ``what``, unless all are true, false, 0 or 1."""
    array = _array(values, what)
    # Do not use `bool(...)`, which is true for NaN, text and fractions.
    is_flag = np.isin(array, (0, 1)) if array.dtype.kind in "biuf" else np.zeros(array.shape, dtype=bool)
    if not is_flag.all():
        place = tuple(map(int, np.argwhere(~is_flag)[0]))
        at = f" at {list(place)}" if array.size > 1 else ""
        raise ConfigError(f"{what} is {array.item(*place)!r:.80}{at}; expected true, false, 0 or 1")
    return array.astype(bool)


def flag_of(value: object, what: str) -> bool:
    """Return one flag, which may be a one-element array; raise ConfigError like ``flags_of``."""
    return bool(value) if isinstance(value, bool | np.bool_) else bool(flags_of(_single(value, what), what))


def number_of(value: object, what: str) -> float:
    """Return one number, which may be a one-element array; raise ConfigError for anything else."""
    array = _single(value, what)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{what} is {value!r:.80}; expected a number")
    return float(array)


def _single(value: object, what: str) -> np.ndarray:
    if (array := _array(value, what)).size != 1:
        raise ConfigError(f"{what} is {value!r:.80}; expected one value")
    return array.reshape(())


def _array(values: object, what: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        # For example, a ragged list, a tensor that requires gradients, or a tensor on a GPU.
        raise ConfigError(f"{what} is {values!r:.80}, which is not an array ({error})") from error
