"""Write a new policy folder of lerobot for a dataset: ``python scripts/make_lerobot_policy.py <dataset> <folder> [type] [field=value ...]``.

Random weights; features and statistics are the dataset's, a LeRobotDataset v3. Fields are lerobot's: ``dim_model=64 chunk_size=8``.
Runs in a Python that has lerobot (``bash scripts/setup.sh --lerobot``). `rlinf sft` then trains it.
"""

import sys
from pathlib import Path
from typing import Any

import yaml


def write(dataset: Path, folder: Path, kind: str = "act", **fields: Any) -> Path:
    """Write the folder, which must not exist."""
    import json

    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    if folder.exists():
        sys.exit(f"{folder} exists; name a new folder")
    known = json.loads((dataset / "meta" / "info.json").read_text(encoding="utf-8"))["features"]
    numbers = json.loads((dataset / "meta" / "stats.json").read_text(encoding="utf-8"))
    inputs, outputs = {}, {}
    for name, each in known.items():
        shape = tuple(each["shape"])
        if each["dtype"] in ("image", "video"):
            inputs[name] = PolicyFeature(FeatureType.VISUAL, (shape[-1], *shape[:-1]))
        elif name.startswith("observation."):
            inputs[name] = PolicyFeature(FeatureType.STATE, shape)
        elif name == "action":
            outputs[name] = PolicyFeature(FeatureType.ACTION, shape)
    statistics = {
        name: {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers[name].items()}
        for name in (*inputs, *outputs)
    }
    given = {"pretrained_backbone_weights": None} if kind in ("act", "diffusion", "vqbet") else {}
    settings = {**given, **fields, "device": "cpu", "push_to_hub": False}
    config = make_policy_config(kind, input_features=inputs, output_features=outputs, **settings)
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
