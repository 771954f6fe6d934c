"""A policy on the network: messages, a server of them, and a client. Nothing here knows a model.

Nothing that arrives is executed or unpickled: messages are maps of numbers, text and checked arrays.
"""

from importlib.util import find_spec

from rlinf.errors import MissingDependencyError

MANIFESTS = "RLinf-Manifests"
"""Header of a client that wants the policy's manifests in the metadata: 30 KB that most clients do not read."""
KEYS = ("rlinf", "libero", "aloha", "droid")
"""Names of the observation layouts: ``rlinf``, and those of ``rlinf.serving.layouts.ROBOTS``."""


class MessageError(ValueError):
    """A message that breaks the protocol; its text is sent to the client."""


def require_packages(wanted_by: str) -> None:
    """Raise MissingDependencyError, with the install command, if a package of the server is not installed."""
    if find_spec("websockets") is None or find_spec("msgpack") is None:
        raise MissingDependencyError(
            f"{wanted_by} needs the packages websockets and msgpack. Run pip install -e '.[serve]' in the clone of rlinf"
        )
