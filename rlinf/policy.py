"""A loaded policy that acts on one observation or a batch, and rejects observations that do not fit it."""

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
        size = f"{self.action_chunks_len} x {self.action_dim} numbers a call"
        return f"Policy({type(self.model).__name__}, {given}, {size})"

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

        Raise ConfigError if a camera, the state or the instruction is missing, or has another shape or type.

        Args:
            observation: The ``B`` rows of an env, or a mapping with the keys ``images`` (camera name to uint8
                ``[B, H, W, 3]``), ``state`` (``[B, S]``, may be absent or None) and ``instruction`` (``B`` sentences).
                If ``instruction`` is a string, all are without the axis ``B``, and so are the actions. Unknown cameras
                are ignored.
            greedy: Take the most likely actions; False samples at the temperature of the configuration.
            seed: Equal seeds give equal samples; None continues one random stream from call to call.
        """
        rows, is_single = self.rows(observation)
        model, uniforms = self.model, None
        if not greedy:
            generator = self._generator if seed is None else np.random.default_rng(seed)
            draws = generator.random((len(rows), model.num_uniforms), dtype=np.float32)
            uniforms = torch.from_numpy(np.maximum(draws, np.finfo(np.float32).tiny))  # the logarithm of 0 is infinite
        with evaluation_mode(model), autocast(model, self.config.model.precision):
            prediction = model.predict_action_batch(
                do_sample=not greedy,
                temperature=self.config.rollout.temperature,
                uniforms=uniforms,
                **model.preprocess(rows),
            )
        actions = prediction.actions.float().cpu().numpy()
        return actions[0] if is_single else actions

    def rows(self, observation: Observation | Mapping[str, Any]) -> tuple[Observation, bool]:
        """Return the checked rows with the policy's images in its order, and whether a single observation was given."""
        if isinstance(observation, Mapping):
            for name in observation:
                if name not in FIELDS:
                    raise ConfigError(f"The observation has the key '{name}'.{did_you_mean(name, FIELDS)}")
            images, *others = (observation.get(name) for name in FIELDS)
            observation = Observation({} if images is None else images, *others)
        elif not isinstance(observation, Observation):
            required = f"an rlinf.Observation, or a mapping with the keys {', '.join(FIELDS)}"
            raise ConfigError(f"act got a {type(observation).__name__}; required: {required}")
        if not isinstance(observation.images, Mapping):
            found = (
                f"images is a {type(observation.images).__name__}; required: a mapping of camera names to uint8 images"
            )
            raise ConfigError(f"{found}. Pass {{'images': {{'{(self.cameras or ['front'])[0]}': image}}}}")
        sentences, is_single = _sentences(observation.instruction)
        cameras = list(observation.images) if self.cameras is None else self.cameras
        missing = [name for name in cameras if name not in observation.images]
        if missing:
            found = f"The observation has the cameras {list(observation.images)}"
            raise ConfigError(f"{found}; required: {cameras} (missing: {', '.join(missing)})")
        images = {name: self._image(name, observation.images[name], len(sentences), is_single) for name in cameras}
        state = None if observation.state is None else self._state(observation.state, len(sentences), is_single)
        return Observation(images, state, sentences), is_single

    def _image(self, name: str, image: Any, num_rows: int, is_single: bool) -> np.ndarray:
        image = np.asarray(image)
        if image.dtype != np.uint8:
            fix = "Images of 0 to 1: (255 * image).astype('uint8')"
            raise ConfigError(f"images['{name}'] is {image.dtype}; required: uint8, 0 to 255. {fix}")
        size = self._image_size
        row = ("H", "W", 3) if size is None else (size, size, 3)
        return _rows_of_shape(f"images['{name}']", image, row, num_rows, is_single)

    def _state(self, state: Any, num_rows: int, is_single: bool) -> np.ndarray:
        state = np.asarray(state)
        if state.dtype.kind not in "fiu":
            raise ConfigError(f"state is {state.dtype}; required: numbers, float32")
        state = _rows_of_shape(
            "state", state, ("S" if self._state_dim is None else self._state_dim,), num_rows, is_single
        )
        if not np.isfinite(state).all():
            raise ConfigError(f"state has {int((~np.isfinite(state)).sum())} numbers that are NaN or infinite")
        return np.ascontiguousarray(state, dtype=np.float32)


def _rows_of_shape(
    name: str, array: np.ndarray, row: tuple[int | str, ...], num_rows: int, is_single: bool
) -> np.ndarray:
    """Return the array with an axis of rows, checked against the shape of a row; a letter in it is any size."""
    wanted = row if is_single else (num_rows, *row)
    fits = len(wanted) == array.ndim and all(
        isinstance(size, str) or size == given for size, given in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        which = "one instruction" if is_single else f"{num_rows} instructions"
        shape = ", ".join(map(str, wanted))
        raise ConfigError(f"{name} has the shape {list(array.shape)}; required with {which}: [{shape}]")
    return array[None] if is_single else array


def _sentences(instruction: Any) -> tuple[list[str], bool]:
    """Return the instructions, and whether there is one observation instead of a batch."""
    is_single = isinstance(instruction, str)
    try:
        sentences = [instruction] if is_single else list(instruction)
    except TypeError:
        sentences = []
    if not sentences or not all(isinstance(one, str) and one.strip() for one in sentences):
        required = "a sentence for one observation, or a list with a sentence for each row"
        raise ConfigError(f"instruction is {instruction!r}; required: {required}")
    return sentences, is_single
