"""Base class of policies that reject checkpoint folders whose weights do not fit exactly."""

import inspect
import json
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf.distributed.deferred import FileTensor, Weight, in_memory, open_tensors
from rlinf.errors import CheckpointError
from rlinf.files import write_text
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.loading import check_fit, checkpoint_folder, instead_of_weights, read_json
from rlinf.models.precision import heads_in_float32
from rlinf.models.weights_in_files import READ_WHOLE, NotDeferredError, defer_weights, without_weights
from rlinf.run_folder import POLICY_FILE

logger = logging.getLogger("rlinf")


class FolderPolicy(ActionModel):
    """A policy stored as ``model*.safetensors``; subclasses override the methods below for other layouts.

    Do not inherit from it directly, but from ``CheckpointPolicy`` or ``PlainPolicy``, which add the ``nn.Module``.
    """

    @classmethod
    def check_settings(cls, config: Any, **arguments: Any) -> None:
        """Validate constructor arguments before weights are read; ``attn_implementation`` is not set on ``config`` yet."""

    @classmethod
    def _read_weights(cls, folder: Path, config: Any, arguments: dict[str, Any]) -> dict[str, Weight]:
        """Return a folder's tensors under our module names; with ``open_safetensors``, they stay in their files."""
        return open_safetensors(folder)

    @classmethod
    def _new_heads(cls, config: Any, arguments: dict[str, Any]) -> dict[str, nn.Module | None]:
        """Return heads with new weights by name, for folders that lack them; None for a head the model does not have."""
        return {}

    def _public_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Undo ``_read_weights``."""
        return state_dict

    @classmethod
    def _fix(cls, config: Any) -> dict[str, Any]:
        """Return settings, in addition to a different folder, to suggest if the weights do not fit."""
        return {}

    @property
    def frozen_modules(self) -> list[str]:
        """Names of modules that are never trained."""
        return []

    @property
    def lora_exclude_modules(self) -> str | None:
        """``frozen_modules`` as a pattern; adapters in these would receive no gradient."""
        names = "|".join(map(re.escape, self.frozen_modules))
        return rf"({names})(\..*)?" if names else None

    def _freeze(self) -> None:
        """Freeze ``frozen_modules``; called by the constructor, and again after loading, which replaces parameters."""
        for name in self.frozen_modules:
            self.get_submodule(name).requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, deferred: bool = False, **kwargs: Any
    ) -> Any:
        """Load a public folder or hub id, or a folder saved by rlinf, which also stores constructor arguments.

        Settings are checked before weights are read. Every weight must fit, except that complete heads may be missing;
        these are newly initialised. With ``deferred``, the weights stay in their files if possible.
        """
        folder = checkpoint_folder(pretrained_model_name_or_path)
        config = kwargs.pop("config", None)
        if not isinstance(config, cls.config_class):
            config = cls.config_class.from_pretrained(config or folder)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]  # without self and config
        saved = read_json(folder / POLICY_FILE) if (folder / POLICY_FILE).is_file() else {}
        for parameter in parameters[len(args) :]:
            if parameter.name in saved:
                kwargs.setdefault(parameter.name, saved[parameter.name])
        arguments = {parameter.name: kwargs.get(parameter.name, parameter.default) for parameter in parameters}
        arguments |= dict(zip(arguments, args, strict=False))
        cls.check_settings(config, attn_implementation=kwargs.get("attn_implementation"), **arguments)
        weights = cls._read_weights(folder, config, arguments)
        for name, head in cls._new_heads(config, arguments).items():
            head_keys = {key for key in weights if key.startswith(f"{name}.")}
            if head is None and head_keys:
                logger.warning("%s: weights of %s ignored, because the model is configured without it", folder, name)
                weights = {key: weight for key, weight in weights.items() if key not in head_keys}
            elif head is not None and not head_keys:
                weights |= {f"{name}.{key}": tensor for key, tensor in head.state_dict().items()}
        because = None
        if deferred:
            try:
                return cls._deferred(config, weights, arguments, kwargs)
            except NotDeferredError as reason:
                because = str(reason)
        state_dict = {name: in_memory(weight) for name, weight in weights.items()}
        wanted_info = kwargs.pop("output_loading_info", False)
        model, info = cls._with_weights(config, state_dict, *args, **kwargs)
        check_fit(folder, info, **cls._fix(config))
        model._freeze()
        setattr(model, READ_WHOLE, because)
        return (model, info) if wanted_info else model

    @classmethod
    @abstractmethod
    def _with_weights(cls, config: Any, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Build the policy from the weights that fit; also return loading info on the remaining ones for ``check_fit``."""

    @abstractmethod
    def _write(self, folder: str | Path, state_dict: dict[str, Tensor], **kwargs: Any) -> None:
        """Write the configuration, and the weights under their public names."""

    @classmethod
    def _deferred(
        cls, config: Any, weights: Mapping[str, Weight], arguments: dict[str, Any], options: Mapping[str, Any]
    ) -> Any:
        """Build the policy, leaving all weights except heads in their files; raise NotDeferredError if impossible."""
        if not any(isinstance(weight, FileTensor) for weight in weights.values()):
            raise NotDeferredError(f"{cls.__name__} reads its files itself")
        attention = options.get("attn_implementation")
        given = {} if attention is None else {"attn_implementation": attention}
        dtype = options.get("torch_dtype", options.get("dtype", torch.float32))
        # Do not advance the random state, so that adapters, drawn next, are the same as for weights in memory.
        with torch.random.fork_rng(devices=[]):
            model = heads_in_float32(without_weights(cls, config, dtype=dtype, **given, **arguments))
        defer_weights(model, weights, complete=cls.trained_in_full)
        model._freeze()
        return model.eval()

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        state_dict = self.state_dict() if state_dict is None else state_dict
        reject_adapters(state_dict)
        self._write(folder, self._public_weights(state_dict), **kwargs)
        arguments = {"action_dim": self.action_dim, "action_chunks_len": self.action_chunks_len}
        if getattr(self, "unnorm_key", None) is not None:
            arguments["unnorm_key"] = self.unnorm_key
        write_text(Path(folder) / POLICY_FILE, json.dumps(arguments, indent=1))
        if self.processor is not None:
            self.processor.save_pretrained(folder)


def open_safetensors(folder: str | Path) -> dict[str, FileTensor]:
    """Return the tensors of a folder's ``model*.safetensors``, still in files; reject a folder with missing shards."""
    folder = Path(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"'{folder}' contains no model*.safetensors: {instead_of_weights(folder)}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(wanted - {file.name for file in files})
        if missing:
            raise CheckpointError(f"'{folder}' is incomplete: its index lists {', '.join(missing)}, which is missing.")
        files = [folder / name for name in sorted(wanted)]
    return open_tensors(files)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a temporary file next to ``path``, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)


def reject_adapters(names: Iterable[str]) -> None:
    """Raise CheckpointError if the tensor ``names`` include LoRA layers."""
    if any(".lora_" in name for name in names):
        raise CheckpointError(
            "The model has LoRA layers, which a public folder cannot contain; write them with "
            "rlinf.models.lora.save_adapter, or merge them first with rlinf.models.lora.merge_lora."
        )
