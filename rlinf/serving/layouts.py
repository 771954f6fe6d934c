"""Keys of an observation's parts in a request, for each robot in openpi's protocol and for rlinf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.errors import ConfigError
from rlinf.options import from_mapping, option, override_text
from rlinf.serving import KEYS, MessageError
from rlinf.serving.codec import too_long
from rlinf.types import Observation

Path = tuple[str, ...]
"""Keys that lead from the request to a value: ``("images", "front")`` is ``request["images"]["front"]``."""


@dataclass(frozen=True)
class MessageLayout:
    """Paths of an observation's parts.

    Attributes:
        images: One path per image, in the order of the policy's cameras.
        states: Paths of the arrays concatenated to form the state, with their widths (None: any width).
        prompt: Path of the instruction, or None if it is not sent.
        channels_first: Whether images are ``[3, H, W]``.
    """

    images: tuple[Path, ...]
    states: tuple[tuple[Path, int | None], ...] = ((("state",), None),)
    prompt: Path | None = ("prompt",)
    channels_first: bool = False

    @property
    def state_width(self) -> int | None:
        """Width of the complete state, or None if any width is allowed or it is not sent."""
        widths = [width for _, width in self.states]
        return None if None in widths or not widths else sum(widths)

    def read(
        self,
        request: Mapping[str, Any],
        cameras: Sequence[str],
        reads_state: bool,
        image_size: int | None = None,
        max_prompt: int | None = None,
    ) -> dict[str, Any]:
        """Return a request's ``images``, ``state`` and ``instruction``; raise MessageError if a part is missing or malformed.

        Args:
            cameras: The policy's names for ``images``; additional images are ignored.
            image_size: Required height and width of images, or None for any size.
            max_prompt: Maximum prompt length in bytes, or None for no limit.
        """
        prompt = _at(request, self.prompt)
        if max_prompt is not None and isinstance(prompt, str | bytes) and len(prompt) > max_prompt:
            raise too_long("The prompt", len(prompt), max_prompt)
        places = zip(cameras, self.images, strict=False)
        images = {name: self._image(request, place, image_size) for name, place in places}
        if isinstance(prompt, bytes):
            prompt = prompt.decode("utf-8", "replace")
        parts = [_numbers(request, place, width) for place, width in self.states if reads_state]
        return {"images": images, "state": np.concatenate(parts) if parts else None, "instruction": prompt}

    def _image(self, request: Mapping[str, Any], place: Path, size: int | None) -> np.ndarray:
        image = _at(request, place)
        if not isinstance(image, np.ndarray) or image.ndim != 3:
            shape = list(getattr(image, "shape", ())) or type(image).__name__
            raise MessageError(f"{_text(place)} is {shape}; expected an image with three axes")
        if self.channels_first and image.shape[0] == 3:
            image = image.transpose(1, 2, 0)
        # Check this before any computation whose cost depends on the client's image.
        if size is not None and image.shape != (size, size, 3):
            raise MessageError(f"{_text(place)} has the shape {list(image.shape)}; expected {[size, size, 3]}")
        if image.dtype.kind == "f":  # openpi's clients may send floats in [0, 1]
            if not np.isfinite(image).all() or image.min(initial=0) < 0 or image.max(initial=0) > 1:
                raise MessageError(
                    f"{_text(place)} has {image.dtype} values outside 0 to 1; expected uint8, or floats from 0 to 1"
                )
            image = np.round(image * 255).astype(np.uint8)
        return np.ascontiguousarray(image)

    def request(self, observation: Observation, row: int) -> dict[str, Any]:
        """Build the request for one batch row of an observation, assigning its cameras to ``images`` in order."""
        request: dict[str, Any] = {}
        for place, images in zip(self.images, observation.images.values(), strict=False):
            image = images[row]
            _put(request, place, np.ascontiguousarray(image.transpose(2, 0, 1)) if self.channels_first else image)
        first = 0
        for place, width in self.states if observation.state is not None else ():
            after = observation.state.shape[1] if width is None else first + width
            _put(request, place, observation.state[row, first:after])
            first = after
        if self.prompt is not None:
            _put(request, self.prompt, observation.instruction[row])
        return request


ROBOTS = {
    "libero": {
        "image": ["observation/image", "observation/wrist_image"],
        "state": {"observation/state": 8},
        "prompt": "prompt",
    },
    "aloha": {
        "image": [["images", name] for name in ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")],
        "state": {"state": 14},
        "prompt": "prompt",
        "channels_first": True,
    },
    "droid": {
        "image": ["observation/exterior_image_1_left", "observation/wrist_image_left"],
        "state": {"observation/joint_position": 7, "observation/gripper_position": 1},
        "prompt": "prompt",
    },
}
"""Keys of openpi's robots, for ``model.keys``."""


