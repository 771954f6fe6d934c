"""Serve a policy over the network: messages, server and client, all independent of the model.

Received data is never executed or unpickled: messages are maps of numbers, text and validated arrays.
"""

from importlib.util import find_spec

from rlinf.errors import MissingDependencyError

MANIFESTS = "RLinf-Manifests"
"""Header with which a client requests the policy's manifests in the metadata (30 KB, which most clients do not need)."""
KEYS = ("rlinf", "libero", "aloha", "droid")
"""Names of the observation layouts: ``rlinf`` and the keys of ``rlinf.serving.layouts.ROBOTS``."""


class MessageError(ValueError):
    """A message that violates the protocol; the error text is sent to the client."""


def require_packages(wanted_by: str) -> None:
    """If a package needed for serving is not installed, raise a MissingDependencyError that contains the install command."""
    if find_spec("websockets") is None or find_spec("msgpack") is None:
        raise MissingDependencyError(
            f"{wanted_by} needs the packages websockets and msgpack. Run pip install -e '.[serve]' in the clone of rlinf"
        )
