"""What a policy folder of lerobot says of itself, and how an observation of an env becomes its features."""

from __future__ import annotations

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
"""Names that policy types have for the actions which one pass predicts."""
STEP_FIELDS = ("n_action_steps", "action_chunk_size")
"""Names that they have for the actions which are executed before the next pass."""
RESIZING = ("smolvla", "pi0", "pi05", "pi0_fast")
"""Types that resize images themselves, so that images of any size will do."""
SUPPORTED = ("act", "diffusion", "vqbet", "smolvla", "pi0", "pi05", "pi0_fast")


@dataclass
class LerobotConfig(PlainConfig):
    """The part of lerobot's ``config.json`` that an adapter needs, and the overrides of it.

    Args:
        policy_type: ``type`` in lerobot: act, smolvla, ...
        input_features, output_features: Name to ``{"type": ..., "shape": [...]}``.
        normalization_mapping: Type of a feature to its mode.
        n_obs_steps: Observations that one pass reads, the present one last.
        chunk_size: Actions that one pass predicts from the present one on.
        n_action_steps: Actions of these that are executed before the next pass.
        noise_shape: Of the normal noise that decides a chunk; None: the policy draws none.
        width: Features of an actor, as far as the folder tells; the policy that is built knows.
        cameras: Name of an image's feature to the env's camera; None: the same name.
        state_scale, action_scale: The policy's units in one of the env's, for each number or for all: 57.29578 where a policy
            counts in degrees and the env in radians.
        prompt: Sentence that replaces the env's; None: the env's.
        trained: The weights are trained here, by `rlinf sft`. They are then parameters of the model; else it has their digest alone.
        tokenizer, vlm: Folders in place of the names that the folder gives.
        norm_stats, architectures, dtype: See ``PlainConfig``; the first has the statistics of the actions.
    """

    model_type: ClassVar[str] = "lerobot"
    manifest_fields: ClassVar[tuple[str, ...]] = (
        "policy_type",
        "n_action_steps",
        "state_scale",
        "action_scale",
        "prompt",
    )

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
        """Read lerobot's ``config.json``; its other fields stay in the folder."""
        values = read_typed(Path(folder) / "config.json", CONFIG)
        known = {
            name: values[name]
            for name in ("input_features", "output_features", "normalization_mapping")
            if name in values
        }
        chunk = next((values[name] for name in CHUNK_FIELDS if values.get(name)), 1)
        before = values.get("n_obs_steps") or 1
        config = cls(
            policy_type=str(values.get("type")),
            n_obs_steps=before,
            chunk_size=chunk - (before - 1) * ("horizon" in values),  # a horizon starts with the oldest observation
            n_action_steps=next((values[name] for name in STEP_FIELDS if values.get(name)), 1),
            width=values.get("dim_model") or 1024,
            **known,
        )
        config.noise_shape = _noise_shape(values, config.action_dim)
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config

    def __post_init__(self) -> None:
        check_choice("policy_type", self.policy_type, SUPPORTED)
        if not 1 <= self.n_action_steps <= self.chunk_size:
            found = f"n_action_steps={self.n_action_steps} of a chunk of {self.chunk_size}"
            raise field_error(f"{found}; required: 1 to {self.chunk_size}", f"n_action_steps={self.chunk_size}")
        widths = {"state_scale": self.state_dim, "action_scale": self.action_dim}
        for name, width in widths.items():
            scale = getattr(self, name)
            numbers = scale if isinstance(scale, list) else [scale]
            if (isinstance(scale, list) and len(scale) != width) or not all(float(each) != 0 for each in numbers):
                found = f"{name}={override_text(scale)}; required: one number, or {width}, none of them 0"
                raise field_error(found, f"{name}=1.0")

    @property
    def images(self) -> dict[str, Sequence[int]]:
        """Features that are images, with their shapes ``[3, H, W]``, without the empty ones that a policy fills itself."""
        found = _shapes(self.input_features, "VISUAL")
        return {name: shape for name, shape in found.items() if "empty_camera" not in name}

    @property
    def states(self) -> dict[str, int]:
        """Features that are states, with their widths, in the order in which the env's state has them."""
        return {
            name: shape[0] for kind in ("STATE", "ENV") for name, shape in _shapes(self.input_features, kind).items()
        }

    @property
    def state_dim(self) -> int:
        """Width of all states together."""
        return sum(self.states.values())

    @property
    def num_images_in_input(self) -> int:
        """Number of images."""
        return len(self.images)

    @property
    def action_dim(self) -> int:
        """Numbers of an action."""
        return next((shape[0] for shape in _shapes(self.output_features, "ACTION").values()), 0)

    def camera_of(self, cameras: Sequence[str]) -> dict[str, str]:
        """Return the env's camera for each image of the policy; ConfigError unless ``cameras`` are exactly these."""
        given = self.cameras or {}
        short = {name: short_name(name) for name in self.images}
        unknown = sorted(set(given) - set(short.values()))
        if unknown:
            raise field_error(f"cameras names '{unknown[0]}'; required: {', '.join(short.values())}", "cameras=null")
        found = {name: given.get(part, part) for name, part in short.items()}
        if len(found) == len(cameras) == 1 and not given and next(iter(short.values())) == "image":
            found = dict.fromkeys(found, cameras[0])  # a policy whose only image has no name
        chosen = list(found.values())
        shown = override_text(list(cameras))
        if len(set(chosen)) < len(chosen):
            twice = next(each for each in chosen if chosen.count(each) > 1)
            raise field_error(
                f"cameras shows '{twice}' to two images of the policy; required: one camera each", "cameras=null"
            )
        missing = [name for name, camera in found.items() if camera not in cameras]
        pairs = ", ".join(f"{part}: <camera>" for part in short.values())
        if missing:
            known = cameras or ["none"]
            raise ConfigError(
                f"The policy reads the image '{missing[0]}' from a camera '{found[missing[0]]}', and env.cameras is {shown}. Set "
                f"env.cameras={override_text(chosen)}, or say which camera shows it: 'model.override_config.cameras={{{pairs}}}' with "
                f"one of {', '.join(known)}"
            )
        extra = [camera for camera in cameras if camera not in chosen]
        if extra:
            raise ConfigError(
                f"env.cameras is {shown}, and no image of the policy is from '{extra[0]}'. Set env.cameras={override_text(chosen)}"
            )
        return found


