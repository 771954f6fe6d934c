"""Set-up steps that every rank of a command runs."""

import hashlib
import json
import socket

from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.process_group import gather_objects
from rlinf.distributed.start import reject_differences
from rlinf.engines.vllm_engine import expandable_segments
from rlinf.errors import ConfigError
from rlinf.files import sha256_of
from rlinf.models.loading import hide_progress_bars
from rlinf.options import to_mapping


@deadline("start")
def prepare_rank(config: RunConfig) -> None:
    """Import the plugins on this rank; raise ConfigError on all ranks if plugins or configurations differ between ranks."""
    plugins = load_plugins(config.plugins)
    hide_progress_bars()
    digests = {f"plugin {path} (sha256)": sha256_of(path) for path in plugins if path.endswith(".py")}
    # Hash each section separately, so that the error can name the one that differs.
    for section, values in to_mapping(config).items():
        text = json.dumps(values, sort_keys=True, default=str)
        digests[f"configuration of {section} (sha256)"] = hashlib.sha256(text.encode()).hexdigest()
    reject_differences(gather_objects((socket.gethostname(), digests)))


@deadline("start")
def reject_expandable_segments() -> None:
    """Raise ConfigError on all ranks if any uses expandable segments, which an engine cannot share (a collective call)."""
    for rank, (host, setting) in enumerate(gather_objects((socket.gethostname(), expandable_segments()))):
        if setting:
            raise ConfigError(
                f"{setting} on rank {rank} on {host}, set by an earlier run in this Python process or by you; required with "
                "rollout.backend=vllm: no expandable segments, whose memory cannot be shared with the engine. Start this run in a "
                "new Python process without the variable, or set rollout.backend=torch"
            )
