"""Export of a token policy's checkpoint to a folder that transformers, vLLM and other programs can load.

::

    safetensors/final/
      00000.safetensors, 00001.safetensors, ...   weights, in chunks
      model.safetensors.index.json                maps tensor names to chunks
      config.json, tokenizer.json, ...            copied from the initial model
      manifest.json                               conditions of the run, and the SHA-256 of every file above

One rank reads the weights from the checkpoint's shards layer by layer, so the full model is never in memory.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rlinf.checkpoints.checkpoint import check_adapters, verify_checkpoint
from rlinf.checkpoints.folders import flat, read_saved_config, read_state
from rlinf.checkpoints.trainer_state import MODEL, read_entries, read_tensors
from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import Json, naming, replace_folder, write_text
from rlinf.llm.hf_model import HFModel, folder_of, model_shapes, weight_files
from rlinf.manifest import Manifest, git_revision, hash_files, library_versions
from rlinf.models.base_weights import base_tensors, weights_digest
from rlinf.models.config import LoraConfig
from rlinf.models.loading import read_json
from rlinf.models.lora import adapter_state_dict, apply_lora, check_untied, layer_prefix
from rlinf.models.precision import torch_dtype_of
from rlinf.number_formats import GIB
from rlinf.run_folder import ADAPTER_FILE, CONFIG_FILE, MANIFEST_FILE, STATISTICS_FILE, TRAINER_FOLDER

logger = logging.getLogger("rlinf")

CHUNK_BYTES = 4 * GIB
INDEX_FILE = "model.safetensors.index.json"
COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
"""Suffixes of files copied from the source: configurations, tokenizer, processor, templates, and code."""
TEMPLATES_FOLDER = "additional_chat_templates"
LEFT_OUT = {"adapter_config.json", "trainer_state.json", MANIFEST_FILE, STATISTICS_FILE}
"""Source files that are not copied because they describe only the original weights."""

TOKEN_KEYS = ("policy.model_name_or_path", "train.param_dtype")
"""Keys of a recipe's configuration that are used for exports and may be overridden."""


