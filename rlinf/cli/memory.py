"""How much memory an experiment needs, by role, before anything is loaded."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.schema import RunConfig

GIB = 1024**3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank.

    Activations and the simulators come on top; ``model.micro_batch_size`` governs the former.

    Attributes:
        num_parameters: Of the policy.
        num_trainable: Those that the optimiser updates.
        weights: The trainer's share of the weights.
        gradients: Of the trainable ones.
        optimizer: Two AdamW moments of the trainable ones.
        rollout_weights: The full copy that acts, where the trainer's weights are sharded.
        reference_weights: The frozen policy for the KL penalty.
        rollout_buffer: Images, state and per-action numbers of one rollout.
    """

    num_parameters: int
    num_trainable: int
    weights: int
    gradients: int
    optimizer: int
    rollout_weights: int
    reference_weights: int
    rollout_buffer: int

    @property
    def trainer(self) -> int:
        """Bytes of the trainer role."""
        return self.weights + self.gradients + self.optimizer + self.reference_weights

    @property
    def rollout(self) -> int:
        """Bytes of the rollout role."""
        return self.rollout_weights + self.rollout_buffer

    @property
    def total(self) -> int:
        """Bytes of one rank, whose two roles share a process."""
        return self.trainer + self.rollout

    def rows(self) -> list[tuple[str, str, str]]:
        """Return ``(role, part, size)`` for a table; parts of size 0 are left out."""
        count = f"{self.num_parameters:,} parameters, {self.num_trainable:,} trained"
        parts = [
            ("trainer", f"weights ({count})", self.weights),
            ("trainer", "gradients", self.gradients),
            ("trainer", "AdamW moments", self.optimizer),
            ("trainer", "reference policy", self.reference_weights),
            ("rollout", "copy of the weights", self.rollout_weights),
            ("rollout", "rollout buffer", self.rollout_buffer),
            ("sum", "one rank, without activations and simulators", self.total),
        ]
        return [(role, part, format_bytes(size)) for role, part, size in parts if size]


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Count the policy's parameters without allocating them, and from them the bytes of each role.

    Args:
        config: Checked configuration; ``model.model_path`` must be null or a folder.
    """
    parameters = policy_parameters(config)
    ranks = config.cluster.num_processes
    sharding = config.trainer.sharding
    sharded = ranks > 1 if sharding == "auto" else sharding == "fsdp2"
    all_bytes = sum(count * size for count, size, _ in parameters)
    trained_bytes = sum(count * size for count, size, trained in parameters if trained)
    share = ranks if sharded else 1
    samples = config.rollout.num_envs * config.rollout.num_chunks // ranks
    columns = config.model.action_chunks_len * config.model.action_token_len
    images = len(config.env.cameras) * config.env.image_size**2 * 3
    per_sample = images + columns * (8 + 3 * 4) + 12 * 8  # int64 tokens, three float32 log-probs, twelve scalars
    return MemoryEstimate(
        num_parameters=sum(count for count, _, _ in parameters),
        num_trainable=sum(count for count, _, trained in parameters if trained),
        weights=all_bytes // share,
        gradients=trained_bytes // share,
        optimizer=2 * trained_bytes // share,
        rollout_weights=all_bytes if sharded else 0,
        reference_weights=all_bytes if config.algorithm.kl_coef > 0 else 0,
        rollout_buffer=samples * per_sample if config.trainer.max_steps > 0 else 0,
    )


def policy_parameters(config: RunConfig) -> list[tuple[int, int, bool]]:
    """Return ``(elements, bytes of one, trained)`` of every parameter, from the model built on torch's meta device."""
    import torch

    from rlinf.models import get_model

    model_config = replace(config.model, lora_path=None)
    if model_config.model_path is not None:
        model_config = replace(model_config, model_path=None, init_config=_architecture(model_config))
    with torch.device("meta"):
        model = get_model(model_config)
    return [(p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()]


def checkpoint_parameters(folder: str | Path) -> int:
    """Count the elements of all tensors in the safetensors files of a folder, from their headers."""
    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def available_memory() -> int | None:
    """Return the bytes that are free on this machine's first GPU, else in its main memory; None where unknown."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def format_bytes(size: int) -> str:
    """Write a size in MiB or GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 1024**2:.1f} MiB"


def _architecture(model_config: Any) -> dict[str, Any]:
    """Read the sizes of a checkpoint from its ``config.json``, as fields for random weights."""
    from transformers import AutoConfig

    from rlinf.models import MODELS

    entry = MODELS.get(model_config.model_type).resolve()
    loaded = (entry.config or AutoConfig).from_pretrained(
        model_config.model_path, trust_remote_code=model_config.trust_remote_code
    )
    unwanted = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype", "auto_map")
    return {name: value for name, value in loaded.to_dict().items() if name in vars(loaded) and name not in unwanted}
