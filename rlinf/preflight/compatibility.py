"""Cross-checks between model, env and command: what the one gives must be what the other reads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.config.declared import declared
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError, MissingDependencyError, did_you_mean
from rlinf.options import override_text, public_fields, to_mapping
from rlinf.preflight.folders import check_writable
from rlinf.rollout.demonstrations import expert_options

KEYS_OF_THE_COLUMNS = ("name", "cameras", "image_size", "state", "max_episode_steps")
"""Keys of ``env`` that ``check_dataset`` checks by the columns of a dataset, or that change no row."""


def check_precision(config: RunConfig) -> None:
    """Training needs a number format whose gradients do not vanish."""
    import torch

    from rlinf.models import torch_dtype_from_precision

    precision = config.model.precision
    if torch_dtype_from_precision(precision) is torch.float16:
        raise ConfigError(
            f"model.precision={precision} is for evaluation: in float16 small gradients become 0, and training scales no loss. "
            "Required for training: fp32, bf16 or bf16-mixed. Set model.precision=bf16-mixed"
        )


def check_inputs(config: RunConfig) -> None:
    """Cameras, state and actions of the env must be those of the model, where both are known without building them."""
    from rlinf.envs import ENVS

    env_class = ENVS.get(config.env.name)
    cameras, wanted = config.env.cameras, declared(config, "num_images_in_input")
    if wanted and len(cameras) != wanted:
        raise ConfigError(
            f"env.cameras is {override_text(cameras)} ({len(cameras)} images), and the model reads {wanted} "
            f"(num_images_in_input); required: as many. Set {_mended_cameras(config, wanted)}"
        )
    _check_camera_names(config, declared(config, "cameras"))
    statistics = declared(config, "norm_stats") or {}
    key = config.model.unnorm_key or (next(iter(statistics)) if len(statistics) == 1 else None)
    if key in statistics:
        env_class.check_statistics(config.env, statistics[key])
    given, wanted = env_class.state_width(config.env), declared(config, "state_dim")
    if wanted is not None and given is not None and given != wanted:
        own = (
            f"model.init_config.state_dim={given}"
            if config.model.model_path is None
            else "model.model_path=<another folder>"
        )
        raise ConfigError(
            f"The model reads a state of width {wanted} (state_dim), and env.name={config.env.name} gives "
            f"{f'one of width {given}' if given else 'no state'}; required: the same width. Set {own if given else 'model=openvla_tiny'}"
        )
    if given == 0 and declared(config, "use_proprio"):
        raise ConfigError(
            f"The model reads the robot's state (use_proprio), and env.name={config.env.name} gives no state as it is set. "
            f"Set model.{_section_of(config)}.use_proprio=false, or an option of env with which it gives one"
        )
    widest = declared(config, "max_state_dim")
    if widest and given is not None and not 0 < given <= widest:
        raise ConfigError(
            f"The model reads the robot's state, of width {widest} at most, and env.name={config.env.name} gives "
            f"{f'one of width {given}' if given else 'none'} as it is set. Set {_mended_state(config, widest)}"
        )


def check_logprobs(config: RunConfig, without: str | None = "trainer.max_steps=0") -> None:
    """RL needs log-probabilities, which a model may not have under some values of its own configuration.

    Args:
        config: Typed configuration.
        without: Override that does without them, if there is one.
    """
    from rlinf.models import entry_for, values_refused_for_rl

    for field, instead in values_refused_for_rl(entry_for(config.model)).items():
        value = declared(config, field)
        if value in instead:
            raise ConfigError(
                f"The model's {field} is '{value}', which gives actions without log-probabilities: such a policy can be cloned and "
                f"evaluated, but not trained by RL. Required: {field}={instead[value]}. "
                f"Set model.{_section_of(config)}.{field}={instead[value]}{f', or {without}' if without else ''}"
            )


def check_generator(config: RunConfig) -> None:
    """vLLM must be there, and able to run the model at the temperature, on GPUs of its own."""
    from rlinf.engines.vllm_engine import check_temperature, require_vllm
    from rlinf.models import MODELS
    from rlinf.rollout.vllm_policy import adapter_of

    rollout = config.rollout
    if rollout.backend == "torch":
        return
    adapter_of(MODELS.get(config.model.model_type).resolve().model)
    decoding = declared(config, "action_decoding")
    if decoding not in (None, "autoregressive"):
        own = "model.init_config.action_decoding=autoregressive, or " if config.model.model_path is None else ""
        raise ConfigError(
            f"rollout.backend={rollout.backend} decodes one token after the other, and the model has action_decoding={decoding} "
            f"(bidirectional attention), which it cannot. Set {own}rollout.backend=torch"
        )
    check_temperature(rollout.temperature, "rollout.temperature")
    size, ranks = rollout.vllm.tensor_parallel_size, config.cluster.num_processes
    if size > 1 and ranks > 1:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel_size={size} and cluster.num_processes={ranks}: each rank has an engine, which begins at the "
            "rank's own GPU and would spread over those of the next ranks. Set rollout.vllm.tensor_parallel_size=1, or "
            "cluster.num_processes=1"
        )
    require_vllm("set rollout.backend=torch")


def check_demonstrator(config: RunConfig) -> None:
    """Check that the env has the scripted expert that behaviour cloning needs."""
    from rlinf.envs import ENVS

    instead = "sft.dataset=<folder>, or sft.max_steps=0 for RL alone"
    ENVS.get(config.env.name).check_expert(config.env, expert_options(config.sft.expert), instead)


def check_evaluation(config: RunConfig) -> None:
    """Check that there are enough different episodes, and that videos can be drawn."""
    from rlinf.envs import ENVS

    if config.evaluation.num_episodes is not None:
        _check_num_episodes(config, "evaluation")
    if config.evaluation.num_videos_per_task:
        ENVS.get(config.env.name).check_drawing(config.env)


def _check_num_episodes(config: RunConfig, section: str) -> None:
    """Check that the split of ``section`` has enough episodes."""
    from rlinf.envs import ENVS

    env, wanted, env_class = config.env, getattr(config, section), ENVS.get(config.env.name)
    num_tasks, per_task = len(env.tasks or env_class.all_task_names(env)), env_class.num_init_states(env, wanted.split)
    if wanted.num_episodes > num_tasks * per_task:
        raise ConfigError(
            f"{section}.num_episodes={wanted.num_episodes}, but the split '{wanted.split}' has {num_tasks} tasks x {per_task} "
            f"initial states = {num_tasks * per_task}. Set {section}.num_episodes={num_tasks * per_task}"
        )


def check_dataset(config: RunConfig) -> None:
    """A dataset must be whole as far as its description tells, and have what model and env have."""
    from rlinf.data.formats import describe_dataset, image_columns, state_column
    from rlinf.envs import ENVS

    sft, env = config.sft, config.env
    info = describe_dataset(sft.dataset)
    instead = "sft.dataset=<another folder>"
    for package in info.packages:
        require_package(package, f"sft.dataset={sft.dataset} ({info.format})", package, "sft.dataset=null")
    made_for = info.env.get("name", env.name)
    if made_for != env.name:
        raise ConfigError(
            f"{info.folder} was collected with env.name={made_for}, and env.name is {env.name}. Set env={made_for}, or {instead}"
        )
    _check_recorded_env(config, info.folder, info.env)
    for camera, column in zip(env.cameras, image_columns(info, env.cameras, sft.cameras), strict=True):
        height, width = info.image_shapes[column]
        if (height, width) != (env.image_size, env.image_size):
            mended = (
                f"env.image_size={height}" if height == width else "another sft.cameras=<cameras with square images>"
            )
            raise ConfigError(
                f"The images '{column}' of {info.folder} have {height} x {width} pixels, and the camera '{camera}' of the env has "
                f"{env.image_size} x {env.image_size} (env.image_size); required: the same. Set {mended}, or {instead}"
            )
    if info.action_dim != config.model.action_token_len:
        raise ConfigError(
            f"The actions of {info.folder} have {info.action_dim} numbers, and the model's {config.model.action_token_len} "
            f"(model.action_token_len); required: the same. Set model.action_token_len={info.action_dim}, or {instead}"
        )
    column, wanted = state_column(info, sft.state_key), ENVS.get(env.name).state_width(env)
    given = 0 if column is None else info.state_dims[column]
    reads_state = any(declared(config, field) for field in ("state_dim", "use_proprio", "max_state_dim"))
    if wanted and given != wanted and (reads_state or sft.state_key is not None):
        same = [name for name, width in info.state_dims.items() if width == wanted]
        raise ConfigError(
            f"The state of {info.folder} ({column or info.state_key}) has width {given}, and the env's has {wanted}; required: the "
            f"same. Set {f'sft.state_key={same[0]}' if same else instead}"
        )


def _check_recorded_env(config: RunConfig, folder: Path, recorded: Mapping[str, Any]) -> None:
    """What a row of a collected dataset means (action repeats, camera flips, physics) must be so in the present env."""
    from rlinf.envs import ENVS

    present, allowed = to_mapping(config.env), config.sft.allow_mismatch
    for name in allowed:
        if name not in present:
            raise ConfigError(
                f"sft.allow_mismatch names '{name}', which is not a key of env.{did_you_mean(name, present)}"
            )
    free = {*ENVS.get(config.env.name).free_settings, *KEYS_OF_THE_COLUMNS, *allowed}
    differing = [name for name in present if name in recorded and name not in free and recorded[name] != present[name]]
    if not differing:
        return

    def overrides(settings: Mapping[str, Any]) -> str:
        text = {name: value if isinstance(value, dict) else override_text(value) for name, value in settings.items()}
        return " ".join(f"env.{name}={text[name]}" for name in differing)

    raise ConfigError(
        f"{folder} was collected with {overrides(recorded)}, and the present env has {overrides(present)}. "
        f"Set {overrides(recorded)}, or sft.allow_mismatch={override_text([*allowed, *differing])} to clone it all the same"
    )


def check_collect(config: RunConfig) -> None:
    """Check that the folder is new, that something can act, and that there are enough episodes."""
    from rlinf.envs import ENVS

    collect, env = config.collect, config.env
    if config.dataset is None:
        raise ConfigError("`rlinf collect` needs a folder to write. Set dataset=data/<name>")
    if os.path.lexists(Path(config.dataset).expanduser()):
        raise ConfigError(
            f"dataset is '{config.dataset}', which exists, and nothing is overwritten. Set dataset=<a new folder>"
        )
    check_writable(config.dataset, "dataset")
    require_package("pyarrow", "`rlinf collect`", "pyarrow", "sft.dataset=null to clone the expert without a dataset")
    if collect.video:
        require_package("av", "collect.video=true", "av", "collect.video=false")
    if config.checkpoint is None:
        instead = "checkpoint=<checkpoint or run folder>, whose policy then plays"
        ENVS.get(env.name).check_expert(env, expert_options(config.sft.expert), instead)
    _check_num_episodes(config, "collect")
    if collect.video and env.image_size % 2:
        raise ConfigError(
            f"env.image_size={env.image_size} is odd, which MP4 files cannot hold. Set collect.video=false, or "
            f"env.image_size={env.image_size + 1}"
        )


def require_package(module: str, wanted_by: str, package: str, instead: str) -> None:
    """Refuse an option whose optional package is not installed.

    Raises:
        MissingDependencyError: With the command that installs it and the override that does without.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{wanted_by} needs the package '{package}'. Install it: pip install {package}. Or type {instead}"
        )


