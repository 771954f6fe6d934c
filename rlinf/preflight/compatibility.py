"""Cross-checks of model, env, data and evaluation: each must provide the inputs of the next."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.config.schema import RunConfig, expert_acts
from rlinf.data.config import SFTConfig
from rlinf.data.formats import action_columns, describe_dataset, image_columns, state_columns
from rlinf.data.lerobot_dataset import OWN_FILE
from rlinf.data.lerobot_format import INTERVENTION, SUCCESS
from rlinf.data.stored import DatasetInfo
from rlinf.distributed.process_group import resolve_device
from rlinf.engines.vllm_engine import check_temperature, require_vllm
from rlinf.envs import ENVS
from rlinf.envs.base import options_of_expert
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError, MissingDependencyError, did_you_mean, reject
from rlinf.evaluation.stopping import DECIDED
from rlinf.models.building import entry_for
from rlinf.models.precision import PRECISIONS, torch_dtype_from_precision
from rlinf.options import fixed_by_settings, override_text, public_fields, require_values, to_mapping
from rlinf.preflight.folders import check_writable
from rlinf.types import ClassAndConfig, EnvSpec

ACTING = ("evaluate", "collect", "diagnose")
"""Commands that use only a policy's actions."""

KEYS_OF_THE_COLUMNS = ("name", "cameras", "image_size", "state", "max_episode_steps")
"""Keys of ``env`` that ``check_dataset`` checks against the dataset's columns, or that do not affect frames."""


def check_model(config: RunConfig) -> None:
    """Check model type, precision, attention kernel and adapters."""
    model = config.model
    if not entry_for(model).acts:
        reject(
            f"model.model_type={model.model_type} is a language model, which cannot act in env.name={config.env.name}",
            "a policy or a vision-language model",
            "model=hf_vla model.model_path=<folder of an image-text-to-text model>",
        )
    if model.precision not in PRECISIONS:
        torch_dtype_from_precision(model.precision)  # raises an error that suggests the closest one
    if model.attn_implementation == "flash_attention_2":
        actual, fix = "model.attn_implementation=flash_attention_2", "model.attn_implementation=sdpa"
        if not torch.cuda.is_available():
            reject(f"{actual}, but torch sees no NVIDIA GPU", "a GPU", fix)
        require_package("flash_attn", actual, "flash-attn", fix)
    if model.image_size is not None and (len(model.image_size) != 2 or min(model.image_size) < 1):
        actual = f"model.image_size={override_text(model.image_size)}"
        reject(actual, "[height, width] in pixels", "'model.image_size=[224,224]'")
    if not model.is_lora:
        require_values(config, "model.is_lora=false", ("model.lora_path", None, "no adapter", "model.is_lora=true"))
    elif config.trainer.max_steps > 0:
        equal = "equal log-probs in rollout and training, which dropout would prevent"
        require_values(config, "RL", ("model.lora.dropout", 0, equal))


def check_elsewhere(config: RunConfig, command: str) -> None:
    """Check that a remote policy is used only to act."""
    url, name = config.model.url, config.model.model_type
    if not entry_for(config.model).is_remote:
        if url is not None:
            reject(f"model.url={url} with model.model_type={name}", "a remote policy", "model=remote")
        return
    actual = f"model.model_type={name}"
    if url is None:
        reject(f"{actual} with model.url=null", "the address of a server", "model.url=ws://127.0.0.1:8000")
    local = "no local weights"
    require_values(
        config,
        f"model.url={url}",
        ("checkpoint", None, "one policy", "model.url=null"),
        ("model.model_path", None, local),
        ("model.lora_path", None, local),
        ("model.init_config", {}, local),
        ("model.is_lora", False, local),
        ("cluster.num_rollout_workers", None, "ranks that call the server themselves"),
    )
    if command not in ACTING:
        required = f"a policy with local weights; a remote one works only with `rlinf {'`, `rlinf '.join(ACTING)}`"
        reject(f"{actual} (model.url={url}) with `rlinf {command}`", required, "model=openvla_tiny model.url=null")


