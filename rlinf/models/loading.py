"""Helpers that model classes use to read checkpoint folders and to check their contents."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError
from rlinf.files import Json
from rlinf.models import MODELS
from rlinf.run_folder import STATISTICS_FILE

if TYPE_CHECKING:
    from rlinf.types import Statistics  # imports numpy, which most commands need not

logger = logging.getLogger("rlinf")

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0
LARGEST_FILE = 64 * 2**20
"""Maximum size in bytes of a JSON file or a statistics file."""
LISTS = ("q01", "q99", "min", "max", "mean", "std", "mask")
"""Names of the lists in statistics; each list has one value per dimension."""


def field_error(problem: str, override: str) -> ConfigError:
    """Return an error about a field of the model's own configuration, with ``override`` as the suggested fix."""
    fix = f"Set model.override_config.{override}, or model.init_config.{override} for random weights"
    return ConfigError(f"{problem}. {fix}")


def without_logprobs(name: str, value: str, instead: str) -> ConfigError:
    """Return an error about a setting under which the policy has no log-probabilities, which RL needs."""
    problem = f"{name} is '{value}': without log-probabilities, a policy can only be cloned and evaluated"
    return field_error(f"{problem}; required for RL: e.g. {instead}", f"{name}={instead}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Reject a field whose value is not in ``known``, and suggest the first known value."""
    if value not in known:
        raise field_error(f"{name} is '{value}'; expected {' or '.join(known)}", f"{name}={known[0]}")


def read_json(path: str | Path) -> Json:
    """Return the object in a checkpoint folder's JSON file; raise CheckpointError if it has none or is too large."""
    try:
        if (size := Path(path).stat().st_size) > LARGEST_FILE:
            raise ValueError(f"{size} bytes; expected at most {LARGEST_FILE}")
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        problem = f"it contains a {type(values).__name__}"
    except (OSError, ValueError, RecursionError) as error:  # raised by the file system, the JSON parser or the decoder
        values, problem = None, str(error)
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is not a JSON object ({problem}). Set model.model_path=<a different folder>")
    return values


def dataset_statistics(folder: Path) -> Statistics:
    """Read and check a folder's ``dataset_statistics.json``; return statistics by data set name, empty without the file."""
    path = folder / STATISTICS_FILE
    statistics = read_json(path) if path.is_file() else {}
    for name, parts in statistics.items():
        for part in ("action", "proprio"):
            stats = parts.get(part, {}) if isinstance(parts, Mapping) else parts
            check_statistics(stats, f"{part} of '{name}' in {path}")
    return statistics


def check_statistics(stats: Any, place: str, used: Sequence[str] = ()) -> None:
    """Raise ConfigError unless a data set's statistics are finite in float32, of equal length and usable for normalisation.

    ``used`` names the two lists used for it: (q01, q99), (min, max) or (mean, std). Trailing zeros in ``std`` are padding.
    """
    named = stats if isinstance(stats, Mapping) else {"q01": str(stats)}
    lists = {name: named.get(name) for name in (*LISTS, *used) if named.get(name) is not None or name in used}
    problem = None
    for name, numbers in lists.items():
        values = list(numbers) if isinstance(numbers, Iterable) else [numbers]
        wrong = [value for value in values if not isinstance(value, Real) or not abs(value) < 1e38]  # float32
        if (wrong or not isinstance(numbers, Iterable)) and problem is None:
            problem = f"{name} contains {values[0] if not wrong else wrong[0]!r}; expected a list of finite numbers"
    if problem is None and len({len(numbers) for numbers in lists.values()}) > 1:
        problem = f"their lengths are {[len(numbers) for numbers in lists.values()]} ({', '.join(lists)}); expected equal lengths"
    pairs = list(zip(*(lists[name] for name in used), strict=True)) if used and problem is None else []
    while used[1:] == ("std",) and pairs and pairs[-1][1] == 0:
        pairs.pop()
    for low, high in pairs:
        if high <= 0 if used[1] == "std" else high < low:
            is_std = used[1] == "std"
            problem = f"std is {high:g}; expected above 0" if is_std else f"{used[1]} < {used[0]} ({high:g} < {low:g})"
    if problem is not None:
        env_fix = "or to use the env's: model.unnorm_key=<env.name> 'model.override_config.norm_stats={}'"
        raise ConfigError(
            f"The statistics ({place}) cannot be used: {problem}. Set model.model_path=<a different folder>, {env_fix}"
        )


def check_hub(path: str | Path) -> None:
    """Raise CheckpointError, with the reason, for a hub id that is not cached while the hub is unreachable."""
    if Path(path).exists() or not HUB_ID.fullmatch(str(path)):
        return
    from huggingface_hub import try_to_load_from_cache

    reason = hub_fault()
    if reason is not None and not isinstance(try_to_load_from_cache(str(path), "config.json"), str):
        hint = "Check the connection, or set a local folder"
        raise CheckpointError(f"'{path}' is neither a folder nor in the cache, and {reason}. {hint}")


def hub_fault() -> str | None:
    """Return why the hub is unreachable, or None. If it is, put hub libraries, which would retry for minutes, in offline mode."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or (reason := _unreachable(constants.ENDPOINT)) is None:
        return None
    for module in filter(None, (constants, sys.modules.get("datasets.config"))):
        module.HF_HUB_OFFLINE = True
    logger.warning("The hub does not respond (%s), so only cached files are read", reason)
    return f"the hub does not respond: {reason}"


@functools.cache
def _unreachable(endpoint: str) -> str | None:
    """Return why ``endpoint`` sends no HTTP reply, or None if it does. Proxies set in the environment are used."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # any HTTP status means that the hub is reachable
        return None
    except OSError as error:
        return f"{endpoint}: {getattr(error, 'reason', error)}"
    return None


def no_lora(path: str | Path) -> None:
    """Raise CheckpointError for a folder that contains adapters but no model."""
    adapter = Path(path).expanduser() / "adapter_config.json"
    if adapter.is_file() and not adapter.with_name("config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "<a different model>"
        raise CheckpointError(
            f"'{path}' contains only adapters for {base}. Export a merged model: rlinf export checkpoint=<run folder> output=<folder> "
            f"merge_lora=true. For a policy, set model.lora_path={path} model.is_lora=true model.model_path={base}"
        )


def checkpoint_folder(path: str | Path) -> Path:
    """Return a checkpoint's local folder, downloading a hub id (``owner/name``) first."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    reason = "the folder does not exist"
    if "/" in str(path) and HUB_ID.fullmatch(str(path)):
        from huggingface_hub import snapshot_download

        check_hub(path)
        try:
            return Path(snapshot_download(str(path)))
        except (OSError, ValueError) as error:
            reason = f"the folder does not exist, and as a hub id it cannot be downloaded: {error}"
    raise CheckpointError(f"model.model_path is '{path}': {reason}. Set model.model_path=<checkpoint folder>")


def hide_progress_bars() -> None:
    """Disable transformers' progress bars, which would garble our status line, even before transformers is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils import logging as bars

        bars.disable_progress_bar()


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hide transformers' table of mismatched weights; ``check_fit`` reports them in one line."""
    transformers_logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return " LOAD REPORT" not in record.getMessage()

    transformers_logger.addFilter(is_other)
    try:
        yield
    finally:
        transformers_logger.removeFilter(is_other)


def instead_of_weights(folder: Path) -> str:
    """Describe the contents of a folder without ``model*.safetensors``, and how to convert them if possible."""
    if not any(folder.glob("pytorch_model*.bin")):
        files = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        return f"it contains {files:.200}. Set model.model_path=<checkpoint folder>"
    code = (
        "import pathlib, torch; from safetensors.torch import save_file; [save_file({n: t.clone().contiguous() for n, t in "
        "torch.load(f, 'cpu', weights_only=True).items()}, str(f.with_suffix('.safetensors')).replace('pytorch_', ''), "
        f"{{'format': 'pt'}}) for f in pathlib.Path('{folder}').glob('pytorch_model*.bin')]"
    )
    return f'it contains pytorch_model*.bin, a pickle. Convert it: python -c "{code}"'


def check_fit(folder: str | Path, loading_info: Mapping[str, Any], **fix: Any) -> None:
    """Raise CheckpointError if transformers' loading info reports mismatched weights; ``fix`` adds settings to suggest."""
    kinds = {"missing": "missing_keys", "unexpected": "unexpected_keys", "of a different shape": "mismatched_keys"}
    problems = {kind: sorted(map(str, loading_info[key])) for kind, key in kinds.items()}
    if any(problems.values()):
        listed = ", ".join(f"{kind} {names[:5]} ({len(names)})" for kind, names in problems.items())
        message = f"The weights in '{folder}' do not fit its config.json: {listed}."
        raise CheckpointError(message, path="<a different folder>", **fix)


def check_model_type(config_class: Any, values: Mapping[str, Any], path: str | Path) -> None:
    """Reject a ``config.json`` (``values``) that belongs to a different model type than requested."""
    accepted = getattr(config_class, "accepted_model_types", None)
    model_type = values.get("model_type", values.get("type"))
    if accepted is None or model_type in accepted:
        return
    override = f"model.model_type={model_type}" if model_type in MODELS else "model.model_path=<a different folder>"
    raise CheckpointError(
        f"The config.json in '{path}' is of model type '{model_type}', but the requested model accepts "
        f"{' and '.join(repr(name) for name in accepted if name is not None)}. Set {override}"
    )


def check_attention(implementation: str) -> None:
    """Raise MissingDependencyError if FlashAttention is requested but not installed."""
    if implementation == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                "attn_implementation='flash_attention_2', but the package flash-attn (or a GPU) is missing. Install it "
                "(pip install flash-attn), or use a different kernel.",
                attn_implementation="sdpa",
            )


def num_positions(config: Any) -> int | None:
    """Return the number of positions a language model was built for, or None if its configuration does not declare it."""
    declared = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if declared is None or not isinstance(scaling, Mapping):
        return declared
    # max_position_embeddings is already scaled in Llama 3 and DeepSeek but not in Qwen2, so use the larger of it and factor
    # times the original number. The scaling is either common to all layers or specified per layer type.
    scalings = [values for values in (scaling, *scaling.values()) if isinstance(values, Mapping)]
    scaled = [
        int(values["factor"] * (values.get("original_max_position_embeddings") or declared))
        for values in scalings
        if values.get("factor")
    ]
    return max([declared, *scaled])
