"""Creates a LeRobot policy folder for a dataset: ``python scripts/make_lerobot_policy.py <dataset> <folder> [type] [field=value ...]``.

The policy has random weights, and the features and statistics of the dataset (a LeRobotDataset v3). Fields are lerobot settings,
such as ``dim_model=64 chunk_size=8``, except that ``state_width=6`` stores the first six values of the state as
``observation.state`` and the rest as ``observation.environment_state``, which ACT and Diffusion require for datasets without images,
and ``backbone=tiny`` gives X-VLA or GR00T a backbone with layers of 32 numbers and random weights instead of a published one.
Run this in an environment with lerobot (``bash scripts/setup.sh --lerobot``). The policy can then be trained with `rlinf sft`.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from lerobot_backbones import BACKBONES, localise

STATE, ENV_STATE = "observation.state", "observation.environment_state"
SMALLEST_STD = 1e-6
"""Values with a smaller standard deviation are treated as constant: it is set to 1, because lerobot would divide by 1e-8."""


def write(
    dataset: Path,
    folder: Path,
    kind: str = "act",
    state_width: int | None = None,
    backbone: str | None = None,
    **fields: Any,
) -> Path:
    """Write the policy to ``folder``, which must not exist."""
    import json

    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    if folder.exists():
        sys.exit(f"{folder} already exists; specify a new folder")
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
                    f"state_width={state_width}, but the dataset's state has {shape[0]} values; expected 1 to {shape[0] - 1}"
                )
            add(inputs, STATE, FeatureType.STATE, (state_width,), STATE)
            add(inputs, ENV_STATE, FeatureType.ENV, (shape[0] - state_width,), STATE, state_width)
        elif name.startswith("observation."):
            add(inputs, name, FeatureType.STATE, shape, name)
        elif name == "action":
            add(outputs, name, FeatureType.ACTION, shape, name)
    given = {"pretrained_backbone_weights": None} if kind in ("act", "diffusion", "vqbet") else {}
    if backbone == "tiny" and kind in BACKBONES:
        given = BACKBONES[kind](folder.resolve())
    elif backbone is not None:
        sys.exit(f"backbone={backbone} for {kind}; expected backbone=tiny for {' or '.join(BACKBONES)}")
    settings = {**given, **fields, "device": "cpu", "push_to_hub": False}
    config = make_policy_config(kind, input_features=inputs, output_features=outputs, **settings)
    config.normalization_mapping.setdefault("ENV", config.normalization_mapping["STATE"])  # not set by lerobot
    torch.manual_seed(0)
    policy = get_policy_class(kind)(config)
    for part in (policy, *make_pre_post_processors(config, dataset_stats=statistics)):
        part.save_pretrained(folder)
    if backbone is not None:
        localise(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    kind = sys.argv[3] if len(sys.argv) > 3 else "act"
    given = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in sys.argv[4:])}
    print(write(Path(sys.argv[1]), Path(sys.argv[2]), kind, **given))
