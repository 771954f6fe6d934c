"""Check a lerobot policy folder: without its statistics a policy acts blindly, which lerobot does not report."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlinf.errors import CheckpointError, ConfigError
from rlinf.files import Json, sha256_of
from rlinf.models.embodiment.lerobot.config import ACTION, STATE, SUPPORTED, LerobotConfig, short_name
from rlinf.models.embodiment.lerobot.contents import DECODE, ENCODE, PIPELINES, Finding, content_findings
from rlinf.models.embodiment.lerobot.groot import decode_statistics, groot_findings, other_format
from rlinf.models.loading import instead_of_weights, read_json

WEIGHTS = "model.safetensors"
NEEDED = {
    "MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"),
}  # fmt: skip
"""The statistics that each normalisation mode needs."""
MIGRATE = "rlinf check-policy {0} migrate={0}_migrated"
OLD_PARTS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""Name prefixes of statistics stored among the weights by old versions of lerobot."""
DIFFERENT = "use the folder written by training, or train again"
EMBODIMENT_STEPS = {
    "xvla": {
        "xvla_imagenet_normalize": "images are not normalised", "xvla_add_domain_id": "the soft prompt of domain 0 is used",
    },
    "groot": {ENCODE: "the policy receives no images"},
}  # fmt: skip
"""Steps whose absence lerobot does not report, and its effect, for types with several embodiments."""
LARGEST_IMAGE = 2.0
"""Maximum plausible statistic for images in 0..1."""


def check_folder(folder: str | Path, config: LerobotConfig | None = None) -> list[Finding]:
    """Return a folder's faults that can be found without loading weights, the most severe first."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"The folder {folder} does not exist. Set model.model_path=<folder of a policy>")
    try:
        values = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        unknown = _type_finding(values)
        if unknown is not None:
            return [unknown]
        if harmful := [*content_findings(folder, config)]:
            return harmful
        config = LerobotConfig.from_pretrained(folder) if config is None else config
    except (ConfigError, CheckpointError) as error:
        return [Finding("config.json", f"cannot be used: {error}", DIFFERENT)]
    faults = [*_ensembling(values), *_feature_findings(config), *_embodiment_findings(folder, values, config)]
    return faults or [*_weight_files(folder), *_pipeline_findings(folder, config)]


def reject_folder(folder: str | Path, config: LerobotConfig | None = None) -> None:
    """Raise CheckpointError with the first finding of ``check_folder``."""
    findings = check_folder(folder, config)
    if findings:
        more = f" ({len(findings) - 1} more: rlinf check-policy {folder})" if len(findings) > 1 else ""
        raise CheckpointError(f"The policy in {folder} would act blindly: {findings[0]}{more}")


def compare_weights(folder: str | Path, state: Mapping[str, Tensor]) -> list[Finding]:
    """Return findings unless a policy's weights exactly equal those in its folder's weight file.

    Names may lack the file's prefix ``model.``. Tensors tied to one in the file may be absent from it.
    """
    # lerobot loads with strict=False, or catches the error of a strict load and continues with random weights.
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        stored = {name.removeprefix("model."): name for name in file.keys()}
        named = {name: stored.get(name.removeprefix("model.")) for name in state}
        shared = {tensor.data_ptr() for name, tensor in state.items() if named[name] is not None and tensor.numel()}
        missing = [
            name for name, stored_as in named.items() if stored_as is None and state[name].data_ptr() not in shared
        ]
        unexpected = sorted(set(stored.values()) - set(named.values()))
        present = {name: stored_as for name, stored_as in named.items() if stored_as is not None}
        different = [name for name, stored_as in present.items() if not _equal(state[name], file.get_tensor(stored_as))]
    problems = {"lacks weights of the policy:": missing, "contains weights that the policy lacks:": unexpected}
    for problem, names in {**problems, "was not loaded into": different}.items():
        if names:
            return [Finding(WEIGHTS, f"{problem} {', '.join(names[:3])} ({len(names)})", DIFFERENT)]
    return []


def action_statistics(
    folder: str | Path, file: str = "policy_postprocessor.json", feature: str = ACTION
) -> dict[str, list[float]]:
    """Return the folder's normalisation statistics for actions, or for ``feature``, by name."""
    state = _statistics(Path(folder), _step(Path(folder), file))
    prefix = f"{feature}."
    statistics = {name.removeprefix(prefix): values for name, values in state.items() if name.startswith(prefix)}
    return {name: values.flatten().tolist() for name, values in statistics.items()}


