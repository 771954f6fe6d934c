"""Pipelines of lerobot: steps by registered name, else by the import path under ``class``, which is called."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS: dict[str, Callable[..., Any]] = {}


def register(name: str) -> Callable[[Any], Any]:
    """Make a step known by name."""
    return lambda step: STEPS.setdefault(name, step)


@register("rename_observations_processor")
class Rename:
    """Renames observations."""

    def __init__(self, rename_map: dict[str, str]) -> None:
        self.names = rename_map

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {self.names.get(name, name): each for name, each in batch.items()}


class Statistics:
    """Mean and std by feature."""

    def __init__(self, features: dict, norm_map: dict[str, str], eps: float) -> None:
        modes = {name: norm_map.get(each["type"], "IDENTITY") for name, each in features.items()}
        assert set(modes.values()) <= {"MEAN_STD", "IDENTITY"}, "the stand-in knows no other mode"
        self.names, self.eps, self.state = {name for name, mode in modes.items() if mode == "MEAN_STD"}, eps, {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state[f"{name}.mean"], self.state[f"{name}.std"]


@register("normalizer_processor")
class Normalizer(Statistics):
    """Normalises observations, and the action if there is one."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = dict(batch)
        for name in self.names & batch.keys():
            mean, std = self.moments(name)
            done[name] = (batch[name] - mean) / (std + self.eps)
        return done


@register("unnormalizer_processor")
class Unnormalizer(Statistics):
    """Brings an action ``[B, D]`` back."""

    def __call__(self, action: torch.Tensor) -> torch.Tensor:
        mean, std = self.moments("action")
        return action * std + mean


class Pipeline:
    """Steps one after the other."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    @classmethod
    def from_pretrained(cls, folder: str | Path, config_filename: str, overrides: dict[str, dict]) -> "Pipeline":
        steps = []
        for entry in json.loads((Path(folder) / config_filename).read_text())["steps"]:
            if "registry_name" in entry:
                make, key = STEPS[entry["registry_name"]], entry["registry_name"]
            else:
                module, _, key = entry["class"].rpartition(".")
                make = getattr(importlib.import_module(module), key)
            step = make(**{**entry.get("config", {}), **overrides.get(key, {})})
            if "state_file" in entry and hasattr(step, "load_state_dict"):
                step.load_state_dict(load_file(Path(folder) / entry["state_file"]))
            steps.append(step)
        return cls(steps)

    def __call__(self, values: Any) -> Any:
        for step in self.steps:
            values = step(values)
        return values
