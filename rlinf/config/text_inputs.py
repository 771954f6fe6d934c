"""Text and language models given to commands that train policies of simulators."""

from __future__ import annotations

from pathlib import Path

from rlinf.checkpoints.folders import is_checkpoint, is_export, is_run
from rlinf.models import MODELS
from rlinf.models.fallback import folder_config

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".arrow")
"""Of files that hold rows of text. The datasets of robots are folders."""

PAGE = "To train a model on text, use `rlinf launch --config <recipe>`: docs/recipes.md"


def text_in(path: str | Path) -> str | None:
    """Say what text a path holds: a file of rows, a folder of such files, a language model; None: none of these.

    Runs, checkpoints, exports and other models are not text, though rows may lie next to them (``metrics.jsonl``).
    """
    path = Path(path).expanduser()
    if path.is_file():
        return "a file of text" if path.suffix in SUFFIXES else None
    if not path.is_dir() or is_run(path) or is_checkpoint(path) or is_export(path):
        return None
    model_type = language_model_in(path)
    if model_type is not None:
        return f"a language model ({model_type})"
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return None
    files = [child for child in path.iterdir() if child.is_file() and not child.name.startswith(".")]
    return "a folder of text" if any(file.suffix == ".jsonl" for file in files) else None


def language_model_in(path: str | Path) -> str | None:
    """Return the ``model_type`` of a folder with a causal language model that reads no images; None for other folders."""
    from transformers.models.auto import modeling_auto

    found = folder_config(str(path)).get("model_type")
    is_text = found in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and found not in MODELS
    return found if is_text and found not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else None
