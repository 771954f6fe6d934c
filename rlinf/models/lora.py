"""LoRA adapters (Hu et al. 2021): adding them to a policy in place, saving, loading, merging, and pushing merged weights.

Adapter folders use PEFT's layout plus ``trained_in_full.safetensors`` for the modules in ``ActionModel.trained_in_full``.
"""

import copy
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rlinf.distributed.deferred import is_deferred
from rlinf.distributed.transfers import check_loaded
from rlinf.engines.weight_handle import TensorSpec, WeightBuckets
from rlinf.engines.weight_transfer import ModuleWeights
from rlinf.errors import CheckpointError, ConfigError, closest, did_you_mean
from rlinf.models.base_weights import base_tensors, trained_names
from rlinf.models.config import LoraConfig
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.folder_policy import write_safetensors
from rlinf.models.loading import read_json
from rlinf.models.lora_linear import fuse_adapters
from rlinf.run_folder import ADAPTER_FILE, FULL_FILE

logger = logging.getLogger("rlinf")

_PEFT_PREFIX = "base_model.model."
TARGETS = "lora.target_modules"


def apply_lora(model: nn.Module, lora: LoraConfig, lora_path: str | None = None) -> Any:
    """Add adapters to ``model.lora_target_modules``, in place, and freeze all except ``model.trained_in_full``.

    Raise CheckpointError if the adapter in ``lora_path`` does not fit this model or is already merged into its weights.

    Args:
        lora: LoRA settings; ``target_modules`` overrides the model's default.
        lora_path: Adapter folder to continue from; its rank, scale and targets must match ``lora``.
    """
    if has_adapters(model):
        raise ConfigError("This model already has LoRA adapters; a second set is not supported.")
    in_full = rf"({'|'.join(model.trained_in_full)})(\..*)?" if model.trained_in_full else None
    excluded = [pattern for pattern in (in_full, getattr(model, "lora_exclude_modules", None)) if pattern]
    saved = None if lora_path is None else _saved_settings(Path(lora_path), lora)
    config = saved or PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha)
    config.lora_dropout, config.exclude_modules = lora.dropout, config.exclude_modules or "|".join(excluded) or None
    if lora.target_modules:
        _check_targets(model, lora.target_modules, in_full)
    if lora.target_modules or lora_path is None:
        targets = lora.target_modules or model.lora_target_modules
        config.target_modules = targets if isinstance(targets, str) else set(targets)
    try:
        with _adapters_in_memory() if is_deferred(model) else nullcontext():
            inject_adapter_in_model(config, model)
    except (ValueError, TypeError, AttributeError, re.error) as error:
        if not lora.target_modules and lora_path is not None:
            raise _unusable(Path(lora_path), error) from error
        problem = f"{TARGETS}={lora.target_modules} matches no layer of {type(model).__name__}: {error}."
        raise ConfigError(problem, **{TARGETS: None}) from error
    _match_formats_on_meta(model)
    fuse_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or is_trained_in_full(model, name))
    if lora_path is not None:
        _load_adapter(model, Path(lora_path))
    return model


def _match_formats_on_meta(model: nn.Module) -> None:
    """Cast adapters on the meta device to the dtype of their base weights, as PEFT does on all other devices."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            dtype = layer.get_base_layer().weight.dtype
            for name, parameter in layer.named_parameters():
                if parameter.is_meta and "lora_" in name and dtype.is_floating_point:
                    parameter.data = parameter.data.to(dtype)


@contextmanager
def _adapters_in_memory() -> Iterator[None]:
    """Keep new adapters in memory, as no file contains them; PEFT would move them to the base weights' meta device."""
    move, drawn = BaseTunerLayer._move_adapter_to_device_of_base_layer, []

    def keep(layer: BaseTunerLayer, name: str, device: torch.device | None = None) -> None:
        move(layer, name, device or torch.device("cpu"))
        for part in layer.adapter_layer_names:
            adapters = getattr(layer, part, None)
            for module in adapters.modules() if isinstance(adapters, nn.Module) else ():
                drawn.extend((module, key, parameter) for key, parameter in module._parameters.items())

    BaseTunerLayer._move_adapter_to_device_of_base_layer = keep
    try:
        yield
    finally:
        BaseTunerLayer._move_adapter_to_device_of_base_layer = move
    for module, key, parameter in drawn:
        module._parameters[key] = parameter


