"""Record episodes of a policy or an expert in a LeRobotDataset."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlinf.config.schema import RunConfig
from rlinf.data.lerobot_format import EXECUTED
from rlinf.data.lerobot_writer import LeRobotWriter
from rlinf.envs.base import VectorEnv
from rlinf.evaluation.evaluator import BatchedPolicy
from rlinf.rollout.demonstrations import EpisodeBatch
from rlinf.types import EpisodeSpec, Observation

DEFAULT_FPS = 10


class PolicyDemonstrator:
    """Returns a policy's actions, executing every chunk to its end; env slot ``i`` runs ``specs[i]``."""

    def __init__(self, policy: BatchedPolicy, specs: Sequence[EpisodeSpec]) -> None:
        self.policy, self.specs = policy, list(specs)
        self._streams = [policy.start_episode(spec) for spec in self.specs]
        self._chunks: list[list[np.ndarray]] = [[] for _ in self.specs]

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        idle = [slot for slot in np.flatnonzero(running).tolist() if not self._chunks[slot]]
        if idle:
            chunks = self.policy.act(observation.select(idle), [self._streams[slot] for slot in idle])
            for slot, chunk in zip(idle, chunks, strict=True):
                self._chunks[slot] = list(chunk)
        action_dim = next(len(chunk[0]) for chunk in self._chunks if chunk)
        actions = np.zeros((len(observation), action_dim), dtype=np.float32)
        for slot in np.flatnonzero(running).tolist():
            actions[slot] = self._chunks[slot].pop(0)
        return actions, actions

    def restart(self, row: int) -> None:
        self._chunks[row], self._streams[row] = [], self.policy.start_episode(self.specs[row])


def rate_of(config: RunConfig, env: VectorEnv) -> int:
    """Return the env steps per second of the dataset."""
    return config.collect.fps or max(1, round(env.metadata.get("render_fps", DEFAULT_FPS)))


def dataset_writer(config: RunConfig, env: VectorEnv, folder: str | Path, has_executed: bool) -> LeRobotWriter:
    """Return a writer for episodes of ``env``; ``has_executed``: their executed actions may differ from the labels."""
    return LeRobotWriter(
        folder,
        fps=rate_of(config, env),
        image_shapes=dict.fromkeys(config.env.cameras, (config.env.image_size, config.env.image_size)),
        state_dim=env.state_dim,
        action_dim=env.action_dim,
        video=config.collect.video,
        robot_type=env.suite,
        more=[EXECUTED] if has_executed else (),
    )


def write_episode(writer: LeRobotWriter, batch: EpisodeBatch, slot: int) -> None:
    """Append the episode of an env slot."""
    times = np.flatnonzero(batch.alive[:, slot])
    seen = [batch.seen[t] for t in times]
    writer.add_episode(
        {camera: np.stack([view.images[camera][slot] for view in seen]) for camera in seen[0].images},
        None if seen[0].state is None else np.stack([view.state[slot] for view in seen]),
        batch.labels[times, slot],
        seen[0].instruction[slot],
        rewards=batch.rewards[times, slot],
        success=batch.success[times, slot],
        truncated=bool(batch.truncated[slot]),
        more={EXECUTED: batch.executed[times, slot]},
    )