def folder_digest(folder: str | Path) -> str:
    """Return the SHA-256 of the weights and statistics; further files do not affect it."""
    files = [Path(folder) / WEIGHTS, *sorted(Path(folder).glob("policy_*processor*.safetensors"))]
    return hashlib.sha256(" ".join(sha256_of(file) for file in files).encode()).hexdigest()


def _type_finding(values: Mapping[str, Any]) -> Finding | None:
    kind = values.get("type")
    if (other := other_format(values)) is not None:
        return other
    if not values:
        return Finding("config.json", "is missing", "set model.model_path=<a folder that lerobot has saved>")
    if kind is None:
        return Finding("config.json", "names no type, so the folder is not lerobot's", "use a different model=<name>")
    if kind not in SUPPORTED:
        problem = f"has the type '{kind}', which is unsupported or from a newer lerobot"
        return Finding("config.json", problem, f"use a policy of type {', '.join(SUPPORTED)}")
    return None


def _ensembling(values: Mapping[str, Any]) -> Iterator[Finding]:
    if values.get("temporal_ensemble_coeff") is not None:
        problem = f"is {values['temporal_ensemble_coeff']}, but averaging over calls is not supported"
        yield Finding("temporal_ensemble_coeff", problem, "set it to null in config.json, and n_action_steps above 1")


def _feature_findings(config: LerobotConfig) -> Iterator[Finding]:
    for name, shape in config.images.items():
        if len(shape) != 3 or shape[0] != 3:
            fix = f"write the shape as [3, {', '.join(map(str, list(shape)[:2]))}] and train with such images"
            yield Finding(name, f"has the shape {list(shape)}; expected [3, H, W], channels first", fix)
    if not config.images and not config.states:
        yield Finding("input_features", "in config.json is empty, so the policy has no observations", DIFFERENT)
    if not config.action_dim:
        yield Finding("output_features", "in config.json contains no action", DIFFERENT)


def _embodiment_findings(folder: Path, values: Mapping[str, Any], config: LerobotConfig) -> Iterator[Finding]:
    """Check what the multi-embodiment types replace silently: a missing step, an unknown embodiment, inputs that are not read."""
    steps = {step.get("registry_name"): step["config"] for step in _steps(folder, "policy_preprocessor.json")}
    needed = EMBODIMENT_STEPS.get(config.policy_type, {})
    for name, effect in needed.items() if steps else ():
        if name not in steps:
            yield Finding(name, f"is missing from policy_preprocessor.json, so {effect}", DIFFERENT)
    for name, width in config.states.items() if needed else ():
        if name != STATE:
            yield Finding(name, f"is not read by {config.policy_type}", f"train with its values in {STATE}")
        elif width > values.get("max_state_dim", width):
            yield Finding(
                name, f"has {width} dimensions, but only max_state_dim={values['max_state_dim']} are read", DIFFERENT
            )
    if config.policy_type == "groot" and steps:
        yield from groot_findings(folder, values, config.vlm, [short_name(name) for name in config.images])
    domain, count = steps.get("xvla_add_domain_id", {}).get("domain_id", 0), values.get("num_domains", 1)
    if not (isinstance(domain, int) and 0 <= domain < count):
        problem = f"is {domain} in policy_preprocessor.json; expected 0 to {count - 1}, a domain with a soft prompt"
        yield Finding("domain_id", problem, "write the domain that the policy was trained for")


