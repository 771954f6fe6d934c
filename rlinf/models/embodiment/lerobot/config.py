"""Configuration of a lerobot policy folder, and how an env's observations map to its features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from rlinf.errors import ConfigError
from rlinf.files import Json
from rlinf.models.embodiment.lerobot.contents import CONFIG, PACK, PIPELINE, groot_base, read_typed
from rlinf.models.embodiment.plain_policy import PlainConfig
from rlinf.models.loading import check_choice, field_error, read_json
from rlinf.options import override_text

ACTION, STATE, PROMPT = "action", "observation.state", "task"
CHUNK_FIELDS = ("chunk_size", "horizon", "action_chunk_size")
"""Names of the field with the number of actions predicted per pass."""
STEP_FIELDS = ("n_action_steps", "action_chunk_size")
"""Names of the field with the number of actions executed before the next pass."""
RESIZING = ("smolvla", "pi0", "pi05", "pi0_fast", "groot")
"""Policy types that always resize images themselves."""
SUPPORTED = ("act", "diffusion", "vqbet", "smolvla", "pi0", "pi05", "pi0_fast", "xvla", "groot")
ACTION_SPACES = {"auto": None, "ee6d": 20, "joint": 14, "agibot_ee6d": 20, "franka_joint7": 20, "so101_bimanual": 20}
"""X-VLA's action spaces and the number of actions that its transformer predicts; None is ``max_action_dim``."""


@dataclass
class LerobotConfig(PlainConfig):
    """The fields of lerobot's ``config.json`` that the adapter needs, and overrides.

    Args:
        policy_type: lerobot's ``type``, e.g. act or smolvla.
        input_features, output_features: ``{"type": ..., "shape": [...]}`` by feature name.
        normalization_mapping: Normalisation mode by feature type.
        n_obs_steps: Number of stacked observations per pass; the current one is last.
        chunk_size: Number of actions predicted per pass, from the current step on.
        n_action_steps: Number of actions in a chunk that are executed before the next pass.
        noise_shape: Shape of a chunk's normal noise, or None if the policy samples none.
        width: Width of an actor's features, if the folder specifies it.
        resizes: Whether the policy resizes images itself, so any image size is accepted.
        cameras: Env camera by image feature name; None uses cameras of equal names. X-VLA fills an image whose camera is None.
        state_scale, action_scale: Policy units per env unit, per dimension or for all, e.g. 57.29578 for degrees per radian.
        prompt: Instruction to use instead of the env's, or None.
        trained: Whether the weights are trained (`rlinf sft`) and thus model parameters; if not, only their digest is stored.
        tokenizer, vlm: Folders to use instead of the names in ``config.json``.
    """

    model_type: ClassVar[str] = "lerobot"
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "policy_type", "n_action_steps", "state_scale", "action_scale", "prompt",
    )  # fmt: skip

    policy_type: str = "act"
    input_features: Json | None = None
    output_features: Json | None = None
    normalization_mapping: dict[str, str] | None = None
    n_obs_steps: int = 1
    chunk_size: int = 1
    n_action_steps: int = 1
    noise_shape: list[int] | None = None
    width: int = 1024
    resizes: bool = False
    cameras: dict[str, str | None] | None = None
    state_scale: float | list[float] = 1.0
    action_scale: float | list[float] = 1.0
    prompt: str | None = None
    trained: bool = False
    tokenizer: str | None = None
    vlm: str | None = None

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Self:
        """Read lerobot's ``config.json``, ignoring fields that the adapter does not need."""
        values = read_typed(Path(folder) / "config.json", CONFIG)
        if values.get("type") == "groot":
            values |= _groot_values(Path(folder), values)
        names = ("input_features", "output_features", "normalization_mapping")
        known = {name: values[name] for name in names if name in values}
        chunk = next((values[name] for name in CHUNK_FIELDS if values.get(name)), 1)
        num_obs = values.get("n_obs_steps") or 1
        config = cls(
            policy_type=str(values.get("type")),
            n_obs_steps=num_obs,
            # A horizon starts at the oldest observation.
            chunk_size=chunk - (num_obs - 1) * ("horizon" in values),
            n_action_steps=next((values[name] for name in STEP_FIELDS if values.get(name)), 1),
            width=values.get("dim_model") or 1024,
            resizes=values.get("type") in RESIZING or values.get("resize_imgs_with_padding") is not None,
            **known,
        )
        config.noise_shape = _noise_shape(values, config.action_dim)
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config

    def __post_init__(self) -> None:
        check_choice("policy_type", self.policy_type, SUPPORTED)
        if not 1 <= self.n_action_steps <= self.chunk_size:
            problem = f"n_action_steps={self.n_action_steps} with chunks of {self.chunk_size} actions"
            raise field_error(f"{problem}; expected 1 to {self.chunk_size}", f"n_action_steps={self.chunk_size}")
        widths = {"state_scale": self.state_dim, "action_scale": self.action_dim}
        for name, width in widths.items():
            scale = getattr(self, name)
            numbers = scale if isinstance(scale, list) else [scale]
            if (isinstance(scale, list) and len(scale) != width) or not all(float(number) != 0 for number in numbers):
                problem = f"{name}={override_text(scale)}; expected one nonzero number, or {width} of them"
                raise field_error(problem, f"{name}=1.0")

    @property
    def images(self) -> dict[str, Sequence[int]]:
        """Shapes ``[3, H, W]`` of image features by name, except empty ones that the policy fills itself."""
        shapes, absent = (
            _shapes(self.input_features, "VISUAL"),
            [x for x, camera in (self.cameras or {}).items() if camera is None],
        )
        return {name: shapes[name] for name in shapes if "empty_camera" not in name and short_name(name) not in absent}

    @property
    def states(self) -> dict[str, int]:
        """Widths of state features by name, in the order of the env's state."""
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
        """Map each image of the policy to an env camera; raise ConfigError unless exactly these are ``cameras``."""
        given = {part: camera for part, camera in (self.cameras or {}).items() if camera is not None}
        short = {name: short_name(name) for name in self.images}
        unknown = sorted(set(given) - set(short.values()))
        if unknown:
            raise field_error(f"cameras contains '{unknown[0]}'; expected {', '.join(short.values())}", "cameras=null")
        mapping = {name: given.get(part, part) for name, part in short.items()}
        if len(mapping) == len(cameras) == 1 and not given and next(iter(short.values())) == "image":
            # If the policy has a single image without a specific name, any camera is accepted.
            mapping = dict.fromkeys(mapping, cameras[0])
        chosen = list(mapping.values())
        shown = override_text(list(cameras))
        if len(set(chosen)) < len(chosen):
            twice = next(camera for camera in chosen if chosen.count(camera) > 1)
            raise field_error(f"cameras assigns '{twice}' to two images; expected one camera each", "cameras=null")
        missing = [name for name, camera in mapping.items() if camera not in cameras]
        pairs = ", ".join(f"{part}: <camera>" for part in short.values())
        if missing:
            known = cameras or ["none"]
            raise ConfigError(
                f"The policy reads the image '{missing[0]}' from a camera '{mapping[missing[0]]}', but env.cameras is {shown}. Set "
                f"env.cameras={override_text(chosen)}, or map the image to its camera: 'model.override_config.cameras={{{pairs}}}' "
                f"with one of {', '.join(known)}"
            )
        extra = [camera for camera in cameras if camera not in chosen]
        if extra:
            raise ConfigError(
                f"env.cameras is {shown}, but none of the policy's images is from '{extra[0]}'. Set env.cameras={override_text(chosen)}"
            )
        return mapping


