"""A loaded policy that acts on one observation or a batch, and refuses observations that do not fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlinf.config.schema import RunConfig
from rlinf.envs import ENVS
from rlinf.errors import ConfigError, did_you_mean
from rlinf.models.precision import autocast, evaluation_mode
from rlinf.types import Observation

if TYPE_CHECKING:
    from rlinf.models.embodiment.base import ActionModel  # imports transformers

FIELDS = ("images", "state", "instruction")


class Policy:
    """A policy that acts; ``rlinf.load_policy`` returns one.

    Args:
        model: The network with its processor, in evaluation mode, on its device.
        config: The configuration in which the policy was trained (a checkpoint) or is run (a public model).
        trained_here: Require observations of ``config.env``: its cameras, image size and state width. False for a public
            model, which has its own checks.

    Attributes:
        cameras: Names of the images that ``act`` needs, in order; None: those that are given.
    """

    def __init__(self, model: ActionModel, config: RunConfig, trained_here: bool = True) -> None:
        self.model, self.config = model, config
        self.cameras: list[str] | None = None
        self._image_size: int | None = None
        self._state_dim: int | None = None
        if trained_here:
            reads_images = model.num_cameras(model.config) != 0
            self.cameras = list(config.env.cameras) if reads_images else []
            self._image_size = config.env.image_size
            self._state_dim = ENVS.get(config.env.name).state_width(config.env)
        self._generator = np.random.default_rng(config.seed)

    def __repr__(self) -> str:
        given = "any images" if self.cameras is None else f"cameras={self.cameras}"
        return (
            f"Policy({type(self.model).__name__}, {given}, {self.action_chunks_len} x {self.action_dim} numbers a call)"
        )

    @property
    def action_dim(self) -> int:
        """``D``, numbers per action."""
        return self.model.action_dim

    @property
    def action_chunks_len(self) -> int:
        """``C``, actions per call, to be executed one by one."""
        return self.model.action_chunks_len

    def act(
        self, observation: Observation | Mapping[str, Any], *, greedy: bool = True, seed: int | None = None
    ) -> np.ndarray:
        """Return actions for an observation, without gradients: float32 ``[B, C, D]`` in the units of the env.

        Args:
            observation: The ``B`` rows of an env, or a mapping with the keys ``images`` (camera name to uint8
                ``[B, H, W, 3]``), ``state`` (``[B, S]``, may be absent or None) and ``instruction`` (``B`` sentences).
                If ``instruction`` is a string, all are without the axis ``B``, and so are the actions. Unknown cameras
                are ignored.
            greedy: Take the most likely actions; False samples at the temperature of the configuration.
            seed: Equal seeds give equal samples; None continues one random stream from call to call.

        Raises:
            ConfigError: A camera, the state or the instruction is missing, or has another shape or type.
        """
        rows, is_single = self._rows(observation)
        model, uniforms = self.model, None
        if not greedy:
            generator = self._generator if seed is None else np.random.default_rng(seed)
            draws = generator.random((len(rows), model.num_uniforms), dtype=np.float32)
            uniforms = torch.from_numpy(np.maximum(draws, np.finfo(np.float32).tiny))
        with evaluation_mode(model), autocast(model, self.config.model.precision):
            prediction = model.predict_action_batch(
                do_sample=not greedy,
                temperature=self.config.rollout.temperature,
                uniforms=uniforms,
                **model.preprocess(rows),
            )
        actions = prediction.actions.float().cpu().numpy()
        return actions[0] if is_single else actions

    def _rows(self, observation: Observation | Mapping[str, Any]) -> tuple[Observation, bool]:
        """Return the checked rows with the policy's images in its order, and whether a single observation was given."""
        if isinstance(observation, Mapping):
            for name in observation:
                if name not in FIELDS:
                    raise ConfigError(f"The observation has the key '{name}'.{did_you_mean(name, FIELDS)}")
            images = observation.get("images")
            observation = Observation(
                {} if images is None else images, observation.get("state"), observation.get("instruction")
            )
        elif not isinstance(observation, Observation):
            raise ConfigError(
                f"act got a {type(observation).__name__}; required: an rlinf.Observation, or a mapping with the keys "
                f"{', '.join(FIELDS)}"
            )
        if not isinstance(observation.images, Mapping):
            raise ConfigError(
                f"images is a {type(observation.images).__name__}; required: a mapping of camera names to uint8 pictures. Pass "
                f"{{'images': {{'{(self.cameras or ['front'])[0]}': picture}}}}"
            )
        sentences, is_single = _sentences(observation.instruction)
        cameras = list(observation.images) if self.cameras is None else self.cameras
        missing = [name for name in cameras if name not in observation.images]
        if missing:
            raise ConfigError(
                f"The observation has the cameras {list(observation.images)}; required: {cameras} (missing: {', '.join(missing)})"
            )
        images = {name: self._image(name, observation.images[name], len(sentences), is_single) for name in cameras}
        state = None if observation.state is None else self._state(observation.state, len(sentences), is_single)
        return Observation(images, state, sentences), is_single

    def _image(self, name: str, image: Any, num_rows: int, is_single: bool) -> np.ndarray:
        image = np.asarray(image)
        if image.dtype != np.uint8:
            raise ConfigError(
                f"images['{name}'] is {image.dtype}; required: uint8, 0 to 255. Pictures of 0 to 1: (255 * image).astype('uint8')"
            )
        size = self._image_size
        fits = image.ndim == (3 if is_single else 4) and image.shape[-1] == 3 and (is_single or len(image) == num_rows)
        if not fits or (size is not None and image.shape[-3:-1] != (size, size)):
            height, width = (size, size) if size is not None else ("H", "W")
            wanted = f"[{height}, {width}, 3]" if is_single else f"[{num_rows}, {height}, {width}, 3]"
            which = "one instruction" if is_single else f"{num_rows} instructions"
            raise ConfigError(f"images['{name}'] has the shape {list(image.shape)}; required with {which}: {wanted}")
        return image[None] if is_single else image

    def _state(self, state: Any, num_rows: int, is_single: bool) -> np.ndarray:
        state = np.asarray(state)
        if state.dtype.kind not in "fiu":
            raise ConfigError(f"state is {state.dtype}; required: numbers, float32")
        width = self._state_dim
        fits = state.ndim == (1 if is_single else 2) and (is_single or len(state) == num_rows)
        if not fits or (width is not None and state.shape[-1] != width):
            shown = "S" if width is None else width
            wanted = f"[{shown}]" if is_single else f"[{num_rows}, {shown}]"
            which = "one instruction" if is_single else f"{num_rows} instructions"
            raise ConfigError(f"state has the shape {list(state.shape)}; required with {which}: {wanted}")
        if not np.isfinite(state).all():
            raise ConfigError(f"state has {int((~np.isfinite(state)).sum())} numbers that are NaN or infinite")
        state = np.ascontiguousarray(state, dtype=np.float32)
        return state[None] if is_single else state


def _sentences(instruction: Any) -> tuple[list[str], bool]:
    """Return the instructions, and whether there is one observation instead of a batch."""
    is_single = isinstance(instruction, str)
    try:
        sentences = [instruction] if is_single else list(instruction)
    except TypeError:
        sentences = []
    if not sentences or not all(isinstance(one, str) and one.strip() for one in sentences):
        raise ConfigError(
            f"instruction is {instruction!r}; required: a sentence for one observation, or a list with a sentence for each row"
        )
    return sentences, is_single
