"""A policy on the network: messages, a server of them, and a client.

Nothing here knows a model. Nothing that arrives is run or unpickled: messages are maps of numbers, text and checked arrays.
"""

from importlib.util import find_spec

from rlinf.errors import MissingDependencyError

MANIFESTS = "RLinf-Manifests"
"""Header of a client that wants the policy's manifests with the metadata: 30 KB that others do not read."""
KEYS = ("rlinf", "libero", "aloha", "droid")
"""Names of the layouts of an observation: ours, and ``rlinf.serving.layouts.ROBOTS``."""


class MessageError(ValueError):
    """A message that breaks the protocol; its text goes to who sent it."""


def require_packages(wanted_by: str) -> None:
    """Raise MissingDependencyError, with the install command, if what this package imports is not installed."""
    if find_spec("websockets") is None or find_spec("msgpack") is None:
        raise MissingDependencyError(
            f"{wanted_by} needs the packages websockets and msgpack. Run pip install -e '.[serve]' in the clone of rlinf"
        )
