"""A policy pickled without its weights, and the policy that another process builds from it and pushed weights."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.engines.weight_handle import WeightsHandle
from rlinf.engines.weight_transfer import ModuleReceiver, PushHeader
from rlinf.errors import ConfigError, RLinfError
from rlinf.rollout.shared_memory import TensorForm, reject_main_script


@dataclass(frozen=True)
class PolicySkeleton:
    """A policy pickled without the values of its state dict, which a weight push supplies.

    Rollout workers therefore need neither the weight files nor their source. Buffers outside the state dict are included.
    """

    data: bytes

    @classmethod
    def of(cls, model: nn.Module) -> PolicySkeleton:
        """Pickle a plain model on the CPU, or one whose weights are still in files; raise ConfigError if it cannot be pickled."""
        data = io.BytesIO()
        try:
            _Pickler(data, model).dump(model)
        except Exception as error:  # user classes may raise anything
            message = f"The policy cannot be sent to rollout workers: {type(error).__name__}: {error}"
            raise ConfigError(f"{message}. Set cluster.placement=colocated cluster.start=auto") from error
        return cls(data.getvalue())

    def build(self, device: str) -> Any:
        """Return the policy on a device, in evaluation mode. Its state dict is uninitialised."""
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

        policy = _Unpickler(io.BytesIO(self.data)).load()
        for module in policy.modules():
            if isinstance(module, PreTrainedModel):
                # Unpickling skips the constructor, which does this; without it, a model returns no hidden states.
                _CAN_RECORD_REGISTRY[str(type(module))] = module._can_record_outputs
        return policy.to(device).eval()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file, protocol=5)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        pushed = set(model.state_dict())
        self.pushed = {id(tensor) for name, tensor in named if name in pushed}

    def persistent_id(self, value: Any) -> tuple[int, TensorForm] | None:
        reject_main_script(value)
        # Tied tensors have the same id, so they remain tied.
        return (id(value), TensorForm.of(value)) if isinstance(value, Tensor) and id(value) in self.pushed else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: dict[int, Tensor] = {}

    def persistent_load(self, pushed: tuple[int, TensorForm]) -> Tensor:
        key, form = pushed
        if key not in self.made:
            self.made[key] = form.typed(torch.empty_strided(form.shape, form.stride, dtype=form.dtype))
        return self.made[key]


class PolicyReplica:
    """A policy built from its skeleton, with the most recently pushed weights; the base class of rollout workers."""

    def __init__(self, shell: PolicySkeleton, device: str) -> None:
        self.model = shell.build(device)
        self.receiver = ModuleReceiver(self.model)

    @property
    def version(self) -> int | None:
        """Version of the weights, or None before the first push or after an incomplete one."""
        return self.receiver.version

    def start_push(self, header: PushHeader) -> None:
        """Prepare to receive a version of the weights; see ``WeightReceiver``. The policy cannot act until ``commit``."""
        self.receiver.start_push(header)

    def load(self, bucket: WeightsHandle) -> None:
        """Load a bucket of weights."""
        self.receiver.load(bucket)

    def commit(self) -> int:
        """Complete a push and return its version."""
        return self.receiver.commit()

    def close(self) -> None:
        """Release the worker's resources."""

    def _complete_version(self) -> int:
        """Return the version of the weights; raise RLinfError if no push has completed."""
        if self.version is None:
            raise RLinfError(
                "A rollout worker has no complete weights: no push has completed, or the last one was rejected. Push again"
            )
        return self.version