def check_performance(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check gradient checkpointing and ``model.compile``."""
    model = config.model
    if model.gradient_checkpointing is True and policy is not None and not getattr(policy[0], "fsdp_wrap_modules", ()):
        actual = f"model.gradient_checkpointing=true, but {policy[0].__name__} has no layers (fsdp_wrap_modules)"
        reject(actual, "layers with activations to recompute", "model.gradient_checkpointing=false")
    if model.compile:
        from rlinf.models.layers import check_compiler  # imports transformers

        with fixed_by_settings("model"):
            check_compiler(resolve_device(config.cluster.device, 1))


def check_moments(config: RunConfig, policy: ClassAndConfig | None, actual: str, fix: str) -> None:
    """Reject random weights with state normalisation for ``actual``, a training run without rollouts to measure the statistics."""
    is_new = config.model.model_path is None and config.init_from is None and config.resume is None
    if is_new and policy is not None and getattr(policy[1], "normalize_state", False):
        required = "a policy trained by RL, because only its rollouts measure mean and variance of the state"
        fix = f"model.init_config.normalize_state=false, or {fix}, or init_from=<its checkpoint>"
        reject(f"model.init_config.normalize_state=true with {actual}", required, fix)


def check_history(settings: Any) -> None:
    """Reject a policy with an observation history, for commands that do not store one."""
    count = getattr(settings, "n_obs_steps", 1)
    if count > 1:
        required = "1: `rlinf evaluate`, `audit`, `play` and `collect` keep a history, servers and actors do not"
        reject(f"a policy with n_obs_steps={count}", required, "model.model_path=<a different policy>")


def check_cuda_graph(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check that there is a GPU for ``model.cuda_graph``, and that the policy supports it."""
    device = resolve_device(config.cluster.device, 1)
    if device != "cuda":
        reject(f"model.cuda_graph=true on the device '{device}'", "an NVIDIA GPU", "model.cuda_graph=false")
    if policy is not None:
        policy[0].check_cuda_graph(policy[1], config.model.attn_implementation)


def check_precision(config: RunConfig) -> None:
    """Check that gradients do not underflow in the precision of the weights."""
    precision = config.model.precision
    if PRECISIONS[precision] is torch.float16:
        actual = f"model.precision={precision} is for evaluation: in float16 small gradients underflow to 0"
        reject(actual, "fp32, bf16 or bf16-mixed for training", "model.precision=bf16-mixed")


def check_inputs(config: RunConfig, policy: ClassAndConfig) -> None:
    """Check that the env provides the inputs of the policy (of ``declared_policy``), and that their action spaces agree."""
    policy_class, settings = policy
    policy_class.check_env(settings, env_spec(config))
    statistics = getattr(settings, "norm_stats", None) or {}
    key = config.model.unnorm_key or (next(iter(statistics)) if len(statistics) == 1 else None)
    if key in statistics:
        ENVS.get(config.env.name).check_statistics(config.env, statistics[key])


def env_spec(config: RunConfig) -> EnvSpec:
    """Return the observation spec of the configured env, without building it."""
    env, width_of = config.env, ENVS.get(config.env.name).state_width

    def override_for_state(narrowest: int, widest: int) -> str | None:
        for name, field in public_fields(type(env)).items():
            for choice in field.metadata.get("choices") or ():
                if narrowest <= (width_of(replace(env, **{name: choice})) or 0) <= widest:
                    return f"env.{name}={choice}"
        return None

    return EnvSpec(env.name, env.cameras, env.default_cameras(), env.image_size, width_of(env), override_for_state)


def check_rollout(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check that the policy has log-probabilities, and that vLLM, if configured, is installed and supports it."""
    if policy is not None:
        policy[0].check_rl(policy[1])
    rollout = config.rollout
    if rollout.backend == "torch":
        return
    from rlinf.rollout.vllm_policy import adapter_of  # imports transformers and peft

    if policy is None:
        adapter_of(entry_for(config.model).resolve().model)
    else:
        adapter_of(policy[0]).check(policy[1])
    check_temperature(rollout.temperature, "rollout.temperature")
    size, ranks = rollout.vllm.tensor_parallel_size, config.cluster.num_processes
    if size > 1 and ranks > 1 and config.cluster.placement == "colocated":
        reject(
            f"rollout.vllm.tensor_parallel_size={size} and cluster.num_processes={ranks}",
            "at least one of them to be 1, because each rank's engine would also use the GPUs of the next ranks",
            "rollout.vllm.tensor_parallel_size=1, or cluster.num_processes=1, or cluster.start=ray cluster.placement=disaggregated "
            "(rollout workers with their own GPUs)",
        )
    require_vllm("set rollout.backend=torch")


def check_merged(config: RunConfig, has_rollouts: bool) -> None:
    """Check that there are rollouts and adapters for ``rollout.merge_adapters``, in a precision that preserves small updates."""
    off = "rollout.merge_adapters=false"
    if not config.rollout.merge_adapters:
        return
    if not has_rollouts:
        actual = f"rollout.merge_adapters=true with algorithm.name={config.algorithm.name}"
        reject(actual, "a policy-gradient algorithm, which updates the adapters", f"{off}, or algorithm=ppo")
    require_values(
        config,
        "rollout.merge_adapters=true",
        ("model.is_lora", True, "adapters", off),
        ("rollout.backend", "torch", "policy calls of torch; vLLM merges in every case", off),
        ("rollout.worker_processes", 0, "rollouts in this process or on rollout workers", off),
    )
    if config.model.precision not in ("fp32", "bf16"):
        # Autocast would round the merged float32 weights to nearest.
        actual = f"rollout.merge_adapters=true with model.precision={config.model.precision}"
        reject(actual, "fp32 or bf16", f"model.precision=bf16, or {off}")


def check_demonstrator(config: RunConfig) -> None:
    """Check that the env has the scripted expert that behaviour cloning needs."""
    fix = "sft.dataset=<folder>, or sft.max_steps=0 for RL only"
    ENVS.get(config.env.name).check_expert(config.env, options_of_expert(config.sft.expert), fix)


def check_evaluation(config: RunConfig, trains: bool = False) -> None:
    """Check the number of episodes (if ``trains``, also of fresh ones), the stopping rule, and that videos can be rendered."""
    stop_when, compare = config.evaluation.stop_when, config.evaluation.compare
    rule = f"evaluation.stop_when={stop_when}"
    if not (stop_when in (None, DECIDED) or (isinstance(stop_when, float) and 0 < stop_when < 1)):
        reject(rule, f"'{DECIDED}', or the width of an interval between 0 and 1", "evaluation.stop_when=0.1")
    if stop_when == DECIDED and compare is None:
        required = "an earlier evaluation of the same episodes"
        reject(f"{rule} without a baseline", required, "evaluation.compare=<its folder>")
    is_reported = config.env.success_classifier is not None or ENVS.get(config.env.name).reports_success(config.env)
    if stop_when is not None and not is_reported:
        actual = f"{rule} counts successes, which env={config.env.name} is not known to report"
        reject(actual, "all episodes", "evaluation.stop_when=null")
    available = _available_episodes(config, "evaluation")
    if trains:
        config.evaluation.fresh_episodes(available)
    if recorded := config.evaluation.record_episodes:
        later = "ranks that run the policy; `rlinf evaluate` records any checkpoint later"
        actual, off = f"evaluation.record_episodes={recorded}", "evaluation.record_episodes=0"
        keys = {"cluster.num_rollout_workers": None, "cluster.placement": "colocated"}
        require_values(config, actual, *((key, value, later, off) for key, value in keys.items()))
    if config.evaluation.baselines:
        off = "evaluation.baselines=false"
        require_values(
            config,
            "evaluation.baselines=true",
            ("model.url", None, "a policy in this process, because each baseline changes its inputs or actions", off),
            ("evaluation.split", "eval", "held-out episodes, because constants are chosen on training episodes", off),
        )
    if config.evaluation.num_videos_per_task or recorded:
        ENVS.get(config.env.name).check_drawing(config.env)


def _available_episodes(config: RunConfig, section: str) -> int:
    """Return the number of episodes in the split of ``section``; raise ConfigError if it is too small."""
    env, settings, env_class = config.env, getattr(config, section), ENVS.get(config.env.name)
    num_tasks = len(env_class.selected_tasks(env))
    per_task = env_class.num_init_states(env, settings.split)
    available, first = num_tasks * per_task, getattr(settings, "first_episode", 0)
    split = f"the split '{settings.split}' has {num_tasks} tasks x {per_task} initial states = {available}"
    if first >= available:
        raise ConfigError(f"{section}.first_episode={first}, but {split}. Set {section}.first_episode=0")
    if first + (settings.num_episodes or 1) > available:
        key, skipped = f"{section}.num_episodes", f" after the first {first}" if first else ""
        raise ConfigError(f"{key}={settings.num_episodes}{skipped}, but {split}. Set {key}={available - first}")
    return available


def check_dataset(
    config: RunConfig, policy: ClassAndConfig | None, folder: str | None = None, key: str = "sft.dataset"
) -> DatasetInfo:
    """Check the dataset in ``folder`` (the value of ``key``) and return its description; ``policy`` is None if unknown."""
    sft, env = config.sft, config.env
    folder = sft.dataset if folder is None else folder
    info = describe_dataset(folder, key)
    fix = f"{key}=<a different folder>"
    for package in info.packages:
        require_package(package, f"{key}={folder} ({info.format})", package, f"{key}=null")
    _check_recorded_env(config, info, fix)
    _check_image_sizes(env, info, sft.cameras, fix)
    columns, action_dim = action_columns(info, sft.action_key, config.model.action_token_len)
    if action_dim != config.model.action_token_len:
        actual = f"The actions of {info.folder} have {action_dim} dimensions"
        required = f"model.action_token_len={config.model.action_token_len}"
        reject(actual, required, f"model.action_token_len={action_dim}, or {fix}")
    (columns, state_dim), env_state_dim = state_columns(info, sft.state_key), ENVS.get(env.name).state_width(env)
    reads_state = policy is not None and policy[0].reads_state(policy[1])
    if env_state_dim and state_dim != env_state_dim and (reads_state or sft.state_key is not None):
        same = [name for name, width in info.state_dims.items() if width == env_state_dim]
        actual = f"The state of {info.folder} ({', '.join(columns) or info.state_key}) has {state_dim} dimensions"
        reject(actual, f"{env_state_dim}, the env's", f"sft.state_key={same[0]}" if same else fix)
    return info


def _check_image_sizes(env: EnvConfig, info: DatasetInfo, cameras: Sequence[str] | None, fix: str) -> None:
    """Check that a dataset's images have the env's size."""
    for camera, column in zip(env.cameras, image_columns(info, env.cameras, cameras), strict=True):
        height, width = info.image_shapes[column]
        if (height, width) != (env.image_size, env.image_size):
            resized = f"env.image_size={height}" if height == width else "sft.cameras=<cameras with square images>"
            reject(
                f"The images '{column}' of {info.folder} have {height} x {width} pixels",
                f"{env.image_size} x {env.image_size} (env.image_size) for the camera '{camera}' of the env",
                f"{resized}, or {fix}",
            )


def _check_recorded_env(config: RunConfig, info: DatasetInfo, fix: str) -> None:
    """Check that a dataset was collected with the current env and its settings (action repeats, camera flips, physics)."""
    folder, recorded, env = info.folder, info.env, config.env
    made_for = recorded.get("name", env.name)
    if made_for != env.name:
        actual = f"{folder} was collected with env.name={made_for}"
        reject(actual, f"env.name={env.name}", f"env={made_for}, or {fix}")
    present, allowed = to_mapping(config.env), config.sft.allow_mismatch
    for name in allowed:
        if name not in present and name != "fps":
            hint = did_you_mean(name, present)
            raise ConfigError(f"sft.allow_mismatch names '{name}', which is not a key of env.{hint}")
    free = {*ENVS.get(config.env.name).free_settings, *KEYS_OF_THE_COLUMNS, *allowed}
    differing = [name for name in present if name in recorded and name not in free and recorded[name] != present[name]]
    if not differing:
        return

    def overrides(settings: Mapping[str, Any]) -> str:
        text = {name: value if isinstance(value, dict) else override_text(value) for name, value in settings.items()}
        return " ".join(f"env.{name}={text[name]}" for name in differing)

    actual = f"{folder} was collected with {overrides(recorded)}, but the current env has {overrides(present)}"
    accept = f"sft.allow_mismatch={override_text([*allowed, *differing])} to accept this"
    raise ConfigError(f"{actual}. Set {overrides(recorded)}, or {accept}")


def check_chosen_rows(sft: SFTConfig, info: DatasetInfo | None) -> None:
    """Check that a dataset (None if the expert acts) has the columns used to filter, weight and label frames."""
    filters, weighs, labels = sft.filter != "all", sft.intervention_weight > 1, sft.advantage_top_fraction is not None
    table = [
        (filters, f"sft.filter={sft.filter}", "sft.filter=all"),
        (weighs, f"sft.intervention_weight={sft.intervention_weight}", "sft.intervention_weight=1"),
        (labels, f"sft.advantage_top_fraction={sft.advantage_top_fraction}", "sft.advantage_top_fraction=null"),
    ]
    options = " ".join(option for is_set, option, _ in table if is_set)
    defaults = " ".join(default for is_set, _, default in table if is_set)
    if info is None:
        if options:
            reject(f"{options} without sft.dataset", "a folder of episodes", f"sft.dataset=<folder>, or {defaults}")
        return
    needs_success = sft.filter in ("successes", "corrected") or labels
    needs_intervention = sft.filter in ("interventions", "corrected") or weighs
    for column, is_needed, exists in (
        (SUCCESS, needs_success, info.reports_success_per_row),
        (INTERVENTION, needs_intervention, info.reports_intervention),
    ):
        if is_needed and not exists:
            actual = f"{info.folder} ({info.format}) has no column {column}, and {options}"
            required = "that column (`rlinf robot record=<folder>` writes it)"
            reject(actual, required, f"{defaults}, or sft.dataset=<a different folder>")


def check_recording(config: RunConfig, name: str) -> None:
    """Check the packages that ``name`` needs to write episodes."""
    require_package("pyarrow", name, "pyarrow")
    if config.collect.video:
        require_package("av", "collect.video=true", "av", "collect.video=false")


def check_collect(config: RunConfig, by_human: bool) -> None:
    """Check that the folder is new, that a policy, an expert or a human acts, and that there are enough episodes."""
    collect, env = config.collect, config.env
    if config.dataset is None:
        raise ConfigError("`rlinf collect` needs a folder to write. Set dataset=data/<name>")
    if os.path.lexists(Path(config.dataset).expanduser()):
        reject(f"dataset='{config.dataset}' exists", "a new folder", "dataset=<a new folder>")
    check_writable(config.dataset, "dataset")
    check_recording(config, "`rlinf collect`")
    if collect.extends is not None:
        info, key = describe_dataset(collect.extends, "collect.extends"), "collect.extends=<a different folder>"
        path = info.folder / "meta" / OWN_FILE
        about = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if "collect" not in about:  # `rlinf convert` and `rlinf robot` also write this file
            reject(f"{info.folder} was not written by `rlinf collect`", "a dataset that it has written", key)
        _check_recorded_env(config, info, key)
        _check_image_sizes(env, info, None, key)
        state_dim = ENVS.get(env.name).state_width(env)
        if state_dim is not None and state_columns(info, None)[1] != state_dim:
            reject(
                f"The state of {info.folder} has {state_columns(info, None)[1]} dimensions",
                f"{state_dim}, the env's",
                key,
            )
        if (about["seed"], about["collect"]["split"]) == (config.seed, collect.split):
            actual = f"{info.folder} was collected with seed={config.seed}, too"
            reject(actual, "different initial states", f"seed={config.seed + 1}")
    if expert_acts(config) and not by_human:
        fix = "checkpoint=<checkpoint or run folder> to run its policy"
        ENVS.get(env.name).check_expert(env, options_of_expert(config.sft.expert), fix)
    _available_episodes(config, "collect")
    if collect.video and env.image_size % 2:
        fix = f"collect.video=false, or env.image_size={env.image_size + 1}"
        reject(f"env.image_size={env.image_size}", "an even number for MP4 files", fix)


def require_package(module: str, needed_by: str, package: str, override: str = "") -> None:
    """Raise MissingDependencyError if the package of an option or command is missing; ``override`` avoids the dependency."""
    if importlib.util.find_spec(module) is None:
        fix = f"Run pip install {package}{', or set ' if override else ''}{override}"
        raise MissingDependencyError(f"{needed_by} needs the package '{package}'. {fix}")
