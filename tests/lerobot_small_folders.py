"""Folders as lerobot 0.6 writes them, of a policy with one layer, and ways to change them. Nothing here needs lerobot."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODES = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"
NORMALIZER, UNNORMALIZER = (
    f"{BEFORE}_step_3_normalizer_processor.safetensors",
    f"{AFTER}_step_0_unnormalizer_processor.safetensors",
)


def write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def change(folder: Path, file: str, edit: Callable[[dict], object]) -> None:
    values = json.loads((folder / file).read_text())
    edit(values)
    write(folder / file, values)


def change_tensors(folder: Path, file: str, edit: Callable[[dict], dict]) -> None:
    save_file(edit(load_file(folder / file)), folder / file)


def image(name: str = "front", shape: tuple[int, ...] = (3, 32, 32)) -> dict:
    return {f"observation.images.{name}": {"type": "VISUAL", "shape": list(shape)}}


def make(
    folder: Path,
    kind: str = "act",
    images: dict | None = None,
    modes: dict[str, str] = MODES,
    state: int = 6,
    actions: int = 4,
    **fields: object,
) -> Path:
    """Write what lerobot 0.6 writes for a policy of one linear layer."""
    folder.mkdir()
    inputs = {**(image() if images is None else images), "observation.state": {"type": "STATE", "shape": [state]}}
    inputs |= fields.pop("inputs", {})
    outputs = {"action": {"type": "ACTION", "shape": [actions]}}
    config = {"type": kind, "n_obs_steps": 1, "chunk_size": 8, "n_action_steps": 4, "input_features": inputs}
    write(folder / "config.json", {**config, "output_features": outputs, "normalization_mapping": modes, **fields})
    save_file(
        {"model.layer.weight": torch.ones(2, 2), "model.layer.bias": torch.zeros(2)}, folder / "model.safetensors"
    )
    features = {**inputs, "action": outputs["action"]}
    step = {"config": {"eps": 1e-8, "features": features, "norm_map": modes}}
    before = [{"registry_name": "rename_observations_processor", "config": {"rename_map": {}}}]
    before += [{**step, "registry_name": "normalizer_processor", "state_file": NORMALIZER}]
    after = [{**step, "registry_name": "unnormalizer_processor", "state_file": UNNORMALIZER}]
    write(folder / f"{BEFORE}.json", {"name": BEFORE, "steps": before})
    write(folder / f"{AFTER}.json", {"name": AFTER, "steps": after})
    statistics = {}
    for name, each in features.items():
        shape = (3, 1, 1) if each["type"] == "VISUAL" else tuple(each["shape"])
        low = torch.full(shape, 0.25)
        statistics |= {
            f"{name}.{part}": low + offset for part, offset in {"mean": 0, "std": 0.5, "min": 0, "max": 1}.items()
        }
        statistics |= {
            f"{name}.{part}": low + offset for part, offset in {"q01": 0, "q99": 1, "q10": 0, "q90": 1}.items()
        }
    save_file(statistics, folder / NORMALIZER)
    save_file(statistics, folder / UNNORMALIZER)
    return folder
