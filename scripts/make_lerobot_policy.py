"""Write a new policy folder of lerobot for a dataset: ``python scripts/make_lerobot_policy.py <dataset> <folder> [type] [field=value ...]``.

Random weights; features and statistics are the dataset's, a LeRobotDataset v3. Fields are lerobot's: ``dim_model=64 chunk_size=8``.
``state_width=6`` is not: the first 6 numbers of the state are then ``observation.state``, and the others ``observation.environment_state``,
without which ACT and Diffusion reject a dataset without images.
Runs in a Python that has lerobot (``bash scripts/setup.sh --lerobot``). `rlinf sft` then trains it.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

STATE, ENV_STATE = "observation.state", "observation.environment_state"
SMALLEST_STD = 1e-6
"""A number that varies less counts as constant, and its deviation becomes 1: lerobot would divide by 1e-8."""


def write(dataset: Path, folder: Path, kind: str = "act", state_width: int | None = None, **fields: Any) -> Path:
    """Write the folder, which must not exist."""
    import json

    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    if folder.exists():
        sys.exit(f"{folder} exists; name a new folder")
    known = json.loads((dataset / "meta" / "info.json").read_text(encoding="utf-8"))["features"]
    numbers = json.loads((dataset / "meta" / "stats.json").read_text(encoding="utf-8"))
    inputs, outputs, statistics = {}, {}, {}

    def add(to: dict, name: str, kind: FeatureType, shape: tuple[int, ...], source: str, first: int = 0) -> None:
        to[name] = PolicyFeature(kind, shape)
        read = {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers[source].items()}
        own = {key: each if key == "count" else each[first : first + shape[0]] for key, each in read.items()}
        own["std"] = torch.where(own["std"] < SMALLEST_STD, 1.0, own["std"])
        statistics[name] = own

    for name, each in known.items():
        shape = tuple(each["shape"])
        if each["dtype"] in ("image", "video"):
            add(inputs, name, FeatureType.VISUAL, (shape[-1], *shape[:-1]), name)
        elif name == STATE and state_width is not None:
            if not 0 < state_width < shape[0]:
                sys.exit(
                    f"state_width={state_width}, and the dataset's state has {shape[0]}; required: 1 to {shape[0] - 1}"
                )
            add(inputs, STATE, FeatureType.STATE, (state_width,), STATE)
            add(inputs, ENV_STATE, FeatureType.ENV, (shape[0] - state_width,), STATE, state_width)
        elif name.startswith("observation."):
            add(inputs, name, FeatureType.STATE, shape, name)
        elif name == "action":
            add(outputs, name, FeatureType.ACTION, shape, name)
    given = {"pretrained_backbone_weights": None} if kind in ("act", "diffusion", "vqbet") else {}
    settings = {**given, **fields, "device": "cpu", "push_to_hub": False}
    config = make_policy_config(kind, input_features=inputs, output_features=outputs, **settings)
    config.normalization_mapping.setdefault("ENV", config.normalization_mapping["STATE"])  # lerobot leaves it as it is
    torch.manual_seed(0)
    policy = get_policy_class(kind)(config)
    for part in (policy, *make_pre_post_processors(config, dataset_stats=statistics)):
        part.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    kind = sys.argv[3] if len(sys.argv) > 3 else "act"
    given = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in sys.argv[4:])}
    print(write(Path(sys.argv[1]), Path(sys.argv[2]), kind, **given))
