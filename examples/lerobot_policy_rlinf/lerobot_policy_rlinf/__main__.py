"""Write a folder for lerobot: ``python -m lerobot_policy_rlinf <export> <new folder>``."""

import argparse
import shutil
import sys
from pathlib import Path

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

import rlinf
from lerobot_policy_rlinf.configuration_rlinf import RLinfConfig
from lerobot_policy_rlinf.processor_rlinf import make_rlinf_pre_post_processors
from rlinf.checkpoints.folders import is_export
from rlinf.envs import ENVS
from rlinf.errors import CheckpointError, RLinfError


def write_folder(export: Path, folder: Path) -> None:
    """Copy an export into ``folder`` and add the files that lerobot reads."""
    if not is_export(export):
        raise CheckpointError(f"{export} is no export. Type rlinf export checkpoint=<run> output={export}")
    policy = rlinf.load_policy(export, device="cpu")
    env = policy.config.env
    picture = PolicyFeature(FeatureType.VISUAL, (3, env.image_size, env.image_size))
    inputs = {f"{OBS_IMAGES}.{name}": picture for name in policy.cameras or ()}
    width = ENVS.get(env.name).state_width(env)
    if width:
        inputs[OBS_STATE] = PolicyFeature(FeatureType.STATE, (width,))
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (policy.action_dim,))}
    config = RLinfConfig(input_features=inputs, output_features=outputs, device="cpu")
    shutil.copytree(export, folder / config.export)
    for each in (config, *make_rlinf_pre_post_processors(config)):
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
