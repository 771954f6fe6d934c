"""``rlinf serve``: a policy behind a WebSocket."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import configure, parse
from rlinf.config.compose import parse_overrides
from rlinf.errors import ConfigError
from rlinf.options import from_mapping, public_fields
from rlinf.serving import require_packages


def serve(arguments: Sequence[str]) -> int:
    """Serve a checkpoint to clients of openpi and of vla-eval, until SIGTERM or Ctrl-C.

    `rlinf evaluate model=remote model.url=ws://127.0.0.1:8000` evaluates it from another process. Keys of the server are host, port,
    api_key_env, keys, cameras, execute, max_batch, batch_wait_ms, max_message_mib, max_prompt_bytes, max_clients, infer_timeout_s (docs/serving.md);
    others change the checkpoint's configuration: cluster.device=cuda, model.precision=bf16.
    """
    require_packages("`rlinf serve`")
    from rlinf.commands.serve import ServeConfig, serve

    own = {word: word.partition("=")[0] for word in arguments if word.partition("=")[0] in public_fields(ServeConfig)}
    args = parse([word for word in arguments if word not in own])
    settings = from_mapping(ServeConfig, {item.key_or_group: item.value() for item in parse_overrides(list(own))})
    if not any(word.partition("=")[0] == "checkpoint" for word in arguments):
        usage = "rlinf serve checkpoint=outputs/quickstart/latest port=8000"
        raise ConfigError(f"`rlinf serve` needs a checkpoint or run folder. Run {usage}")
    config = configure(args, "serve")
    if config is not None:
        serve(config, settings)
    return 0
