"""Command-line front end of audits, which parses the arguments."""

from collections.abc import Sequence

from rlinf.commands.hydra_app import check_checkpoint, parse, require_policy, with_checkpoint


def audit(arguments: Sequence[str]) -> int:
    """Measure whether a policy uses its instruction and images, reacts, or memorises, by changing one thing at a time.

    The same episodes are run under every condition, by default 100 (evaluation.num_episodes). Keys are the same as for `rlinf
    evaluate`. The report is in outputs/<experiment>/audit_<time> (output_dir). docs/audit.md explains the verdicts.
    """
    arguments = with_checkpoint(arguments)
    args = parse(arguments)
    require_policy(arguments, "audit")
    check_checkpoint(arguments)
    from rlinf.audits import command

    config = command.configured(args)
    if config is not None:
        command.run_audit(config)
    return 0
