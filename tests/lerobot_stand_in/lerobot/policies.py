"""A linear policy with the interface of ACT, and lerobot's two functions that load one."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lerobot.processor import Pipeline


class Encoder(nn.Linear):
    """Returns ``[1, B, W]``: sequence first, as ACT's encoder."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[None]


class Linear(nn.Module):
    """Each action of a chunk is a linear function of the state and each image's mean colours."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, nn.Module()
        features = {**config.input_features}.values()
        width = sum(each["shape"][0] for each in features)
        self.model.encoder = Encoder(width, config.output_features["action"]["shape"][0])

    @classmethod
    def from_pretrained(cls, folder: str, config: Any) -> "Linear":
        policy = cls(config)
        policy.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
        return policy

    def _chunk(self, batch: dict[str, Any]) -> Tensor:
        seen = [batch[name] for name in self.config.input_features]
        flat = torch.cat([each.mean((-2, -1)) if each.ndim == 4 else each for each in seen], -1)
        return self.model.encoder(flat)[0].unsqueeze(1).expand(-1, self.config.chunk_size, -1)

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any]) -> Tensor:
        return self._chunk(batch)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict]:
        return (self._chunk(batch) - batch["action"]).square().mean(), {}


def get_policy_class(kind: str) -> type[Linear]:
    """Return the class of a type."""
    assert kind == "act", "the stand-in has one type"
    return Linear


def make_pre_post_processors(config: Any, pretrained_path: str, preprocessor_overrides: dict[str, dict]) -> tuple:
    """Load both pipelines of a folder."""
    files = {"policy_preprocessor.json": preprocessor_overrides, "policy_postprocessor.json": {}}
    return tuple(Pipeline.from_pretrained(pretrained_path, file, options) for file, options in files.items())
