"""A policy of rlinf behind lerobot's interface."""

import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies import PreTrainedPolicy
from lerobot.utils.constants import OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from torch import Tensor

import rlinf
from lerobot_policy_rlinf.configuration_rlinf import TRAIN_THERE, RLinfConfig
from rlinf.evaluation.evaluator import BatchedPolicy, EpisodeContext
from rlinf.models.precision import autocast
from rlinf.types import Observation


class RLinfPolicy(PreTrainedPolicy):
    """Acts greedily, as ``rlinf evaluate`` does: the actions of a batch row depend only on that row."""

    config_class = RLinfConfig
    name = "rlinf"

    def __init__(self, config: RLinfConfig, folder: Path = Path(), **kwargs: Any) -> None:
        super().__init__(config)
        self._export = folder / config.export
        self.policy = rlinf.load_policy(self._export, device=config.device, overrides=config.overrides)
        self.model = self.policy.model  # lerobot moves it
        self._rows = BatchedPolicy(self.model, [], greedy=True, temperature=1.0, seed=0)
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: RLinfConfig | None = None, **kwargs: Any
    ) -> "RLinfPolicy":
        """Load the export that ``config.json`` of a local folder names."""
        folder = Path(pretrained_name_or_path)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder on this machine; expected one. Download it first")
        config = config or RLinfConfig.from_pretrained(folder)
        return cls(config, folder).eval()

    def _save_pretrained(self, save_directory: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Copy the export, and write the ``config.json`` that names the copy."""
        config = replace(self.config, export="export")
        shutil.copytree(self._export, save_directory / config.export)
        config.save_pretrained(save_directory)

    def reset(self) -> None:
        """Start new episodes in all batch rows."""
        self._contexts: list[EpisodeContext] = []
        self._queue: deque[Tensor] = deque()

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Return ``[B, C, D]`` in the units of the env; for a model with memory, ``C`` is 1, because it must see each env step."""
        rows, _ = self.policy.rows(observation_of(batch))
        while len(self._contexts) < len(rows):
            self._contexts.append(EpisodeContext(0, getattr(self.model, "num_observations", 1)))
        with autocast(self.model, self.policy.config.model.precision):
            actions = self._rows.act(rows, self._contexts[: len(rows)])
        return torch.from_numpy(actions).to(self.config.device)

    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Return the next action ``[B, D]``; the policy is called again after the last action of a chunk."""
        if not self._queue:
            self._queue.extend(self.predict_action_chunk(batch).unbind(1))
        return self._queue.popleft()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict | None]:
        """Reject."""
        raise NotImplementedError(TRAIN_THERE)

    def get_optim_params(self) -> dict:
        """Reject."""
        raise NotImplementedError(TRAIN_THERE)


def observation_of(batch: dict[str, Any]) -> Observation:
    """Return lerobot's batch as ours.

    Args:
        batch: ``observation.images.<camera>`` float ``[B, 3, H, W]`` in 0..1; ``observation.state`` and
            ``observation.environment_state``, which are joined in this order; ``task``, ``B`` sentences.
    """
    names = [key for key in batch if key.startswith(f"{OBS_IMAGES}.")]
    images = {
        name.removeprefix(f"{OBS_IMAGES}."): (batch[name] * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
        for name in names
    }
    parts = [batch[key].float().cpu().numpy() for key in (OBS_STATE, OBS_ENV_STATE) if batch.get(key) is not None]
    return Observation(images, np.concatenate(parts, 1) if parts else None, list(batch["task"]))
