"""``rlinf audit``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.commands.hydra_app import names_policy, parse
from rlinf.errors import ConfigError


def audit(arguments: Sequence[str]) -> int:
    """Ask whether a policy reads its instruction, looks, reacts, or remembers: the same episodes, with one thing changed at a time.

    Keys are those of `rlinf evaluate`. Each condition plays 100 episodes unless evaluation.num_episodes says otherwise. The page
    is written to outputs/<experiment>/audit_<time> unless output_dir says otherwise. docs/audit.md explains the answers.
    """
    args = parse(arguments)
    if not names_policy(arguments):
        raise ConfigError(
            "`rlinf audit` needs a checkpoint or run folder. Run rlinf audit checkpoint=outputs/quickstart/latest"
        )
    from rlinf.commands import audit as command

    config = command.configured(args)
    if config is not None:
        command.audit(config)
    return 0