def short_name(feature: str) -> str:
    """Return the last part of a feature's name, e.g. ``top`` for ``observation.images.top``."""
    return feature.rpartition(".")[2]


def _groot_values(folder: Path, values: Mapping[str, Any]) -> Json:
    """Return what GR00T's ``config.json`` does not state: how its steps normalise, its trained horizon, its base's sizes."""
    file, base = folder / "policy_preprocessor.json", groot_base(folder, values.get("base_model_path"))
    steps = read_typed(file, PIPELINE)["steps"] if file.is_file() else []
    packing: Json = next((step.get("config") or {} for step in steps if step["registry_name"] == PACK), {})
    trained = packing.get("valid_action_horizon") or values.get("chunk_size", 40)
    counts = {name: min(values.get(name, 40), trained) for name in ("chunk_size", "n_action_steps")}
    sizes = {"action_horizon": base.get("action_horizon", 40), "model_action_dim": base.get("max_action_dim", 132)}
    return {**counts, **sizes, "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}}


def _noise_shape(values: Mapping[str, Any], action_dim: int) -> list[int] | None:
    """Return the shape of the initial noise (or seed, for a policy that samples codes), or None without noise."""
    if values.get("horizon"):
        return [values["horizon"], action_dim]
    if "vqvae_n_embed" in values:
        return [1]
    if values.get("type") == "groot":
        return [values["action_horizon"], values["model_action_dim"]]
    if values.get("type") == "xvla":
        mode = str(values.get("action_mode")).lower()
        check_choice("action_mode", mode, list(ACTION_SPACES))
        return [values["chunk_size"], ACTION_SPACES[mode] or values.get("max_action_dim", 20)]
    steps = {"num_steps", "num_inference_steps"} & values.keys()
    is_flow = steps and {"chunk_size", "max_action_dim"} <= values.keys()
    return [values["chunk_size"], values["max_action_dim"]] if is_flow else None


def _shapes(features: Mapping[str, Any] | None, kind: str) -> dict[str, Sequence[int]]:
    return {name: feature["shape"] for name, feature in (features or {}).items() if feature["type"] == kind}


def settings_of(folder: str | Path) -> dict[str, int] | None:
    """Return a lerobot folder's sizes for the config's ``model`` section, or None for folders in a different format."""
    path = Path(folder) / "config.json"
    values = read_json(path) if path.is_file() else {}
    if values.get("type") not in SUPPORTED or "input_features" not in values:
        return None
    config = LerobotConfig.from_pretrained(folder)
    return {"action_token_len": config.action_dim, "action_chunks_len": config.n_action_steps}
