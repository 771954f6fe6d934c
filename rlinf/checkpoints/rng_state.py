"""Saving and loading a process's random states as tensors and numbers, so that loading never runs pickled code."""

import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.errors import CheckpointError
from rlinf.files import naming


def rng_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """Return a copy of the random states of Python, NumPy, torch and the given generators."""
    version, integers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "integers": torch.tensor(integers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": legacy["bit_generator"], "keys": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]), "has_gauss": int(legacy["has_gauss"]), "cached": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state | {"generators": {name: generator.get_state() for name, generator in (generators or {}).items()}}


def save_rng_state(path: Path, state: dict[str, Any]) -> None:
    """Write the result of ``rng_state`` to a file."""
    with naming(path):
        torch.save(state, path)


def load_rng_state(path: Path, generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Restore random states from a file; raise CheckpointError if it does not contain any."""
    try:
        state = torch.load(path, weights_only=True)
        _set_state(state)
        for name, generator in (generators or {}).items():
            generator.set_state(state["generators"][name])
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        # Omit the error's text: it recommends `weights_only=False`, which would run pickled code.
        reason = type(error).__name__
        raise CheckpointError(f"{path} contains no random states ({reason}). Use a different checkpoint.") from error


def _set_state(state: dict[str, Any]) -> None:
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["integers"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
