"""Keys of an observation's parts in a request: for each robot in openpi's protocol, and for rlinf."""

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
"""Keys from the request down to a value: ``("images", "front")`` is ``request["images"]["front"]``."""


@dataclass(frozen=True)
class MessageLayout:
    """Paths of the parts of an observation.

    Attributes:
        images: One for each image, in the order of the policy's cameras.
        states: Arrays that are concatenated to the state, with their widths; None: any width.
        prompt: The instruction; None: it is not sent.
        channels_first: Images are ``[3, H, W]``.
    """

    images: tuple[Path, ...]
    states: tuple[tuple[Path, int | None], ...] = ((("state",), None),)
    prompt: Path | None = ("prompt",)
    channels_first: bool = False

    @property
    def state_width(self) -> int | None:
        """Width of the complete state; None: any, or it is not sent."""
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
        """Return ``images``, ``state`` and ``instruction`` of a request; MessageError if a part is missing or malformed.

        Args:
            cameras: The policy's names for ``images``; additional images are ignored.
            image_size: Required height and width of images; None: any.
            max_prompt: Longest prompt in bytes; None: any.
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
            raise MessageError(f"{_text(place)} is {shape}; required: an image with three axes")
        if self.channels_first and image.shape[0] == 3:
            image = image.transpose(1, 2, 0)
        # Checked before any computation, whose cost would depend on the client's image.
        if size is not None and image.shape != (size, size, 3):
            raise MessageError(f"{_text(place)} has the shape {list(image.shape)}; required: {[size, size, 3]}")
        if image.dtype.kind == "f":  # openpi's clients may send floats in [0, 1]
            if not np.isfinite(image).all() or image.min(initial=0) < 0 or image.max(initial=0) > 1:
                raise MessageError(
                    f"{_text(place)} is {image.dtype} outside 0 to 1; required: uint8, or floats of 0 to 1"
                )
            image = np.round(image * 255).astype(np.uint8)
        return np.ascontiguousarray(image)

    def request(self, observation: Observation, row: int) -> dict[str, Any]:
        """Return the request for one batch row of an observation, whose cameras fill ``images`` in their order."""
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
    """A user's map of keys; a part without a key is not sent."""

    image: str | list[str | list[str]] | None = option(None, "Key of the image, or keys; [a, b] is key b of map a.")
    state: str | dict[str, Any] | None = option(None, "Key of the state, or a map from keys of its parts to widths.")
    prompt: str | None = option(None, "Key of the instruction.")
    channels_first: bool = option(False, "Images are [3, H, W].")

    def layout(self, section: str) -> MessageLayout:
        """Return the layout; ConfigError if two parts have the same path, or no part has any."""
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
                f"{problem}{again}; required: a key for each part, widths of 1 or more. Set e.g. {example}"
            )
        prompt = None if self.prompt is None else (self.prompt,)
        return MessageLayout(
            tuple(places), tuple(((key,), width) for key, width in states.items()), prompt, self.channels_first
        )


def layout_of(keys: str | Mapping[str, Any], cameras: Sequence[str]) -> MessageLayout:
    """Return the layout ``keys``: one of ``ROBOTS``, ``rlinf`` (images have the names ``cameras``), or a user's map."""
    if isinstance(keys, Mapping):
        return from_mapping(Names, keys, "model.keys").layout("model.keys")
    if keys not in KEYS:
        raise ConfigError(
            f"model.keys is '{keys}'; required: {', '.join(KEYS)}, or {{image: <key>, prompt: <key>}}. Set model.keys=libero"
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

    ``state_dim``: 0: without a state; None: unknown. ``owner``: the policy or env, for the message.
    """
    if isinstance(keys, Mapping):
        idle = [_text(place) for place in layout.images[len(cameras) :]]
        idle += [_text(place) for place, _ in layout.states if state_dim == 0]
        if idle:
            shows = f"the cameras {override_text(list(cameras))} and {'no' if state_dim == 0 else 'a'} state"
            raise ConfigError(
                f"model.keys has '{idle[0]}', which matches nothing in the observation: {owner} has {shows}. Leave '{idle[0]}' out of "
                "model.keys, or choose an env that provides it, e.g. more of env.cameras"
            )
        keys = "model.keys"
        if not layout.images:  # the map leaves images out on purpose
            cameras = ()
    if len(cameras) > len(layout.images):
        problem = f"{owner} has the cameras {override_text(list(cameras))}"
        raise ConfigError(f"{problem}; required: at most {len(layout.images)}, for which {keys} has keys. Set {fix}")
    width = layout.state_width
    if width is not None and state_dim not in (None, 0, width):
        raise ConfigError(
            f"{owner} has a state of width {state_dim}; required: {width} with the keys of {keys}. Set {fix}"
        )


def _at(request: Mapping[str, Any], place: Path) -> Any:
    value: Any = request
    for key in place:
        if not isinstance(value, Mapping) or key not in value:
            has = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise MessageError(f"The observation has no {_text(place)}; there is {has or 'nothing'}")
        value = value[key]
    return value


def _numbers(request: Mapping[str, Any], place: Path, width: int | None) -> np.ndarray:
    value = _at(request, place)
    try:
        numbers = np.asarray(value).ravel()
    except (TypeError, ValueError) as error:
        raise MessageError(f"{_text(place)} is a {type(value).__name__}; required: numbers") from error
    if numbers.dtype.kind not in "biuf":
        raise MessageError(f"{_text(place)} is a {type(value).__name__}; required: numbers")
    if width not in (None, len(numbers)):
        raise MessageError(f"{_text(place)} has {len(numbers)} numbers; required: {width}")
    return numbers.astype(np.float32)


def _put(request: dict[str, Any], place: Path, value: Any) -> None:
    for key in place[:-1]:
        request = request.setdefault(key, {})
    request[place[-1]] = value


def _text(place: Path) -> str:
    return "".join([place[0], *(f"['{key}']" for key in place[1:])])
