"""Settings of ``rlinf serve``."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.evaluation.config import NUM_ROWS
from rlinf.options import option
from rlinf.serving import KEYS


@dataclass
class ServeConfig:
    """Where a policy is served, to whom, and what a client may ask for."""

    host: str = option("127.0.0.1", "Address to listen at. Other machines reach 0.0.0.0, which needs `api_key_env`.")
    port: int = option(8000, "Port; 0: a free one.", minimum=0, maximum=65535)
    api_key_env: str | None = option(
        None, "Environment variable that holds the key which clients send as `Authorization: Api-Key <key>`."
    )
    keys: str = option("rlinf", "Names of the parts of an observation.", choices=KEYS)
    cameras: list[str] | None = option(
        None, "Names that clients have for the policy's cameras, in their order (`keys=rlinf`); null: the policy's own."
    )
    execute: int | None = option(
        None, "Actions of a chunk that are used on `/vla-eval` before the policy is asked again; null: all.", minimum=1
    )
    max_batch: int = option(
        NUM_ROWS,
        "Rows of each call of the policy; fewer are filled up. Another number than in the evaluation may round otherwise.",
        minimum=1,
    )
    batch_wait_ms: float = option(5.0, "Longest wait for observations of other clients.", minimum=0)
    max_message_mib: int | None = option(
        None, "Largest message that is read; null: one with `max_batch` observations, or 8 if that is less.", minimum=1
    )
    max_prompt_bytes: int = option(4096, "Longest prompt that is read, or other text in a message.", minimum=1)
    max_clients: int = option(
        64, "Connections at a time; one that has asked nothing for a minute makes room for another.", minimum=1
    )
    infer_timeout_s: float = option(60.0, "Longest wait for an action; then the client gets an error.", minimum=0.1)
