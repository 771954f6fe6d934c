"""Check the contents of a lerobot policy folder; code, links out of the folder and wrong types are rejected."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rlinf.errors import CheckpointError
from rlinf.files import Json
from rlinf.models.loading import LARGEST_FILE, read_json

if TYPE_CHECKING:
    from rlinf.models.embodiment.lerobot.config import LerobotConfig

PACK, ENCODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
UNPACK, DECODE = "groot_action_unpack_unnormalize_v2", "groot_n1_7_action_decode_v1"
PIPELINES = {
    "policy_preprocessor.json": ("normalizer_processor", PACK),
    "policy_postprocessor.json": ("unnormalizer_processor", UNPACK, DECODE),
}
"""The steps that normalise, by file; GR00T's steps do so between minimum and maximum."""
STEPS = (
    *(name for names in PIPELINES.values() for name in names), ENCODE, "rename_observations_processor", "to_batch_processor", "device_processor", "tokenizer_processor",
    "action_tokenizer_processor", "smolvla_new_line_processor", "pi0_new_line_processor", "absolute_actions_processor",
    "pi05_prepare_state_tokenizer_processor_step", "pi0_fast_prepare_state_tokenizer_processor_step",
    "relative_actions_processor", "observation_processor", "image_crop_resize_processor", "xvla_image_scale",
    "xvla_image_to_float", "xvla_imagenet_normalize", "xvla_add_domain_id", "xvla_rotation_6d_to_axis_angle",
)  # fmt: skip
"""Registered steps of the supported types. Steps not listed here load models by name, some of them with code."""
NAMES = {
    **dict.fromkeys(("tokenizer_name", "text_tokenizer_name", "paligemma_tokenizer_name"), "tokenizer"),
    **dict.fromkeys(("vlm_model_name", "base_model_path"), "vlm"),
    "model_name": "tokenizer",
    "action_tokenizer_name": None,
}
"""Fields that name a tokenizer or model, and the field in ``LerobotConfig`` that overrides each one."""
CODE = re.compile(r"auto_map|attn_implementation['\"]: ['\"][^'\"]*/")
"""Entries of a configuration for which transformers would load code: a module in the folder, or a kernel of a hub."""
DESCRIPTIONS = ("tokenizer_config.json", "config.json", "processor_config.json")
"""Files of which one shows that a model or tokenizer is in the hub's cache."""
LARGEST_COUNT, LARGEST_SHAPE = 100_000, 10**8
"""Maximum width or number of steps, and maximum number of elements in a shape."""
COUNTS = ("n_obs_steps", "chunk_size", "horizon", "action_chunk_size", "n_action_steps", "dim_model", "max_action_dim")
FEATURES, TEXTS = {"*": {"type": str, "shape": [int]}}, {f"{name}?": str for name in NAMES}
CONFIG = {
    "input_features?": FEATURES, "output_features?": FEATURES, "normalization_mapping?": {"*": str}, "florence_config?": {},
    **TEXTS,
    **{f"{name}?": int for name in COUNTS},
}  # fmt: skip
OPTIONS = {"features?": FEATURES, "norm_map?": {"*": str}, "rename_map?": {"*": str}, "stats?": {"*": {"*": object}}}
OPTIONS |= {"modality_config?": {}, "raw_stats?": {}, "embodiment_mapping?": {}, "video_modality_keys?": [str]}
OPTIONS |= {"valid_action_horizon?": int, "embodiment_tag?": str}
BASE = {"model_type?": str, "model_name?": str, "action_horizon?": int, "max_action_dim?": int}
PIPELINE = {"steps": [{"registry_name?": str, "config?": OPTIONS | TEXTS, "state_file?": str}]}
"""Types of the entries that are read; ``?`` marks entries that may be absent or null, and ``*`` matches any name."""


@dataclass(frozen=True)
class Finding:
    """A fault that makes a policy act blindly or unsafely: the affected feature or file, the problem, and the fix."""

    feature: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.feature} {self.problem}. {self.fix[:1].upper()}{self.fix[1:]}"


def read_typed(path: Path, wanted: Mapping[str, Any]) -> Json:
    """Return the object in a JSON file; raise CheckpointError unless its entries have the types in ``wanted``."""
    values = read_json(path)
    if problem := mismatch(values, wanted):
        raise CheckpointError(f"{path} has {problem}")
    for step in values["steps"] if wanted is PIPELINE else ():
        if "class" in step or step.get("registry_name") not in STEPS:
            problem = f"{path} has the step {step.get('class', step.get('registry_name'))!r:.80}"
            raise CheckpointError(f"{problem}; expected a known registry_name, not a class, which lerobot would call")
    return values


