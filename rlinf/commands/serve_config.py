"""Settings of ``rlinf serve``."""

from dataclasses import dataclass

from rlinf.evaluation.config import NUM_ROWS
from rlinf.options import option
from rlinf.serving import KEYS


@dataclass
class ServeConfig:
    """Address, protocol and limits of a policy server."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 (all machines) needs `api_key_env`.")
    port: int = option(8000, "Port; 0: any free port.", minimum=0, maximum=65535)
    api_key_env: str | None = option(None, "Environment variable with the API key that clients must send.")
    keys: str = option("rlinf", "Naming convention of observation keys.", choices=KEYS)
    cameras: list[str] | None = option(
        None, "Client names of the policy's cameras, in order (`keys=rlinf`); null: the policy's names."
    )
    execute: int | None = option(
        None, "Actions of a chunk executed on `/vla-eval` before the next policy call; null: all.", minimum=1
    )
    max_batch: int = option(NUM_ROWS, "Batch size of each policy call; smaller batches are padded.", minimum=1)
    batch_wait_ms: float = option(5.0, "Maximum wait for observations of additional clients.", minimum=0)
    max_message_mib: int | None = option(
        None, "Maximum message size; null: size of `max_batch` observations, at least 8.", minimum=1
    )
    max_prompt_bytes: int = option(4096, "Maximum size of a prompt or other text.", minimum=1)
    max_clients: int = option(64, "Maximum connections; those idle for a minute are dropped first.", minimum=1)
    infer_timeout_s: float = option(60.0, "Maximum wait for an action before the client gets an error.", minimum=0.1)
