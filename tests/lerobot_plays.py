"""lerobot's own evaluation plays an export of ours: ``python tests/lerobot_plays.py <export> <new folder> <episodes>``.

Runs in a Python that has lerobot, with ``examples/lerobot_policy_rlinf`` on its path. The last line of its output is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.envs import make_env, make_env_config, make_env_pre_post_processors
from lerobot.envs.utils import preprocess_observation
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy
from lerobot_policy_rlinf.__main__ import write_folder

from rlinf.errors import RLinfError

ROWS = 4


def rejection(function, *args, **kwargs) -> str:
    """Return the message with which a call is rejected."""
    try:
        function(*args, **kwargs)
    except (NotImplementedError, ValueError, RLinfError) as error:
        return str(error)
    return ""


def main(export: str, folder: str, num_episodes: int) -> None:
    """Print two actions of each row from the first observation (of its colours, then swapped), episodes, and rejections."""
    write_folder(Path(export), Path(folder))
    env_config = make_env_config("rlinf", checkpoint=export)
    env = make_env(env_config, n_envs=ROWS)["rlinf"][0]
    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path = Path(folder)
    policy = make_policy(config, env_cfg=env_config)
    overrides = {"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}}
    before, after = make_pre_post_processors(config, pretrained_path=folder, preprocessor_overrides=overrides)
    seen, _ = env.reset(seed=0)
    told = {"actions": []}
    for front in (seen["pixels"]["front"], seen["pixels"]["front"][..., ::-1].copy()):
        policy.reset()
        batch = preprocess_observation({**seen, "pixels": {"front": front}})
        batch["task"] = list(env.call("task_description"))
        actions = np.stack([after(policy.select_action(before(dict(batch)))).numpy() for _ in range(2)], 1)
        told["actions"].append(actions.tolist())
    processors = (*make_env_pre_post_processors(env_config, config), before, after)
    with torch.no_grad():
        told["episodes"] = eval_policy(env, policy, *processors, n_episodes=num_episodes, start_seed=0)["per_episode"]
    told["training"] = rejection(policy.forward, {})
    told["seeds"] = [rejection(env.reset, seed=seed) for seed in (None, -1, 998)]
    told["no export"] = rejection(write_folder, Path(folder), Path(folder) / "new")
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
