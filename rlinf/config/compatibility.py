"""Cross-checks between model, env and command: what the one gives must be what the other reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.config.options import override_text, public_fields
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError


def check_precision(config: RunConfig) -> None:
    """Training needs a number format whose gradients do not vanish."""
    import torch

    from rlinf.models import torch_dtype_from_precision

    precision = config.model.precision
    if torch_dtype_from_precision(precision) is torch.float16:
        raise ConfigError(
            f"model.precision={precision} is for evaluation: in float16 small gradients become 0, and training scales no loss. "
            "Required for training: fp32, bf16 or bf16-mixed. Type model.precision=bf16-mixed"
        )


def check_inputs(config: RunConfig) -> None:
    """Cameras and state of the env must be those that the model reads, where both are known without building them."""
    from rlinf.envs import ENVS

    env_class = ENVS.get(config.env.name)
    cameras, wanted = config.env.cameras, _declared(config, "num_images_in_input")
    if wanted is not None and len(cameras) != wanted:
        raise ConfigError(
            f"env.cameras is {override_text(cameras)} ({len(cameras)} images), and the model reads {wanted} "
            f"(num_images_in_input); required: as many. Type {_mended_cameras(config, wanted)}"
        )
    _check_camera_names(config, _declared(config, "cameras"))
    given, wanted = env_class.state_width(config.env), _declared(config, "state_dim")
    if wanted is not None and given is not None and given != wanted:
        own = f"model.init_config.state_dim={given}" if config.model.model_path is None else "model.model_path=<another folder>"
        raise ConfigError(
            f"The model reads a state of width {wanted} (state_dim), and env.name={config.env.name} gives "
            f"{f'one of width {given}' if given else 'no state'}; required: the same width. Type {own if given else 'model=openvla_tiny'}"
        )
    if given == 0 and _declared(config, "use_proprio"):
        raise ConfigError(
            f"The model reads the robot's state (use_proprio), and env.name={config.env.name} gives no state as it is set. "
            f"Type model.{_section_of(config)}.use_proprio=false, or an option of env with which it gives one"
        )
    widest = _declared(config, "max_state_dim")
    if widest and given is not None and not 0 < given <= widest:
        raise ConfigError(
            f"The model reads the robot's state, of width {widest} at most, and env.name={config.env.name} gives "
            f"{f'one of width {given}' if given else 'none'} as it is set. Type {_mended_state(config, widest)}"
        )


def check_logprobs(config: RunConfig) -> None:
    """RL needs log-probabilities, which a model may not have under some values of its own configuration."""
    from rlinf.models import entry_for, values_refused_for_rl

    for field, instead in values_refused_for_rl(entry_for(config.model)).items():
        value = _declared(config, field)
        if value in instead:
            raise ConfigError(
                f"The model's {field} is '{value}', which gives actions without log-probabilities: such a policy can be cloned and "
                f"evaluated, but not trained by RL. Required: {field}={instead[value]}. "
                f"Type model.{_section_of(config)}.{field}={instead[value]}, or trainer.max_steps=0"
            )


def check_generator(config: RunConfig) -> None:
    """vLLM must be there, and able to run the model."""
    from rlinf.models import MODELS
    from rlinf.models.generation.vllm_engine import require_vllm
    from rlinf.rollout.vllm_policy import twin_of

    rollout = config.rollout
    if rollout.backend == "torch":
        return
    twin_of(MODELS.get(config.model.model_type).resolve().model)
    decoding = _declared(config, "action_decoding")
    if decoding not in (None, "autoregressive"):
        own = "model.init_config.action_decoding=autoregressive, or " if config.model.model_path is None else ""
        raise ConfigError(
            f"rollout.backend={rollout.backend} decodes one token after the other, and the model has action_decoding={decoding} "
            f"(bidirectional attention), which it cannot. Type {own}rollout.backend=torch"
        )
    require_vllm()


def check_demonstrator(config: RunConfig) -> None:
    """Behaviour cloning needs an env with a scripted expert."""
    from rlinf.envs import ENVS
    from rlinf.envs.base import VectorEnv

    env_class = ENVS.get(config.env.name)
    if env_class.expert_actions is VectorEnv.expert_actions:
        raise ConfigError(
            f"sft.max_steps={config.sft.max_steps} clones a scripted expert, and env.name={config.env.name} has none "
            f"({env_class.__name__} does not override expert_actions). Type sft.max_steps=0"
        )


def check_new_folder(config: RunConfig) -> None:
    """A run starts in a folder without another run, unless it continues that one."""
    from rlinf.training.checkpoint import CHECKPOINTS_FOLDER, resolve_checkpoint

    folder = Path(config.output_dir).expanduser().resolve()
    found = [name for name in ("metrics.jsonl", CHECKPOINTS_FOLDER) if (folder / name).exists()]
    if not found:
        return
    if config.resume is not None and folder in resolve_checkpoint(config.resume).resolve().parents:
        return
    raise ConfigError(
        f"output_dir is '{config.output_dir}', which already holds a run ({', '.join(found)}), and a new one would mix with it. "
        f"Type resume={config.output_dir} to continue it, or output_dir=<another folder>"
    )


def _declared(config: RunConfig, field: str) -> Any:
    """A field of the model's own configuration: of the checkpoint whose weights are taken, else of the model section."""
    from rlinf.models import declared_value
    from rlinf.training.checkpoint import resolve_checkpoint

    source = config.checkpoint or config.init_from
    if source is not None:
        checkpoint = resolve_checkpoint(source)
        for folder in (checkpoint / "model", checkpoint):  # Adapters have none, and lie on the model of the section.
            if (folder / "config.json").is_file():
                return declared_value(config.model, field, folder)
    return declared_value(config.model, field)


def _check_camera_names(config: RunConfig, wanted: list[str | None] | None) -> None:
    """Cameras that the model names must be rendered; a null stands for one that is absent."""
    given, names = config.env.cameras, [name for name in wanted or [] if name is not None]
    if wanted is not None and (not names or not set(names) <= set(given)):
        raise ConfigError(
            f"The model reads the cameras {override_text(wanted)}, and env.cameras is {override_text(given)}; required: one or "
            f"more, all of them rendered. Type model.{_section_of(config)}.cameras={override_text(given)}"
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
