"""Success of the scripted expert on LIBERO: `python benchmarks/libero_expert.py <suite> <drawn or recorded> <episodes per task>`."""

import sys

import numpy as np

from rlinf.envs.libero.env import DRAWN_OFFSET, EVAL_SEED, TRAIN_SEED, LiberoConfig, LiberoSimulator, LiberoVectorEnv
from rlinf.evaluation.intervals import wilson_interval
from rlinf.types import EpisodeSpec


def main(suite: str, states: str, num_episodes: int) -> None:
    config = LiberoConfig(suite=suite, cameras=[], rendering="fast", num_processes=0, max_scenes=1)
    names = LiberoVectorEnv.all_task_names(config)
    simulator = LiberoSimulator(config, names)
    first, seed = (DRAWN_OFFSET, TRAIN_SEED) if states == "drawn" else (0, EVAL_SEED)
    for task_id, name in enumerate(names):
        lengths = []
        for number in range(num_episodes):
            simulator.reset(EpisodeSpec(suite, task_id, first + number, seed))
            for step in range(LiberoVectorEnv.horizon_of(config, name)):
                if simulator.step(simulator.expert_action()).success:
                    lengths.append(step + 1)
                    break
        low, high = wilson_interval(len(lengths), num_episodes)
        print(
            f"| {name} | {len(lengths)}/{num_episodes} | {low:.1%} - {high:.1%} | {np.median(lengths or [0]):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
