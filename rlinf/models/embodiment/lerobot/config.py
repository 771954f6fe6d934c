"""The configuration of a lerobot policy folder, and the mapping of an env's observations to its features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlinf.errors import ConfigError
from rlinf.models.embodiment.lerobot.contents import CONFIG, read_typed
from rlinf.models.embodiment.plain_policy import PlainConfig
from rlinf.models.loading import check_choice, field_error, read_json
from rlinf.options import override_text

ACTION, PROMPT = "action", "task"
CHUNK_FIELDS = ("chunk_size", "horizon", "action_chunk_size")
"""Field names for the number of actions that one pass predicts."""
STEP_FIELDS = ("n_action_steps", "action_chunk_size")
"""Field names for the number of actions that are executed before the next pass."""
RESIZING = ("smolvla", "pi0", "pi05", "pi0_fast")
"""Policy types that resize images themselves, so any image size is accepted."""
SUPPORTED = ("act", "diffusion", "vqbet", "smolvla", "pi0", "pi05", "pi0_fast")


@dataclass
class LerobotConfig(PlainConfig):
    """The part of lerobot's ``config.json`` that an adapter needs, and the overrides of it.

    Args:
        policy_type: ``type`` in lerobot: act, smolvla, ...
        input_features, output_features: Name to ``{"type": ..., "shape": [...]}``.
        normalization_mapping: Type of a feature to its mode.
        n_obs_steps: Stacked observations of one pass, the current one last.
        chunk_size: Actions that one pass predicts from the current step on.
        n_action_steps: Actions of a chunk that are executed before the next pass.
        noise_shape: Shape of the normal noise of a chunk; None: the policy samples none.
        width: Dimensions of an actor's features, as far as the folder states them.
        cameras: Name of an image feature to the env's camera; None: the same name.
        state_scale, action_scale: The policy's units per env unit, per dimension or for all: 57.29578 for degrees per radian.
        prompt: Instruction that replaces the env's; None: the env's.
        trained: The weights are trained here (`rlinf sft`) and are parameters of the model; else it has their digest only.
        tokenizer, vlm: Folders that replace the names in the folder.
    """

    model_type: ClassVar[str] = "lerobot"
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "policy_type", "n_action_steps", "state_scale", "action_scale", "prompt",
    )  # fmt: skip

    policy_type: str = "act"
    input_features: dict[str, Any] | None = None
    output_features: dict[str, Any] | None = None
    normalization_mapping: dict[str, str] | None = None
    n_obs_steps: int = 1
    chunk_size: int = 1
    n_action_steps: int = 1
    noise_shape: list[int] | None = None
    width: int = 1024
    cameras: dict[str, str] | None = None
    state_scale: float | list[float] = 1.0
    action_scale: float | list[float] = 1.0
    prompt: str | None = None
    trained: bool = False
    tokenizer: str | None = None
    vlm: str | None = None

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Any:
        """Read lerobot's ``config.json``; its remaining fields stay in the folder."""
        values = read_typed(Path(folder) / "config.json", CONFIG)
        names = ("input_features", "output_features", "normalization_mapping")
        known = {name: values[name] for name in names if name in values}
        chunk = next((values[name] for name in CHUNK_FIELDS if values.get(name)), 1)
        num_obs = values.get("n_obs_steps") or 1
        config = cls(
            policy_type=str(values.get("type")),
            n_obs_steps=num_obs,
            # A horizon starts with the oldest observation.
            chunk_size=chunk - (num_obs - 1) * ("horizon" in values),
            n_action_steps=next((values[name] for name in STEP_FIELDS if values.get(name)), 1),
            width=values.get("dim_model") or 1024,
            **known,
        )
        config.noise_shape = _noise_shape(values, config.action_dim)
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config

    def __post_init__(self) -> None:
        check_choice("policy_type", self.policy_type, SUPPORTED)
        if not 1 <= self.n_action_steps <= self.chunk_size:
            problem = f"n_action_steps={self.n_action_steps} of a chunk of {self.chunk_size}"
            raise field_error(f"{problem}; required: 1 to {self.chunk_size}", f"n_action_steps={self.chunk_size}")
        widths = {"state_scale": self.state_dim, "action_scale": self.action_dim}
        for name, width in widths.items():
            scale = getattr(self, name)
            numbers = scale if isinstance(scale, list) else [scale]
            if (isinstance(scale, list) and len(scale) != width) or not all(float(number) != 0 for number in numbers):
                problem = f"{name}={override_text(scale)}; required: one number, or {width}, none of them 0"
                raise field_error(problem, f"{name}=1.0")

    @property
    def images(self) -> dict[str, Sequence[int]]:
        """Image features with their shapes ``[3, H, W]``, without empty ones that a policy fills itself."""
        shapes = _shapes(self.input_features, "VISUAL")
        return {name: shape for name, shape in shapes.items() if "empty_camera" not in name}

    @property
    def states(self) -> dict[str, int]:
        """State features with their widths, in the order of the env's state."""
        return {
            name: shape[0] for kind in ("STATE", "ENV") for name, shape in _shapes(self.input_features, kind).items()
        }

    @property
    def state_dim(self) -> int:
        return sum(self.states.values())

    @property
    def num_images_in_input(self) -> int:
        return len(self.images)

    @property
    def action_dim(self) -> int:
        return next((shape[0] for shape in _shapes(self.output_features, "ACTION").values()), 0)

    def camera_of(self, cameras: Sequence[str]) -> dict[str, str]:
        """Return the env's camera for each image of the policy; ConfigError unless ``cameras`` are exactly these."""
        given = self.cameras or {}
        short = {name: short_name(name) for name in self.images}
        unknown = sorted(set(given) - set(short.values()))
        if unknown:
            raise field_error(f"cameras names '{unknown[0]}'; required: {', '.join(short.values())}", "cameras=null")
        mapping = {name: given.get(part, part) for name, part in short.items()}
        if len(mapping) == len(cameras) == 1 and not given and next(iter(short.values())) == "image":
            # A policy whose only image has no specific name accepts any camera.
            mapping = dict.fromkeys(mapping, cameras[0])
        chosen = list(mapping.values())
        shown = override_text(list(cameras))
        if len(set(chosen)) < len(chosen):
            twice = next(camera for camera in chosen if chosen.count(camera) > 1)
            raise field_error(f"cameras shows '{twice}' to two images; required: one camera each", "cameras=null")
        missing = [name for name, camera in mapping.items() if camera not in cameras]
        pairs = ", ".join(f"{part}: <camera>" for part in short.values())
        if missing:
            known = cameras or ["none"]
            raise ConfigError(
                f"The policy reads the image '{missing[0]}' from a camera '{mapping[missing[0]]}', and env.cameras is {shown}. Set "
                f"env.cameras={override_text(chosen)}, or map the image to its camera: 'model.override_config.cameras={{{pairs}}}' "
                f"with one of {', '.join(known)}"
            )
        extra = [camera for camera in cameras if camera not in chosen]
        if extra:
            raise ConfigError(
                f"env.cameras is {shown}, and no image of the policy is from '{extra[0]}'. Set env.cameras={override_text(chosen)}"
            )
        return mapping