class HFFolder:
    """Exports a token policy's checkpoint to a Hugging Face folder (an ``export`` of ``RecipeCheckpoints``).

    Construct it in the training thread, because building even an empty model temporarily changes global settings. Calling it does not.
    Raises ConfigError if adapters cannot be merged into the weight files of ``source``.

    Args:
        source: Folder or Hub ID of the initial model.
        lora: Settings of the trained adapters, or None if all weights are trained.
        merge_lora: Merge adapters into the weights of ``source``, preserving tensor names. If False, write a PEFT adapter folder.
        chunk_bytes: Maximum size of a weights file in bytes. A larger single tensor is written to its own file.
    """

    def __init__(
        self,
        source: str,
        dtype: torch.dtype,
        *,
        lora: LoraConfig | None = None,
        merge_lora: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.source, self.dtype, self.chunk_bytes = source, dtype, chunk_bytes
        self.has_adapters, self.merge_lora = lora is not None, merge_lora
        shapes = model_shapes(source, dtype=dtype)
        self.model: Any = shapes.model
        if lora is not None:
            self.model.peft_config = apply_lora(shapes, lora).peft_config
            for name, module in self.model.named_modules():
                if ".lora_" in name and any(True for _ in module.parameters(recurse=False)):
                    module.to_empty(device="cpu")
            if merge_lora:
                check_untied(shapes)
                self._adapted = _adapted_layers(self.model, source)

    def __call__(self, checkpoint: Path, output: Path) -> None:
        """Write or replace ``output`` atomically.

        Raise CheckpointError if the checkpoint cannot be read or belongs to a different ``source``; OSError if a file cannot be written.
        """
        logger.info("Prepare to exporting safetensors to %s at rank 0", output)
        partial = output.with_name(f".{output.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with naming(partial):
                self._write(checkpoint, partial)
            replace_folder(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        logger.info("\n\nExported safetensors to %s", output)

    def _write(self, checkpoint: Path, output: Path) -> None:
        manifest = Manifest.load(checkpoint)
        self._check(checkpoint, manifest)
        trained = _Trained(checkpoint / TRAINER_FOLDER)
        if self.has_adapters and not self.merge_lora:
            _write_adapter(output, self.model, trained, self.source)
        else:
            tensors = self._merged(trained) if self.has_adapters else _public(self.model, trained)
            floats = ((name, t.to(self.dtype) if t.is_floating_point() else t) for name, t in tensors)
            write_chunks(output, floats, self.chunk_bytes)
            _copy_source_files(self.source, output)
            ends = read_state(checkpoint)["loop_state"]["trainer"]["data"].get("end_tokens")
            path = output / "generation_config.json"
            values = read_json(path) if path.is_file() else self.model.generation_config.to_diff_dict()
            if ends is not None and values.get("eos_token_id") != ends:
                write_text(path, json.dumps(values | {"eos_token_id": ends}, indent=2))
            _adapt_config(output / "config.json", self.dtype, type(self.model).__name__, packed=self.has_adapters)
            manifest = replace(manifest, lora={"state": "merged" if self.has_adapters else "none"})
        shutil.copyfile(checkpoint / CONFIG_FILE, output / CONFIG_FILE)
        replace(manifest, files=hash_files(output)).save(output)

    def _check(self, checkpoint: Path, manifest: Manifest) -> None:
        if (manifest.lora.get("state") == "adapter") != self.has_adapters:
            holds, wanted = ("no adapters", "with") if self.has_adapters else ("adapters", "without")
            raise CheckpointError(
                f"{checkpoint} contains {holds}, but the export is configured {wanted} adapters. Use a different checkpoint"
            )
        saved = manifest.lora.get("base_sha256")
        present = weights_digest(self.source) if self.has_adapters else None
        if saved != present:
            raise CheckpointError(
                f"The adapters in {checkpoint} were trained on base weights with digest {saved}, not {self.source} ({present}). "
                "Specify the model on which they were trained"
            )

    def _merged(self, trained: _Trained) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the source's files with the adapters merged in."""
        adapters = {name: p.data for name, p in self.model.named_parameters() if ".lora_" in name}
        trained.read_into(adapters)
        for path in _weight_files(self.source):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = file.get_tensor(name)
                    if name in self._adapted:
                        with torch.no_grad():
                            delta = self._adapted[name].get_delta_weight("default")
                        tensor = tensor.to(self.dtype) + delta.to(self.dtype)
                    yield name, tensor


def export(checkpoint: Path, output: Path, merge_lora: bool, overrides: Sequence[str]) -> Path:
    """Export the policy of a token run; tokenizer and config files come from the model that training started with."""
    values = flat(read_saved_config(checkpoint))
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in TOKEN_KEYS:
            actual = f"'{override}' does not affect the export of {checkpoint}, a checkpoint of a recipe"
            raise ConfigError(f"{actual}; available keys: {', '.join(TOKEN_KEYS)}.")
        values[key] = value
    verify_checkpoint(checkpoint)
    manifest = Manifest.load(checkpoint)
    check_adapters(checkpoint, manifest, merge_lora)
    lora = {key: value for key, value in manifest.lora.items() if key not in ("state", "base_sha256")}
    source, dtype = (values.get(key) for key in TOKEN_KEYS)
    adapter = LoraConfig(**lora) if manifest.lora["state"] == "adapter" else None
    write = HFFolder(source, torch_dtype_of(dtype), lora=adapter, merge_lora=merge_lora)
    try:
        write(checkpoint, output)
    except OSError as error:
        raise CheckpointError(f"Cannot write {output}: {error}. Check space and permissions, or set output") from error
    return output


def token_manifest(
    model: Any, source: str, *, precision: str, seed: int, policy_version: int, lora: LoraConfig | None = None
) -> Manifest:
    """Return a token policy's manifest, which has no sections for envs and actions.

    ``source`` is the folder or Hub ID of the initial model. For adapters, its digest is recorded with their settings.
    """
    adapters: Json = {"state": "none"}
    if lora is not None:
        adapters = {"state": "adapter", **asdict(lora), "base_sha256": weights_digest(source)}
    return Manifest(
        versions=library_versions(),
        model={"model_type": model.config.model_type, "class": type(model).__name__.removeprefix("FSDP")},
        normalization={}, preprocessing={}, actions={}, env={}, renderer=None,
        lora=adapters, precision=precision, policy_version=policy_version, seed=seed, git_revision=git_revision(),
    )  # fmt: skip


class _Trained:
    """The trained tensors in a checkpoint, accessed by their names in the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        entries = read_entries(folder)
        self.entries = {name.removeprefix(MODEL): entry for name, entry in entries.items() if name.startswith(MODEL)}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors in their saved dtypes."""
        entries = {name: self.entries[name] for name in names}
        targets = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        return self.read_into(targets)

    def read_into(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fill ``targets`` in place and return them."""
        if not targets.keys() <= self.entries.keys():
            missing = sorted(targets.keys() - self.entries.keys())
            problem = f"{len(missing)} tensors are missing ({', '.join(missing[:3])})"
            raise CheckpointError(f"{self.folder} belongs to a different model: {problem}")
        read_tensors(self.folder, {f"{MODEL}{name}": tensor for name, tensor in targets.items()}, no_dist=True)
        return targets


def _public(model: Any, trained: _Trained) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors with the names and shapes of public checkpoints; tied tensors are yielded once."""
    names = model.state_dict().keys()
    if names != trained.entries.keys():
        other = sorted(names ^ trained.entries.keys())
        problem = f"{trained.folder} does not match {type(model).__name__}"
        raise CheckpointError(f"{problem}: {len(other)} tensors exist in only one of them ({', '.join(other[:3])})")
    for _, unit in itertools.groupby(names, layer_prefix):
        weights = {f"model.{name}": tensor for name, tensor in trained.read(unit).items()}
        yield from HFModel(model).public_state_dict(weights).items()


def _adapted_layers(model: Any, source: str) -> Json:
    """Map the name of each adapted weight in the files of ``source`` to its adapted layer."""
    layers = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    model_tensors = dict(base_tensors(model))
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    adapted = {}
    for path in _weight_files(source):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, model_tensors)
                if renamed in layers:
                    adapted[name] = layers.pop(renamed)
    if layers:
        raise ConfigError(
            f"{len(layers)} adapted weights ({', '.join(sorted(layers)[:3])}) have no tensor of their own in the files of {source}, so "
            "adapters cannot be merged into them. Export them as adapters (merge_lora=false)"
        )
    return adapted


def _write_adapter(output: Path, model: Any, trained: _Trained, source: str) -> None:
    """Write an adapter folder for ``PeftModel.from_pretrained(AutoModel*.from_pretrained(source), ...)``."""
    tensors = adapter_state_dict(model, trained.read(trained.entries))
    save_file(tensors, output / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config["default"])
    config.inference_mode, config.base_model_name_or_path = True, source
    config.save_pretrained(str(output))


def write_chunks(folder: Path, tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write ``00000.safetensors``, ``00001.safetensors``, ... and their index, holding at most one chunk in memory."""
    index: dict[str, str] = {}
    total = held = 0
    chunk: dict[str, Tensor] = {}

    def flush() -> None:
        number = len(set(index.values()))
        file = f"{number:05d}.safetensors"
        save_file(chunk, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(chunk, file))
        chunk.clear()
        logger.info("Saved chunk %d to %s", number, file)

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and held + size > chunk_bytes:
            flush()
            held = 0
        # Make a contiguous copy: safetensors accepts neither strided tensors nor two tensors in the same memory.
        chunk[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        held, total = held + size, total + size
    if chunk:
        flush()
    write_text(folder / INDEX_FILE, json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))


def _weight_files(source: str) -> list[Path]:
    """Return the safetensors files that transformers loads for a model, sorted by name."""
    if files := weight_files(folder_of(source, ["model*.safetensors", INDEX_FILE])):
        return files
    raise ConfigError(
        f"{source} has neither model.safetensors nor {INDEX_FILE}, so adapters cannot be merged into its weights. Export them as adapters "
        "(merge_lora=false)"
    )


def _copy_source_files(source: str, folder: Path) -> None:
    """Copy a model's configurations, tokenizer, processor, templates and code."""
    origin = folder_of(source, [f"*{ending}" for ending in sorted(COPIED)])
    for path in sorted(origin.iterdir()):
        wanted = path.suffix in COPIED and not path.name.endswith(".index.json") and path.name not in LEFT_OUT
        if path.is_file() and wanted and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    if (origin / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(origin / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER)


def _adapt_config(path: Path, dtype: torch.dtype, architecture: str, packed: bool) -> None:
    """Set the model class and the dtype of the exported weights in ``config.json``.

    ``packed`` means that quantised weights were copied from the source unchanged.
    """
    config, name = json.loads(path.read_text(encoding="utf-8")), str(dtype).removeprefix("torch.")
    if not packed:
        config.pop("quantization_config", None)
    config["architectures"] = config.get("architectures") or [architecture]
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = name
    _set_dtype(config, name)
    write_text(path, json.dumps(config, indent=2))


def _set_dtype(config: Json, name: str) -> None:
    """Set the dtype in a configuration, including nested configurations."""
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            config[key] = name
        elif isinstance(value, dict):
            _set_dtype(value, name)
