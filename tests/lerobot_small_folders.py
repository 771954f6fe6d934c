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


PACK, UNPACK = "groot_n1_7_pack_inputs_v1", "groot_action_unpack_unnormalize_v2"


def make_groot(folder: Path, **fields: object) -> Path:
    """Write a GR00T N1.7's folder: its steps normalise, and a base folder states its sizes."""
    make(
        folder,
        "groot",
        **{"modes": dict.fromkeys(MODES, "IDENTITY"), "base_model_path": "base", "max_state_dim": 8, **fields},
    )
    base = {"model_type": "Gr00tN1d7", "model_name": "vlm", "action_horizon": 8, "max_action_dim": 8}
    for name, values in {"base": base, "vlm": {}}.items():
        (folder / name).mkdir()
        write(folder / name / "config.json", values)
    packing = {"embodiment_tag": "arm", "embodiment_mapping": {"arm": 0}, "valid_action_horizon": 6}
    steps = [{"registry_name": PACK, "config": packing, "state_file": NORMALIZER}]
    steps += [{"registry_name": "groot_n1_7_vlm_encode_v1", "config": {"model_name": "vlm"}}]
    write(folder / f"{BEFORE}.json", {"name": BEFORE, "steps": steps})
    write(folder / f"{AFTER}.json", {"name": AFTER, "steps": [{"registry_name": UNPACK, "state_file": UNNORMALIZER}]})
    return folder


def make_xvla(folder: Path, **fields: object) -> Path:
    """Write an X-VLA's folder, with the steps that it needs."""
    make(folder, "xvla", **{"action_mode": "auto", "max_action_dim": 6, "max_state_dim": 8, "num_domains": 3, **fields})
    steps = [
        {"registry_name": "xvla_imagenet_normalize"},
        {"registry_name": "xvla_add_domain_id", "config": {"domain_id": 2}},
    ]
    change(folder, f"{BEFORE}.json", lambda values: values["steps"].extend(steps))
    return folder
