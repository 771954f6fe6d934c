"""Reading checkpoint folders: what every model class needs to do so, and to refuse one that does not fit."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.errors import CheckpointError, MissingDependencyError
from rlinf.models import MODELS


def typed(override: str) -> str:
    """Return the sentence that ends an error about a field of a model's own configuration."""
    return f"Set model.override_config.{override}, or model.init_config.{override} for random weights"


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint folder; refuse a file that holds none."""
    found = ""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        found = f"it holds a {type(values).__name__}"
    except ValueError as error:  # of the JSON, or of its encoding
        found = str(error)
    raise CheckpointError(f"'{path}' is not a JSON object ({found}). Set model.model_path=<another folder>")


def checkpoint_folder(path: str | Path) -> Path:
    """Return a checkpoint's folder; a hub id (``owner/name``) is downloaded."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    reason = "there is no such folder"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(str(path)))
        except (OSError, ValueError) as error:
            reason = f"there is no such folder, and as a hub id it cannot be downloaded: {error}"
    raise CheckpointError(f"model.model_path is '{path}': {reason}. Set model.model_path=<checkpoint folder>")


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers' table of weights that do not fit off the terminal, of which ``check_fit`` tells in one sentence."""
    theirs = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return " LOAD REPORT" not in record.getMessage()

    theirs.addFilter(is_other)
    try:
        yield
    finally:
        theirs.removeFilter(is_other)


def check_fit(folder: str | Path, loading_info: Mapping[str, Any], **cure: Any) -> None:
    """Refuse weights that are not exactly those of the model, by what transformers reports: ``missing_keys`` and so on.

    ``cure``: settings that mend it, besides another folder.
    """
    missing, unexpected = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    mismatched = [str(key) for key in loading_info["mismatched_keys"]]
    if missing or unexpected or mismatched:
        raise CheckpointError(
            f"The weights in '{folder}' do not fit its config.json: missing {missing[:5]} ({len(missing)}), "
            f"unexpected {unexpected[:5]} ({len(unexpected)}), of another shape {mismatched[:5]} "
            f"({len(mismatched)}).",
            path="<another folder>",
            **cure,
        )


def check_model_type(config_class: Any, values: Mapping[str, Any], path: str | Path) -> None:
    """Refuse the ``config.json`` (``values``) of another model than the one asked for.

    ``config_class.accepted_model_types`` are the types (``model_type``, or ``type``) that it reads; None among
    them stands for a file that names none. Without the attribute nothing is checked.
    """
    accepted = getattr(config_class, "accepted_model_types", None)
    found = values.get("model_type", values.get("type"))
    if accepted is None or found in accepted:
        return
    override = f"model.model_type={found}" if found in MODELS else "model.model_path=<another folder>"
    raise CheckpointError(
        f"The config.json in '{path}' is of model type '{found}', but the model that was asked for reads "
        f"{' and '.join(repr(name) for name in accepted if name is not None)}. Set {override}"
    )


def check_attention(implementation: str) -> None:
    """Raise MissingDependencyError if FlashAttention is asked for and not installed."""
    if implementation == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                "attn_implementation='flash_attention_2', but the package flash-attn (or a GPU) is missing. Install it with "
                "pip install flash-attn, or do without.",
                attn_implementation="sdpa",
            )