def short_name(feature: str) -> str:
    """Return the last part of a feature's name: ``observation.images.top`` -> ``top``."""
    return feature.rpartition(".")[2]


def _noise_shape(values: Mapping[str, Any], action_dim: int) -> list[int] | None:
    """Return the shape of the initial noise; for a policy that samples codes, of the seed; None: no noise."""
    if values.get("horizon"):
        return [values["horizon"], action_dim]
    if "vqvae_n_embed" in values:
        return [1]
    steps = {"num_steps", "num_inference_steps"} & values.keys()
    is_flow = steps and {"chunk_size", "max_action_dim"} <= values.keys()
    return [values["chunk_size"], values["max_action_dim"]] if is_flow else None


def _shapes(features: Mapping[str, Any] | None, kind: str) -> dict[str, Sequence[int]]:
    return {name: feature["shape"] for name, feature in (features or {}).items() if feature["type"] == kind}


def settings_of(folder: str | Path) -> dict[str, int] | None:
    """Return a lerobot folder's sizes for the model section; None: not a lerobot folder."""
    path = Path(folder) / "config.json"
    values = read_json(path) if path.is_file() else {}
    if values.get("type") not in SUPPORTED or "input_features" not in values:
        return None
    config = LerobotConfig.from_pretrained(folder)
    return {"action_token_len": config.action_dim, "action_chunks_len": config.n_action_steps}
