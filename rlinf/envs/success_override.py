"""Override a simulator's success with an image classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.envs.steps import SimulatorChunk
from rlinf.errors import ConfigError
from rlinf.run_folder import CLASSIFIER_FILE

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv


class SuccessOverride:
    """Determines success after every env step, by executing a chunk one action at a time.

    The simulator's own success becomes ``EpisodeResult.true_success``.
    """

    def __init__(self, env: VectorEnv) -> None:
        from rlinf.envs.success_network import SuccessClassifier

        self.env, self.classifier = env, SuccessClassifier.load(env.config.success_classifier)

    def step_chunk(self, ids: np.ndarray, actions: np.ndarray, steps_left: np.ndarray) -> SimulatorChunk:
        """Step like ``VectorEnv._step_chunk``, but override success."""
        env, chunk = self.env, SimulatorChunk.empty(*actions.shape[:2])
        active = np.ones(len(ids), dtype=bool)
        for position in range(actions.shape[1]):
            rows = np.flatnonzero(active)
            if not len(rows):
                break
            step = env._step_chunk(ids[rows], actions[rows, position : position + 1], steps_left[rows] - position)
            active[rows] = step.executed[:, 0] & ~env._lost[ids[rows]]
            for array, values in zip(chunk, step, strict=True):
                array[rows, position] = values[:, 0]
            rows = np.flatnonzero(active)
            if len(rows):
                self._decide(ids[rows], chunk, rows, position)
            ended = chunk.ended(env.config.terminate_on_success)[:, position]
            active &= ~ended & (position + 1 < steps_left) & ~env._lost[ids]
        return chunk

    def _decide(self, ids: np.ndarray, chunk: SimulatorChunk, rows: np.ndarray, position: int) -> None:
        """Override the success of a chunk's ``rows``, which correspond to the envs ``ids``, at one ``position``."""
        env, known, success = self.env, chunk.success_known[rows, position], chunk.success[rows, position]
        env._stats.true_success[ids] = np.maximum(env._stats.true_success[ids], np.where(known, success, -1))
        env._update_observation(ids)
        chunk.success[rows, position] = self.classifier.sees_success(env._observation.select(ids))
        chunk.success_known[rows, position] = True


def read_classifier(folder: str) -> dict[str, Any]:
    """Return the description of a classifier written by ``rlinf classifier``; raise ConfigError if the folder has none."""
    path = Path(folder).expanduser() / CLASSIFIER_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if "networks" not in about:
            raise ValueError(f"{path} was written by an earlier version")
        return about
    except (OSError, ValueError) as error:
        problem = f"env.success_classifier='{folder}' is not a classifier ({type(error).__name__}: {error})"
        raise ConfigError(f"{problem}; expected the output_dir of `rlinf classifier`. Set it, or null") from error


def check_success_classifier(config: EnvConfig) -> None:
    """Raise ConfigError if ``config.success_classifier`` is not a classifier or expects a different camera or image size."""
    about, shown = read_classifier(config.success_classifier), config.cameras or []
    (height, width), camera = about["image_shape"], about["camera"]
    if camera not in shown or not height == width == config.image_size:
        raise ConfigError(
            f"env.cameras=[{','.join(shown)}] env.image_size={config.image_size}; expected '{camera}' with {height} x {width} pixels, on "
            f"which the classifier {config.success_classifier} was trained. Set env.cameras=[{camera}] env.image_size={height}, or "
            "env.success_classifier=null"
        )
