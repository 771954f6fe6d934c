"""A loaded policy that acts on single observations or batches, and validates them."""

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
    """A policy loaded by ``rlinf.load_policy``.

    Args:
        model: The network with its processor, in evaluation mode and on its device.
        config: The training configuration (for a checkpoint) or the run's configuration (for a public model).
        trained_here: Whether observations must match the cameras, image size and state dimensions of ``config.env``. Set to False
            for public models, which have their own checks.

    Attributes:
        cameras: Names of the images required by ``act``, in order, or None if any images are accepted.
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
        size = f"chunks of {self.action_chunks_len} x {self.action_dim}"
        return f"Policy({type(self.model).__name__}, {given}, {size})"

    @property
    def action_dim(self) -> int:
        """The action dimension ``D``."""
        return self.model.action_dim

    @property
    def action_chunks_len(self) -> int:
        """The number of actions per call, ``C``, to be executed in sequence."""
        return self.model.action_chunks_len

    def act(
        self, observation: Observation | Mapping[str, Any], *, greedy: bool = True, seed: int | None = None
    ) -> np.ndarray:
        """Compute actions for an observation, without gradients: float32 ``[B, C, D]`` in the env's units.

        Raise ConfigError if a camera, the state or the instruction is missing, or has the wrong shape or type.

        Args:
            observation: An observation of ``B`` env slots, or a mapping with the keys ``images`` (camera name to uint8
                ``[B, H, W, 3]``), ``state`` (``[B, S]``, may be absent or None) and ``instruction`` (``B`` strings).
                If ``instruction`` is a single string, inputs and actions have no axis ``B``. Unknown cameras are ignored.
            greedy: Return the most likely actions. If False, sample actions at ``rollout.temperature``.
            seed: Seed for sampling. Equal seeds yield equal samples; None continues a random stream used by all calls.
        """
        rows, is_single = self.rows(observation)
        model, uniforms = self.model, None
        if not greedy:
            generator = self._generator if seed is None else np.random.default_rng(seed)
            draws = generator.random((len(rows), model.num_uniforms), dtype=np.float32)
            # Avoid 0 because sampling takes the logarithm of the uniforms.
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

    def rows(self, observation: Observation | Mapping[str, Any]) -> tuple[Observation, bool]:
        """Validate an observation. Return it with images in the policy's order, and whether it was a single observation."""
        if isinstance(observation, Mapping):
            for name in observation:
                if name not in FIELDS:
                    raise ConfigError(f"The observation has the key '{name}'.{did_you_mean(name, FIELDS)}")
            images, *state_and_instruction = (observation.get(name) for name in FIELDS)
            observation = Observation({} if images is None else images, *state_and_instruction)
        elif not isinstance(observation, Observation):
            required = f"an rlinf.Observation, or a mapping with the keys {', '.join(FIELDS)}"
            raise ConfigError(f"act got a {type(observation).__name__}; expected {required}")
        if not isinstance(observation.images, Mapping):
            problem = (
                f"images is a {type(observation.images).__name__}; expected a mapping of camera names to uint8 images"
            )
            raise ConfigError(f"{problem}. Pass {{'images': {{'{(self.cameras or ['front'])[0]}': image}}}}")
        instructions, is_single = _instructions(observation.instruction)
        cameras = list(observation.images) if self.cameras is None else self.cameras
        missing = [name for name in cameras if name not in observation.images]
        if missing:
            problem = f"The observation has the cameras {list(observation.images)}"
            raise ConfigError(f"{problem}; expected {cameras} (missing: {', '.join(missing)})")
        images = {name: self._image(name, observation.images[name], len(instructions), is_single) for name in cameras}
        state = None if observation.state is None else self._state(observation.state, len(instructions), is_single)
        return Observation(images, state, instructions), is_single

    def _image(self, name: str, image: Any, num_rows: int, is_single: bool) -> np.ndarray:
        image = np.asarray(image)
        if image.dtype != np.uint8:
            fix = "For images in 0 to 1, pass (255 * image).astype('uint8')"
            raise ConfigError(f"images['{name}'] is {image.dtype}; expected uint8, 0 to 255. {fix}")
        size = self._image_size
        row = ("H", "W", 3) if size is None else (size, size, 3)
        return _rows_of_shape(f"images['{name}']", image, row, num_rows, is_single)

    def _state(self, state: Any, num_rows: int, is_single: bool) -> np.ndarray:
        state = np.asarray(state)
        if state.dtype.kind not in "fiu":
            raise ConfigError(f"state is {state.dtype}; expected numbers, float32")
        state = _rows_of_shape(
            "state", state, ("S" if self._state_dim is None else self._state_dim,), num_rows, is_single
        )
        if not np.isfinite(state).all():
            raise ConfigError(f"state has {int((~np.isfinite(state)).sum())} values that are NaN or infinite")
        return np.ascontiguousarray(state, dtype=np.float32)


def _rows_of_shape(
    name: str, array: np.ndarray, row: tuple[int | str, ...], num_rows: int, is_single: bool
) -> np.ndarray:
    """Check an array against ``row``, the shape of one observation (letters match any size), and return it with a batch axis."""
    wanted = row if is_single else (num_rows, *row)
    fits = len(wanted) == array.ndim and all(
        isinstance(size, str) or size == given for size, given in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        which = "one instruction" if is_single else f"{num_rows} instructions"
        shape = ", ".join(map(str, wanted))
        raise ConfigError(f"{name} has the shape {list(array.shape)}; required with {which}: [{shape}]")
    return array[None] if is_single else array


def _instructions(instruction: Any) -> tuple[list[str], bool]:
    """Return the instructions, and whether there is a single observation instead of a batch."""
    is_single = isinstance(instruction, str)
    try:
        instructions = [instruction] if is_single else list(instruction)
    except TypeError:
        instructions = []
    if not instructions or not all(isinstance(text, str) and text.strip() for text in instructions):
        required = "a string for one observation, or a list with a string for each row of a batch"
        raise ConfigError(f"instruction is {instruction!r}; expected {required}")
    return instructions, is_single
