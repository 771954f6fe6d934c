"""The files of a checkpoint for ``from_pretrained``: safetensors weights, config and processor files."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rlinf.checkpoints.folders import has_policy, policy_folder
from rlinf.errors import CheckpointError
from rlinf.files import write_text
from rlinf.manifest import Manifest
from rlinf.run_folder import ADAPTER_FOLDER, MODEL_FOLDER, STATISTICS_FILE


def save_model_files(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write the full state dict ``weights`` to ``folder/model``, or to ``folder/adapter`` if the model has adapters."""
    write_policy(folder / (ADAPTER_FOLDER if is_adapter(model) else MODEL_FOLDER), model, weights)


def write_policy(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write weights (or adapters), config, processor and action statistics to ``folder`` on one rank. May raise OSError."""
    try:
        if is_adapter(model):
            from rlinf.models.lora import save_adapter  # imports peft and transformers

            save_adapter(model, folder, weights)
        else:
            if any(hasattr(module, "generation_config") for module in model.modules()):
                from rlinf.models.layers import accept_saving  # imports transformers

                accept_saving(model)
            model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if leaves_base(model):
        return
    processor = getattr(model, "processor", None)
    if processor is not None and not is_adapter(model):
        processor.save_pretrained(folder)
    statistics = getattr(model.config, "norm_stats", None)
    if statistics:
        write_text(folder / STATISTICS_FILE, json.dumps(statistics, indent=1))


def leaves_base(model: Any) -> bool:
    """Return whether a model's checkpoints contain only an actor, because the frozen base policy is in the run folder."""
    return getattr(model, "base_store", None) is not None


def may_leave_base(model: Any) -> bool:
    """Return whether a model's checkpoints may omit its frozen weights."""
    return is_adapter(model) or hasattr(model, "base_store")


def is_adapter(model: Any) -> bool:
    """Return whether a model has LoRA layers. If so, its adapters are saved instead of its full weights."""
    return hasattr(model, "peft_config")


def check_adapters(checkpoint: Path, manifest: Manifest, merge_lora: bool) -> None:
    """Raise CheckpointError if an export cannot merge adapters as asked, or if manifest and config.json disagree about them."""
    state = manifest.lora.get("state")
    if merge_lora and state != "adapter":
        reason = "are already merged, and would be added twice" if state == "merged" else "do not exist"
        raise CheckpointError(f"merge_lora=true, but the adapters of {checkpoint} {reason}. Set merge_lora=false")
    if not has_policy(checkpoint):
        return
    source = policy_folder(checkpoint)
    if state == "merged" and (source / "config.json").is_file():
        merged = json.loads((source / "config.json").read_text(encoding="utf-8")).get("merged_adapters")
        if not merged:
            raise CheckpointError(
                f"The manifest of {checkpoint} records merged adapters, but its config.json has none."
            )
