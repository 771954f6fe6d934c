"""Detection of text datasets and language models given to commands that train policies in simulators."""

from pathlib import Path

from rlinf.checkpoints.folders import is_checkpoint, is_export, is_run
from rlinf.models import MODELS
from rlinf.models.fallback import folder_config

SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".arrow")
"""Suffixes of text datasets; robot datasets are folders."""

PAGE = "To train a model on text, use `rlinf launch --config <recipe>`: docs/recipes.md"


def text_in(path: str | Path) -> str | None:
    """Describe the text at a path (a file, a folder of files, a language model), or return None for anything else."""
    path = Path(path).expanduser()
    if path.is_file():
        return "a text file" if path.suffix in SUFFIXES else None
    # Runs and checkpoints also contain .jsonl files (metrics), but are not text datasets.
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

    model_type = folder_config(str(path)).get("model_type")
    is_text = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODELS
    reads_images = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return model_type if is_text and not reads_images else None