def _weight_files(folder: Path) -> Iterator[Finding]:
    path = folder / WEIGHTS
    if not path.is_file():
        adapters = (folder / "adapter_config.json").is_file()
        fix = "save the adapters merged into their base by PEFT" if adapters else instead_of_weights(folder)
        yield Finding(WEIGHTS, "is missing" + (", but the folder contains adapters" if adapters else ""), fix)
        return
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        yield Finding(WEIGHTS, f"cannot be read ({error})", "copy it again")
        return
    buffers = [name for name in names if name.startswith(OLD_PARTS)]
    if buffers:
        problem = f"contains the normalisation ({buffers[0]}), as written by an old lerobot and ignored by current ones"
        yield Finding(WEIGHTS, problem, f"migrate the folder: {MIGRATE.format(folder)}")


def _pipeline_findings(folder: Path, config: LerobotConfig) -> Iterator[Finding]:
    modes = config.normalization_mapping or {}
    features = {**(config.input_features or {}), **(config.output_features or {})}
    seen = {name: feature for name, feature in features.items() if "empty_camera" not in name}
    wanted = {name: modes.get(feature["type"], "IDENTITY") for name, feature in seen.items()}
    states = {}
    for file in PIPELINES:
        if not (folder / file).is_file():
            fix = f"copy it from the folder written by training, or for a folder from an old lerobot: {MIGRATE.format(folder)}"
            yield Finding(file, "is missing, so nothing is normalised", fix)
            continue
        try:
            step = _step(folder, file)
            states[file] = _statistics(folder, step)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
            yield Finding(file, problem, "copy it again, together with its .safetensors")
            continue
        relevant = {name: mode for name, mode in wanted.items() if name == ACTION or file == "policy_preprocessor.json"}
        for name, mode in relevant.items():
            yield from _normalizer_findings(file, step, states[file], name, mode, features[name])
    yield from _renamed(folder, config)
    if len(states) == 2:
        yield from _units(*states.values())


def _normalizer_findings(
    file: str,
    step: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    name: str,
    mode: str,
    feature: Mapping[str, Any],
) -> Iterator[Finding]:
    """Check a feature's statistics in one pipeline."""
    if mode == "IDENTITY":
        return
    retrain = "save both processors with the data set's statistics (`dataset_stats`), or copy them from training"
    if step is None:
        yield Finding(name, f"was trained with {mode}, but {file} has no normaliser", retrain)
        return
    settings = step["config"]
    if step["registry_name"] not in ("normalizer_processor", "unnormalizer_processor"):
        settings = {"features": {name: feature}, "norm_map": {feature["type"]: mode}}
        ignored = [
            key
            for key, x in {"normalize_min_max": False, "use_relative_action": True}.items()
            if step["config"].get(key) is x
        ]
        if ignored:
            yield Finding(
                name, f"has {ignored[0]}={step['config'][ignored[0]]} in {file}, which is not supported", retrain
            )
            return
    listed = settings.get("features", {}).get(name)
    if listed is None:
        yield Finding(name, f"is not among the features of the normaliser in {file}, so it is not normalised", retrain)
        return
    actual = settings.get("norm_map", {}).get(listed["type"], "IDENTITY")
    if actual != mode or mode not in NEEDED:
        known = "" if mode in NEEDED else f"; expected {', '.join(NEEDED)} or IDENTITY"
        yield Finding(name, f"has {mode} in config.json, but {actual} in {file}{known}", retrain)
        return
    keys = [f"{name}.{part}" for part in NEEDED[mode]]
    if any(key not in state for key in keys):
        keys_present = sorted({key.rpartition(".")[0] for key in state})
        has = f"has statistics of different keys: {', '.join(keys_present[:4])}" if keys_present else "is empty"
        yield Finding(name, f"has no statistics {' and '.join(NEEDED[mode])}: the normaliser in {file} {has}", retrain)
        return
    first, second = (state[key].float() for key in keys)
    width = feature["shape"][0]
    if any(values.numel() not in (1, width) for values in (first, second)):
        yield Finding(name, f"has {width} dimensions, but its statistics in {file} have {first.numel()}", retrain)
    elif not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        yield Finding(name, f"has statistics in {file} that are not finite", retrain)
    elif bool((second == (0 if mode == "MEAN_STD" else first)).all()):
        yield Finding(name, f"is constant according to its statistics in {file} ({keys[1]})", retrain)
    elif bool((second < (0 if mode == "MEAN_STD" else first)).any()):
        yield Finding(name, f"has statistics in {file} that invert its sign ({keys[1]})", retrain)
    elif feature["type"] == "VISUAL" and float(torch.maximum(first, second).max()) > LARGEST_IMAGE:
        largest = f"{float(torch.maximum(first, second).max()):.3g}"
        problem = f"has statistics of images in 0..255 (up to {largest}) in {file}, but images are in 0..1"
        yield Finding(name, problem, "divide them by 255 and train again with float images")