def short_name(feature: str) -> str:
    """Return the last part of a feature's name: ``observation.images.top`` -> ``top``."""
    return feature.rpartition(".")[2]


def _noise_shape(values: Mapping[str, Any], action_dim: int) -> list[int] | None:
    """Return the shape of a diffusion's or a flow's first noise; of a policy that draws codes, the one number that seeds them."""
    if values.get("horizon"):
        return [values["horizon"], action_dim]
    if "vqvae_n_embed" in values:
        return [1]
    steps = {"num_steps", "num_inference_steps"} & values.keys()
    return (
        [values["chunk_size"], values["max_action_dim"]]
        if steps and {"chunk_size", "max_action_dim"} <= values.keys()
        else None
    )


def _shapes(features: Mapping[str, Any] | None, kind: str) -> dict[str, Sequence[int]]:
    return {name: each["shape"] for name, each in (features or {}).items() if each["type"] == kind}


def settings_of(folder: str | Path) -> dict[str, int] | None:
    """Return the sizes of a folder of lerobot, as the model section needs them; None: another project has written it."""
    path = Path(folder) / "config.json"
    values = read_json(path) if path.is_file() else {}
    if values.get("type") not in SUPPORTED or "input_features" not in values:
        return None
    config = LerobotConfig.from_pretrained(folder)
    return {"action_token_len": config.action_dim, "action_chunks_len": config.n_action_steps}