def mismatch(value: Any, wanted: Any, place: str = "") -> str | None:
    """Return where a JSON value's type differs from ``wanted`` or its size is implausible, or None."""
    kind = wanted if isinstance(wanted, type) else type(wanted)
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or not 0 < value <= LARGEST_COUNT)):
        names = {dict: "an object", list: "a list", str: "a string", int: f"an integer from 1 to {LARGEST_COUNT}"}
        return f"{place or 'its content'} = {value!r:.60}; expected {names[kind]}"
    inner = [(name, item, wanted[0]) for name, item in enumerate(value)] if kind is list else []
    for name, expected in wanted.items() if kind is dict and wanted is not kind else ():
        name = name.removesuffix("?")
        inner += [(key, item, expected) for key, item in value.items()] if name == "*" else []
        if name != "*" and (value.get(name) is not None or name in wanted):
            inner.append((name, value.get(name), expected))
    problems = (mismatch(item, expected, f"{place}.{name}".lstrip(".")) for name, item, expected in inner)
    problem = next(filter(None, problems), None)
    if problem is None and wanted == [int] and not (value and math.prod(value) <= LARGEST_SHAPE):
        problem = f"{place} = {value!r:.60}; expected sizes with a product of at most {LARGEST_SHAPE}"
    return problem


def content_findings(folder: Path, config: LerobotConfig | None = None) -> Iterator[Finding]:
    """Yield findings on code, links out of the folder, and wrong types; ``config`` may contain overrides."""
    homes = [os.path.realpath(folder)]
    # In the hub's cache, files are links to blobs outside the folder.
    if Path(homes[0]).parent.name == "snapshots":
        homes.append(str(Path(homes[0]).parents[1] / "blobs"))
    for path in (Path(place, name) for place, *names in os.walk(folder) for name in (*names[0], *names[1])):
        target, name = os.path.realpath(path), str(path.relative_to(folder))
        if not any(target.startswith(home + os.sep) for home in homes):
            yield Finding(name, f"is a link to {target}, outside the folder", "copy the file into the folder")
        elif not os.path.isfile(target) and not os.path.isdir(target):
            yield Finding(name, "is neither a file nor a folder", "remove it")
    for file, wanted in {"config.json": CONFIG, **dict.fromkeys(PIPELINES, PIPELINE)}.items():
        try:
            values = read_typed(folder / file, wanted) if (folder / file).is_file() else {}
            for step in values["steps"] if wanted is PIPELINE and values else ():
                yield from _state_findings(folder, file, step.get("state_file"))
                yield from _tokenizer_findings(folder, file, step.get("config") or {}, config)
            yield from _tokenizer_findings(folder, file, values if wanted is CONFIG else {}, config)
            parts = values.get("florence_config") or {}
            if CODE.search(str([parts.get("vision_config"), parts.get("text_config")])):
                yield Finding("florence_config", f"in {file} names code", "use a different folder")
        except CheckpointError as error:
            yield Finding(file, f"is not accepted: {error}", "use a different folder")


def _state_findings(folder: Path, file: str, name: str | None) -> Iterator[Finding]:
    problem = None
    try:
        if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
            problem = "is outside the folder"
        elif name is not None and (size := (folder / name).stat().st_size) > LARGEST_FILE:
            problem = f"has {size} bytes; expected at most {LARGEST_FILE}"
        elif name is not None:
            safe_open(folder / name, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
    if problem:
        fix = "copy it from the folder written by training"
        yield Finding(file, f"reads the state_file '{name:.200}', which {problem}", fix)


def _tokenizer_findings(
    folder: Path, file: str, values: Mapping[str, Any], config: LerobotConfig | None
) -> Iterator[Finding]:
    """Find tokenizers and models that are not on this machine, and code included with them, which lerobot may run."""
    for key, field in NAMES.items():
        given = getattr(config, field or "", None)
        if not (name := values.get(key) and (given or values[key])):
            continue
        place = local_tokenizer(folder, name)
        if place is None:
            fix = f"set model.override_config.{field}=<its folder>, or put it into {folder}/{name}"
            fix = fix if field else f"run `hf download {name}`, if you trust its code"
            part = key if field == "vlm" else "tokenizer"
            yield Finding(part, f"'{name:.80}' ({key} of {file}) is not on this machine", fix)
        elif not given and (place := _stored_at(place, key)) is not None:
            for path in (*Path(place).glob("*config.json"), *Path(place).glob("*/*config.json")):
                if "auto_map" in str(read_json(path)):
                    yield Finding(file, f"names '{name:.80}' ({key}), which contains code ({path})", "remove auto_map")


def _stored_at(place: str, key: str) -> str | None:
    """Return the folder of a named part, in the hub's cache only if lerobot would run code there without asking."""
    return place if os.path.isdir(place) else cached_folder(place) if key in ("model_name", "base_model_path") else None


def cached_folder(name: str) -> str | None:
    """Return the folder of a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(name, file) for file in DESCRIPTIONS]
    return next((str(Path(file).parent) for file in files if isinstance(file, str)), None)


def groot_base(folder: Path, name: str | None) -> Json:
    """Return the ``config.json`` of a GR00T folder's base, or an empty object if the base is not on this machine."""
    place = local_tokenizer(folder, name) if name else None
    path = Path((place if place is None or os.path.isdir(place) else cached_folder(place)) or "", "config.json")
    return read_typed(path, BASE) if place and path.is_file() else {}


def local_tokenizer(folder: Path, name: str) -> str | None:
    """Return the local path of a tokenizer or model, or None if it is not on this machine."""
    for place in (os.path.join(folder, name), os.path.expanduser(name)):
        if os.path.isdir(place):
            return place
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [try_to_load_from_cache(name, file) for file in DESCRIPTIONS]
        return name if any(isinstance(file, str) for file in files) else None
    except HFValidationError:
        return None