def _renamed(folder: Path, config: LerobotConfig) -> Iterator[Finding]:
    """Check that no step renames an image of the policy to a different one."""
    for step in _steps(folder, "policy_preprocessor.json"):
        for old, new in step["config"].get("rename_map", {}).items():
            if old != new and {old, new} <= set(config.images):
                problem = f"is renamed to {new} by policy_preprocessor.json: the cameras are swapped"
                yield Finding(old, problem, "empty its rename_map")


def _units(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check that actions are returned in the units in which they were learnt."""
    shared = [name for name in sorted(before.keys() & after.keys()) if name.startswith(f"{ACTION}.")]
    alike = [name for name in shared if before[name].shape == after[name].shape]
    pairs = {name: (before[name].float(), after[name].float()) for name in alike}
    different = [name for name, (old, new) in pairs.items() if not torch.allclose(old, new, rtol=1e-4, atol=1e-6)]
    if different:
        old, new = pairs[different[0]]
        ratio = float(new.abs().sum() / old.abs().sum().clamp_min(1e-12))
        scales = f"{different[0]} differs by a factor of {ratio:.3g} between the two pipelines"
        problem = f"was learnt in units that differ from those returned: {scales}"
        yield Finding(ACTION, problem, "copy policy_postprocessor*.safetensors from the original training")


def _steps(folder: Path, file: str) -> list[Json]:
    """Return a pipeline's steps, without settings that are null."""
    steps = read_json(folder / file).get("steps", []) if (folder / file).is_file() else []
    settings = [{key: x for key, x in (step.get("config") or {}).items() if x is not None} for step in steps]
    return [{**step, "config": config} for step, config in zip(steps, settings, strict=True)]


def _step(folder: Path, file: str) -> Json | None:
    return next((step for step in _steps(folder, file) if step.get("registry_name") in PIPELINES[file]), None)


def _statistics(folder: Path, step: Mapping[str, Any] | None) -> dict[str, Tensor]:
    if step is None:
        return {}
    if step["registry_name"] == DECODE:
        return decode_statistics(step["config"])
    given = step["config"].get("stats", {})
    inline = {f"{name}.{part}": torch.as_tensor(x) for name, parts in given.items() for part, x in parts.items()}
    return inline or (load_file(folder / step["state_file"]) if step.get("state_file") else {})


def _equal(tensor: Tensor, stored: Tensor) -> bool:
    return tensor.shape == stored.shape and torch.equal(tensor.detach().cpu(), stored.to(tensor.dtype))


def facts(config: LerobotConfig) -> dict[str, str]:
    """Describe the policy's inputs and outputs as a table."""
    modes = ", ".join(f"{kind} {mode}" for kind, mode in (config.normalization_mapping or {}).items())
    return {
        "type": config.policy_type,
        "images": ", ".join(f"{name} {list(shape)}" for name, shape in config.images.items()) or "none",
        "state": ", ".join(f"{name} [{width}]" for name, width in config.states.items()) or "none",
        "action": f"{config.action_dim} dimensions, {config.n_action_steps} actions executed per chunk of {config.chunk_size}",
        "observations": str(config.n_obs_steps),
        "normalisation": modes or "none",
    }
