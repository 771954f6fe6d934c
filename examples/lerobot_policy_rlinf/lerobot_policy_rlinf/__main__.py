"""Write a folder for lerobot: ``python -m lerobot_policy_rlinf <export> <new folder>``."""

import argparse
import sys
from pathlib import Path

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from lerobot.utils.device_utils import auto_select_torch_device

from lerobot_policy_rlinf.configuration_rlinf import RLinfConfig
from lerobot_policy_rlinf.modeling_rlinf import RLinfPolicy
from lerobot_policy_rlinf.processor_rlinf import make_rlinf_pre_post_processors
from rlinf.checkpoints.folders import is_export
from rlinf.envs import ENVS
from rlinf.errors import CheckpointError, RLinfError


def write_folder(export: Path, folder: Path) -> None:
    """Copy an export into a new folder, with the files that lerobot reads."""
    if not is_export(export):
        raise CheckpointError(f"{export} is no export. Type rlinf export checkpoint=<run> output=<new folder>")
    if folder.exists():
        raise CheckpointError(f"{folder} exists; nothing is overwritten. Name a new folder")
    config = RLinfConfig(export=str(export.absolute()), device=auto_select_torch_device().type)
    made = RLinfPolicy(config)
    env = made.policy.config.env
    image = PolicyFeature(FeatureType.VISUAL, (3, env.image_size, env.image_size))
    config.input_features = {f"{OBS_IMAGES}.{name}": image for name in made.policy.cameras}
    width = ENVS.get(env.name).state_width(env)
    if width:
        config.input_features[OBS_STATE] = PolicyFeature(FeatureType.STATE, (width,))
    config.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (made.policy.action_dim,))}
    for each in (made, *make_rlinf_pre_post_processors(config)):
        each.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lerobot_policy_rlinf", description=__doc__)
    parser.add_argument("export", type=Path, help="what rlinf export wrote")
    parser.add_argument("folder", type=Path, help="new folder, for --policy.path")
    words = parser.parse_args()
    try:
        write_folder(words.export, words.folder)
    except (RLinfError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"lerobot-eval --policy.path={words.folder} --env.type=rlinf --env.checkpoint={words.export} --seed=0")