def adapted_weights(model: nn.Module) -> list[Tensor]:
    """Return the base weights of all layers with an adapter."""
    return [layer.get_base_layer().weight for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def has_adapters(model: nn.Module) -> bool:
    """Return whether any layer has an adapter."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def is_trained_in_full(model: nn.Module, name: str) -> bool:
    """Return whether the tensor ``name`` is trained in full (not adapted) alongside the LoRA adapters."""
    return name.split(".")[0] in model.trained_in_full


def adapter_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the adapter tensors under PEFT's names (``base_model.model....lora_A.weight``)."""
    tensors = get_peft_model_state_dict(model, state_dict=None if state_dict is None else dict(state_dict))
    return {f"{_PEFT_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def save_adapter(model: nn.Module, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write an adapter folder; for ``state_dict`` see ``adapter_state_dict``."""
    if not has_adapters(model):
        raise ConfigError("The model has no LoRA layers to save. Set model.is_lora=true")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if state_dict is None else state_dict
    full = {name: tensor for name, tensor in state.items() if is_trained_in_full(model, name)}
    write_safetensors(folder / ADAPTER_FILE, adapter_state_dict(model, state_dict))
    write_safetensors(folder / FULL_FILE, full)
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def merge_lora(model: nn.Module, inputs: dict[str, Tensor] | None = None, atol: float | None = None) -> Any:
    """Return a copy of the policy with the adapters merged into the weights; ``model`` is not changed.

    The adapter's fingerprint is added to the copy's config (``merged_adapters``), so that it is never merged twice.

    Args:
        model: Unsharded policy with adapters.
        inputs: Result of ``preprocess`` (or arguments of ``forward``) used to compare both models; None skips this check.
        atol: Tolerance of this check, beyond which CheckpointError is raised. None allows 1e-4 (float32) or 0.25 (16-bit)
            times the maximum value, or times 1 if that is smaller.
    """
    if not has_adapters(model):
        done = " (they were merged before)" if getattr(model.config, "merged_adapters", []) else ""
        raise ConfigError(f"The model has no LoRA layers to merge{done}.")
    check_untied(model)
    adapters = adapter_state_dict(model)
    fingerprint = adapter_fingerprint(adapters)
    _reject_second_merge(model, adapters)
    merged = copy.deepcopy(model)
    for name, module in list(merged.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(merged.get_submodule(parent), child, module.get_base_layer())
    del merged.peft_config
    merged.config.merged_adapters = [*getattr(merged.config, "merged_adapters", []), fingerprint]
    for parameter in merged.parameters():
        parameter.requires_grad_(False)
    if inputs is not None:
        _check_same_predictions(model, merged, inputs, atol)
    return merged


def merged_tensors(
    model: nn.Module, names: Collection[str] | None = None, state: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the merged policy's tensors one by one; adapted weights are new tensors.

    ``names`` (without adapters) selects tensors. ``state`` contains a sharded model's gathered weights; None uses the model's own.
    """
    check_untied(model)
    for name, tensor in base_tensors(model, state):
        if names is None or name in names:
            module, _, parameter = name.rpartition(".")
            layer = model.get_submodule(module)
            if isinstance(layer, BaseTunerLayer) and parameter == "weight":
                tensor = tensor + layer.get_delta_weight("default").to(tensor)
            yield name, tensor


def merged_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    return dict(merged_tensors(model, state=state))


class MergedCopy:
    """A policy for rollouts: a copy whose adapters are merged, while the original keeps base weights and adapters apart.

    The copy has its own weights for adapted layers only; ``refresh`` overwrites them in place, so that CUDA graphs remain valid. All
    remaining parameters and buffers are the original's. Raise ConfigError without adapters or with tied adapted weights.

    Attributes:
        policy: The copy. Its adapted weights are 0 before the first ``refresh``.
    """

    def __init__(self, model: ActionModel) -> None:
        if not has_adapters(model):
            raise ConfigError("The model has no LoRA layers to merge. Set model.is_lora=true")
        check_untied(model)
        shared = [*model.parameters(), *model.buffers()]
        self.policy = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
        del self.policy.peft_config
        self._merged: list[tuple[BaseTunerLayer, nn.Parameter]] = []
        for name, layer in model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                parent, _, child = name.rpartition(".")
                plain = self.policy.get_submodule(name).get_base_layer()
                plain.weight = nn.Parameter(torch.zeros_like(plain.weight), requires_grad=False)
                setattr(self.policy.get_submodule(parent), child, plain)
                self._merged.append((layer, plain.weight))

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge the original's present adapters."""
        narrow = [weight.numel() for _, weight in self._merged if weight.dtype == torch.bfloat16]
        noise = _noise(max(narrow, default=0), self._merged[0][1].device)
        for layer, weight in self._merged:
            merged = layer.get_base_layer().weight.to(torch.float32, copy=True).add_(layer.get_delta_weight("default"))
            weight.copy_(_dithered(merged, noise[: merged.numel()]) if weight.dtype == torch.bfloat16 else merged)


def _dithered(numbers: Tensor, noise: Tensor) -> Tensor:
    """Round float32 up or down to bfloat16, in place, with probabilities that make the mean error 0; return the float32 tensor.

    Rounding to nearest would return a bfloat16 weight unchanged if an adapter adds less than half of its spacing to the next number.
    ``noise`` is the result of ``_noise`` for as many elements.
    """
    # The noise is added to the 16 bits that bfloat16 lacks.
    numbers.view(torch.int32).add_(noise.view(numbers.shape)).bitwise_and_(-0x10000)
    return numbers


def _noise(count: int, device: torch.device | str) -> Tensor:
    """Return uniform integers from 0 to 65,535 as int32 ``[count]``: hashes of the positions, the same in every call."""
    hashes = torch.arange(count, dtype=torch.int32, device=device).mul_(-1640531535)
    return hashes.bitwise_xor_(hashes >> 15).mul_(-2048144789).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def adapter_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of adapter tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_same_predictions(model: nn.Module, merged: nn.Module, inputs: dict[str, Tensor], atol: float | None) -> None:
    is_float32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for name, old, new in _predictions(model, merged, inputs):
        gap = (old.float() - new.float()).abs().max().item()
        scale = max(1.0, old.abs().max().item())
        limit = atol if atol is not None else scale * (1e-4 if is_float32 else 0.25)
        if not gap <= limit:
            problem = f"Merging changed the {name} by {gap:.2e}, more than {limit:.0e}"
            raise CheckpointError(f"{problem}. Set model.precision=fp32")


@torch.no_grad()
def _predictions(model: nn.Module, merged: nn.Module, inputs: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return names and both models' values of the continuous predictions; tokens are left out, as near-ties may flip."""
    if not isinstance(model, ActionModel):
        return [("logits", model(**inputs).logits, merged(**inputs).logits)]
    before, after = (policy.predict_action_batch(**inputs, do_sample=False) for policy in (model, merged))
    pairs = [("logits", before.logits, after.logits), ("values", before.values, after.values)]
    if before.sequences.is_floating_point():
        pairs.append(("sequences", before.sequences, after.sequences))
    else:
        # After a flipped token, logits are conditioned on different prefixes and cannot be compared.
        same = (before.sequences == after.sequences)[:, -model.num_sampled :].long()
        reached = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1).cumprod(1).bool()
        pairs[0] = ("logits", before.logits[reached], after.logits[reached])
    return [pair for pair in pairs if pair[1].numel()]


def _reject_second_merge(model: nn.Module, adapters: dict[str, Tensor]) -> None:
    """Raise CheckpointError if the adapter was already merged, in any number format."""
    merged, matches = getattr(model.config, "merged_adapters", []), []
    for dtype in (None, torch.float32, torch.bfloat16):
        fingerprint = adapter_fingerprint({name: tensor.to(dtype=dtype) for name, tensor in adapters.items()})
        matches += [fingerprint] if fingerprint in merged else []
    if matches:
        raise CheckpointError(
            f"The adapter {matches[0][:12]} is already merged into these weights; adding it again would apply it twice. "
            "Set model.lora_path=null, or load the weights from before the merge."
        )


def _check_targets(model: nn.Module, targets: Sequence[str], in_full: str | None) -> None:
    """Raise ConfigError for a target that matches no layer; layers matching ``in_full`` are trained in full instead."""
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    layers = [name for name, weight in weights if getattr(weight, "ndim", 0) > 1]
    layers = [name for name in layers if not (in_full and re.fullmatch(in_full, name))]
    names = {name.rpartition(".")[2] for name in layers}
    wrong = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if wrong:
        suggested = [closest(target, names) if target in wrong else target for target in targets]
        problem = f"{TARGETS} has '{wrong[0]}', which matches no layer of {type(model).__name__}"
        fix = {TARGETS: None if None in suggested else suggested}
        raise ConfigError(f"{problem}.{did_you_mean(wrong[0], names)}", **fix)


def check_untied(model: nn.Module) -> None:
    """Raise ConfigError for an adapted weight that is tied to a second layer, because merging would change both."""
    holders = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and holders[id(getattr(layer.get_base_layer(), "weight", None))] > 1:
            problem = f"The adapted weights '{name.rpartition('.')[2]}.weight' are tied to a different layer."
            raise ConfigError(problem, **{TARGETS: None})


FOLLOWED = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "use_rslora", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern",
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip
"""PEFT settings that training, merging and engines support, and settings that do not affect the weights."""


def _saved_settings(folder: Path, lora: LoraConfig) -> PeftLoraConfig:
    """Return an adapter folder's settings; raise CheckpointError if they are unsupported or conflict with ``lora``."""
    path = folder / "adapter_config.json"
    if not path.is_file() or not (folder / ADAPTER_FILE).is_file():
        needed = f"adapter_config.json and {ADAPTER_FILE}"
        raise CheckpointError(f"model.lora_path='{folder}' is not an adapter folder; expected {needed}.")
    values, neutral = read_json(path), PeftLoraConfig().to_dict() | {"peft_type": "LORA"}
    # Initialisations other than these change the base weights.
    if values.get("init_lora_weights") in ("gaussian", "orthogonal", False):
        del values["init_lora_weights"]
    for name in sorted(values.keys() - FOLLOWED):
        value, needed = values[name], neutral.get(name)
        if value != needed and (value or needed):
            raise CheckpointError(
                f"The adapter in '{folder}' has {name}={value}, which is not supported here; expected {needed}. Merge it with PEFT "
                "(merge_and_unload), then set model.model_path=<the merged folder> model.lora_path=null model.is_lora=false"
            )
    try:
        saved = PeftLoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError) as error:
        raise _unusable(folder, error) from error
    for key, override in (("r", "rank"), ("lora_alpha", "alpha")):
        if not isinstance(getattr(saved, key), int | float):
            raise _unusable(folder, f"{key} is {getattr(saved, key)!r}")
        if getattr(saved, key) != getattr(lora, override):
            raise CheckpointError(
                f"The adapter in '{folder}' has {override}={getattr(saved, key)}, but model.lora.{override} is "
                f"{getattr(lora, override)}. Set model.lora.{override}={getattr(saved, key)}"
            )
    if saved.lora_dropout != lora.dropout:
        logger.warning("%s: model.lora.dropout is used instead of lora_dropout=%s", folder, saved.lora_dropout)
    return saved


def _unusable(folder: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"The adapter in '{folder}' cannot be used: {reason}. Set model.lora_path=<adapter folder>")


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file.parent, f"{file.name}: {error}") from error
    check_loaded(tensors, file)
    return tensors


def _load_adapter(model: nn.Module, folder: Path) -> None:
    tensors = _tensors(folder / ADAPTER_FILE)
    _reject_second_merge(model, tensors)
    wanted = set(adapter_state_dict(model))
    if set(tensors) != wanted:
        missing, unexpected = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
        raise CheckpointError(
            f"The adapter in '{folder}' does not fit the model: missing {missing[:3]} ({len(missing)}), unexpected "
            f"{unexpected[:3]} ({len(unexpected)}). Set model.lora.target_modules=null"
        )
    set_peft_model_state_dict(model, {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()})
    full_file = folder / FULL_FILE
    if full_file.is_file():
        saved, weights = _tensors(full_file), model.state_dict()
        unknown = sorted(set(saved) - set(weights))
        if unknown:
            raise CheckpointError(
                f"'{full_file}' contains {unknown[:3]}, which the model does not have. Set model.value_head=true, or "
                "use the same settings as when the adapter was trained"
            )
        with torch.no_grad():
            for name, tensor in saved.items():
                weights[name].copy_(tensor)


class MergedWeights(ModuleWeights):
    """A ``WeightSource`` that provides a model's weights to vLLM, merging adapters into one weight at a time.

    After the first push, only layers (``layer_prefix``) with trained or adapted weights are sent.

    Args:
        model: Unsharded model, with or without adapters.
        version: Number of weight updates that produced the weights.
        trained: Names of weights that training changes (``trained_names``); None uses ``trained_names(model)``.
        excluded: Top-level modules that the engine does not need.
    """

    def __init__(
        self,
        model: nn.Module,
        version: int,
        buckets: WeightBuckets,
        trained: Collection[str] | None = None,
        excluded: Collection[str] = (),
    ) -> None:
        super().__init__(model, version, buckets)
        changed = {layer_prefix(name) for name in (trained_names(model) if trained is None else trained)}
        self.manifest = {
            name: TensorSpec(tensor.dtype, tuple(tensor.shape), layer_prefix(name) in changed)
            for name, tensor in base_tensors(model)
            if name.split(".")[0] not in excluded
        }

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(self.module, names)


def layer_prefix(name: str) -> str:
    """Return the name of the numbered layer that contains a tensor (``model.layers.3``) or, outside all layers, its module."""
    # vLLM fuses weights within a layer (queries, keys and values) and can only load a fused weight completely.
    parts = name.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])