@dataclass(frozen=True)
class Names:
    """A user-defined map of keys; parts without a key are not sent."""

    image: str | list[str | list[str]] | None = option(None, "Key or keys of the images; [a, b] is key b of map a.")
    state: str | dict[str, Any] | None = option(None, "Key of the state, or a map from keys to widths of its parts.")
    prompt: str | None = option(None, "Key of the instruction.")
    channels_first: bool = option(False, "Whether images are [3, H, W].")

    def layout(self, section: str) -> MessageLayout:
        """Return the layout; raise ConfigError if two parts have the same path or no part has a path."""
        images = [self.image] if isinstance(self.image, str) else self.image or []
        states = {self.state: None} if isinstance(self.state, str) else self.state or {}
        places = [(place,) if isinstance(place, str) else tuple(place) for place in images]
        paths = [*places, *((key,) for key in states), *([] if self.prompt is None else [(self.prompt,)])]
        shared = [_text(p) for at, p in enumerate(paths) if any(p[: len(q)] == q[: len(p)] for q in paths[:at])]
        any_width = (None,) if len(states) == 1 else ()  # a single part may have any width
        odd = [width for width in states.values() if width not in any_width and (type(width) is not int or width < 1)]
        if shared or odd or not paths:
            problem = f"{section} names {shared[0] if shared else 'nothing'}"
            if odd:
                problem = f"{section}.state has the width {override_text(odd[0])}"
            example = f"'{section}={{image: observation/image, state: observation/state, prompt: prompt}}'"
            again = " for two parts of the observation" if shared and not odd else ""
            raise ConfigError(
                f"{problem}{again}; expected a key for each part, and widths of at least 1. Set e.g. {example}"
            )
        prompt = None if self.prompt is None else (self.prompt,)
        return MessageLayout(
            tuple(places), tuple(((key,), width) for key, width in states.items()), prompt, self.channels_first
        )


def layout_of(keys: str | Mapping[str, Any], cameras: Sequence[str]) -> MessageLayout:
    """Return the layout for ``keys``: one of ``ROBOTS``, ``rlinf`` (images are named after ``cameras``), or a user's map."""
    if isinstance(keys, Mapping):
        return from_mapping(Names, keys, "model.keys").layout("model.keys")
    if keys not in KEYS:
        raise ConfigError(
            f"model.keys is '{keys}'; expected {', '.join(KEYS)}, or {{image: <key>, prompt: <key>}}. Set model.keys=libero"
        )
    return (
        layout_of(ROBOTS[keys], cameras)
        if keys in ROBOTS
        else MessageLayout(tuple(("images", name) for name in cameras))
    )


def check_layout(
    keys: str | Mapping[str, Any],
    layout: MessageLayout,
    cameras: Sequence[str],
    state_dim: int | None,
    owner: str,
    fix: str,
) -> None:
    """Raise ConfigError if there are more cameras than paths, the state's width differs, or a key of a map is unused.

    ``state_dim`` is 0 without a state, and None if unknown. ``owner`` is the policy or env named in the message.
    """
    if isinstance(keys, Mapping):
        idle = [_text(place) for place in layout.images[len(cameras) :]]
        idle += [_text(place) for place, _ in layout.states if state_dim == 0]
        if idle:
            shows = f"the cameras {override_text(list(cameras))} and {'no' if state_dim == 0 else 'a'} state"
            raise ConfigError(
                f"model.keys has '{idle[0]}', which matches nothing in the observation: {owner} has {shows}. Remove '{idle[0]}' from "
                "model.keys, or choose an env that provides it, e.g. more of env.cameras"
            )
        keys = "model.keys"
        if not layout.images:  # the map leaves images out on purpose
            cameras = ()
    if len(cameras) > len(layout.images):
        problem = f"{owner} has the cameras {override_text(list(cameras))}"
        raise ConfigError(f"{problem}; expected at most {len(layout.images)}, as in the keys of {keys}. Set {fix}")
    width = layout.state_width
    if width is not None and state_dim not in (None, 0, width):
        raise ConfigError(
            f"{owner} has a state of width {state_dim}; expected {width} with the keys of {keys}. Set {fix}"
        )


def _at(request: Mapping[str, Any], place: Path) -> Any:
    value: Any = request
    for key in place:
        if not isinstance(value, Mapping) or key not in value:
            has = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise MessageError(f"The observation has no {_text(place)}; found: {has or 'no keys'}")
        value = value[key]
    return value


def _numbers(request: Mapping[str, Any], place: Path, width: int | None) -> np.ndarray:
    value = _at(request, place)
    try:
        numbers = np.asarray(value).ravel()
    except (TypeError, ValueError) as error:
        raise MessageError(f"{_text(place)} is a {type(value).__name__}; expected numbers") from error
    if numbers.dtype.kind not in "biuf":
        raise MessageError(f"{_text(place)} is a {type(value).__name__}; expected numbers")
    if width not in (None, len(numbers)):
        raise MessageError(f"{_text(place)} has {len(numbers)} values; expected {width}")
    return numbers.astype(np.float32)


def _put(request: dict[str, Any], place: Path, value: Any) -> None:
    for key in place[:-1]:
        request = request.setdefault(key, {})
    request[place[-1]] = value


def _text(place: Path) -> str:
    return "".join([place[0], *(f"['{key}']" for key in place[1:])])