def _check_camera_names(config: RunConfig, wanted: list[str | None] | None) -> None:
    """Cameras that the model names must be rendered; a null stands for one that is absent."""
    given, names = config.env.cameras, [name for name in wanted or [] if name is not None]
    if wanted is not None and (not names or not set(names) <= set(given)):
        raise ConfigError(
            f"The model reads the cameras {override_text(wanted)}, and env.cameras is {override_text(given)}; required: one or "
            f"more, all of them rendered. Set model.{_section_of(config)}.cameras={override_text(given)}"
            f"{f', or env.cameras={override_text(names)}' if names else ''}"
        )


def _mended_state(config: RunConfig, widest: int) -> str:
    """An override with which the env gives a state that is not too wide."""
    from rlinf.envs import ENVS

    width_of = ENVS.get(config.env.name).state_width
    for name, field in public_fields(type(config.env)).items():
        for choice in field.metadata.get("choices") or ():
            if 0 < (width_of(replace(config.env, **{name: choice})) or 0) <= widest:
                return f"env.{name}={choice}"
    return "another env.name=<one with such a state>"


def _section_of(config: RunConfig) -> str:
    """The key of the model section under which fields of the model's own configuration are set."""
    return "init_config" if config.model.model_path is None else "override_config"


def _mended_cameras(config: RunConfig, wanted: int) -> str:
    """An override with which the numbers agree."""
    cameras = config.env.cameras or type(config.env)().cameras
    if len(cameras) >= wanted:
        return f"env.cameras={override_text(cameras[:wanted])}"
    if config.model.model_path is None and cameras:
        return f"model.init_config.num_images_in_input={len(cameras)}"
    return f"env.cameras=<list of {wanted} camera names>"
