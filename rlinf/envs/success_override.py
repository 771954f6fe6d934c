"""Override a simulator's success with an image classifier or with injected false positives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.envs.config import EnvConfig
from rlinf.envs.steps import SimulatorChunk
from rlinf.errors import ConfigError
from rlinf.run_folder import CLASSIFIER_FILE
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeSpec

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv


class SuccessOverride:
    """Determines success after every env step, by executing a chunk one action at a time.

    The simulator's own success becomes ``EpisodeResult.true_success``.
    """

    def __init__(self, env: VectorEnv) -> None:
        config = env.config
        self.env, self.rate = env, config.success_label_noise or 0.0
        self.classifier = None
        if config.success_classifier is not None:
            from rlinf.envs.success_network import SuccessClassifier

            self.classifier = SuccessClassifier.load(config.success_classifier)

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
        # Required even without a classifier: an env whose episode ends early in the chunk must return its last observation, even
        # if its worker is lost later.
        env._update_observation(ids)
        if self.classifier is not None:
            chunk.success[rows, position] = self.classifier.sees_success(env._observation.select(ids))
            chunk.success_known[rows, position] = True
        if self.rate:
            steps = env._stats.num_steps[ids] + position + 1
            due = [self._planted_step(env._specs[row], int(env._stats.horizons[row])) for row in ids]
            chunk.success[rows, position] |= steps == due

    def _planted_step(self, spec: EpisodeSpec, horizon: int) -> int:
        """Return the env step (from 1) of an episode's injected false positive, or 0 if it has none."""
        # Seeded by the episode, so that its error does not depend on the env slot, the run or the number of envs.
        episode = spec.suite, self.env.task_names[spec.task_id], spec.init_state_id
        generator = np.random.default_rng(derive_seed(spec.seed, "false positive", *episode))
        return int(generator.integers(1, horizon + 1)) if generator.random() < self.rate else 0


def overrides_success(config: EnvConfig) -> bool:
    """Return whether the simulator's success is overridden."""
    return config.success_classifier is not None or bool(config.success_label_noise)


def without_success_override(config: EnvConfig) -> EnvConfig:
    return replace(config, success_classifier=None, success_label_noise=None)


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
