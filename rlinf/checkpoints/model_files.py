"""The part of a checkpoint that other programs load: weights as safetensors with config and processor files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rlinf.files import write_text
from rlinf.models.base_weights import ADAPTER_FOLDER

MODEL_FOLDER = "model"
STATISTICS_FILE = "dataset_statistics.json"


def save_model_files(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write ``folder/model``, or ``folder/adapter`` for a model with adapters, from full weights; on one rank.

    Args:
        folder: Where the sub-folder goes.
        model: A ``PreTrainedModel``, sharded or not; ``model.processor`` is saved next to it.
        weights: Its whole state dict.
    """
    write_policy(folder / (ADAPTER_FOLDER if is_adapter(model) else MODEL_FOLDER), model, weights)


def write_policy(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write weights (or adapters), config, processor and action statistics into ``folder`` itself.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    try:
        if is_adapter(model):
            from rlinf.models.lora import save_adapter

            save_adapter(model, folder, weights)
        else:
            model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if not is_adapter(model):
        processor = getattr(model, "processor", None)
        if processor is not None:
            processor.save_pretrained(folder)
    statistics = getattr(model.config, "norm_stats", None)
    if statistics:
        write_text(folder / STATISTICS_FILE, json.dumps(statistics, indent=1))


def is_adapter(model: Any) -> bool:
    """True for a model with LoRA layers, of which the adapters are saved and not the base weights."""
    return hasattr(model, "peft_config")
