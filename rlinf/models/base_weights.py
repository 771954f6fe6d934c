"""Digests of base weights, used to check that adapters and actors run on the weights they were trained on."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.files import sha256_of
from rlinf.manifest import BASE_FIELD, Manifest, Mismatch, reject_mismatches
from rlinf.models.config import ModelConfig
from rlinf.run_folder import ADAPTER_FOLDER, MANIFEST_FILE

if TYPE_CHECKING:
    from torch import Tensor, nn


logger = logging.getLogger("rlinf")


def check_base(model: ModelConfig, allow_mismatch: Sequence[str] = ()) -> None:
    """Reject the adapters at ``model.lora_path`` if their manifest records different base weights."""
    if model.lora_path is None or any(name in (BASE_FIELD, "lora") for name in allow_mismatch):
        return
    folder = Path(model.lora_path).expanduser()
    # A checkpoint stores the manifest one level above the adapter folder; an export stores it inside.
    in_checkpoint = folder.name == ADAPTER_FOLDER and not (folder / MANIFEST_FILE).is_file()
    manifest = (folder.parent if in_checkpoint else folder) / MANIFEST_FILE
    saved = Manifest.load(manifest.parent).lora.get("base_sha256") if manifest.is_file() else None
    if saved is None:
        logger.warning(
            "The adapters in %s do not record their base weights, so they cannot be checked against model.model_path=%s",
            folder, model.model_path,
        )  # fmt: skip
        return
    present = weights_digest(model.model_path)
    if saved != present:
        text = f"The adapters in {folder} were trained on weights that differ from model.model_path={model.model_path or 'null'}"
        reject_mismatches([Mismatch(BASE_FIELD, saved, present, must_match=True)], allow_mismatch, text)


def weights_digest(model_path: str | None) -> str | None:
    """Return the SHA-256 of the names and contents of a model's weight files (cached files for a hub id), or None without a path."""
    if model_path is None:
        return None
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_path, local_files_only=True))
    # Files are only hashed again if their size or modification time changes.
    paths = sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    digests = {path.name: _file_digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bits of tensors on any device."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: Path, size: int, time_ns: int) -> str:
    return sha256_of(path)


def base_tensors(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict's tensors except adapters, under the names they would have in a model without adapters."""
    for name, tensor in (model.state_dict() if state is None else state).items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def trained_names(model: nn.Module) -> set[str]:
    """Return the names from ``merged_tensors`` whose values change in training: trained or adapted weights, and buffers."""
    changing = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    changing |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    adapted = {name.partition(".lora_")[0] + ".weight" for name in changing if ".lora_" in name}
    return adapted | {name.replace(".base_layer.", ".") for name in changing if ".lora_" not in name}
