"""``rlinf check``: checks an env against the contract that training and evaluation rely on."""

from collections.abc import Sequence
from dataclasses import replace

from rlinf.api import run_config
from rlinf.commands.hydra_app import given_value, parse, split
from rlinf.config.overrides import parse_overrides
from rlinf.contracts.env import PROPERTIES, check_properties
from rlinf.envs import ENVS, make_env
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError
from rlinf.options import check_arguments

MAX_STEPS = 64
"""Maximum env steps per episode during the check, unless ``env.max_episode_steps`` is given."""


def check(arguments: Sequence[str]) -> int:
    """Step an env with random actions and print one line per property of its contract.

    Give the name of a packaged or registered env, and its keys as overrides; plugins=[...] first imports your own code. The exit
    status is 1 if a property is violated. Episodes are truncated at 64 env steps, unless env.max_episode_steps is given.
    """
    check_arguments(split(arguments)[0].overrides, ("env", "env.<key>", "plugins"))
    args = parse(arguments)
    name = given_value(args.overrides, "env")
    keys = [item.key_or_group for item in parse_overrides(args.overrides)]
    unknown_keys = [key for key in keys if key.partition(".")[0] not in ("env", "plugins")]
    if name is None or unknown_keys or args.multirun or args.cfg:
        actual = f"got {', '.join(unknown_keys)}" if unknown_keys else "needs one env, and no flag except --config-dir"
        usage = "rlinf check env=tabletop, or rlinf check env=gymnasium env.id=Pendulum-v1"
        raise ConfigError(f"`rlinf check` {actual}; expected env=<name>, env.<key>=... and plugins=[...]. Run {usage}")
    rest = [override for override, key in zip(args.overrides, keys, strict=True) if key != "env"]
    config = run_config(name, rest, config_dir=args.config_dir).env
    horizon = ENVS.get(config.name).longest_horizon(config)
    if horizon > MAX_STEPS and "env.max_episode_steps" not in keys:
        config = replace(config, max_episode_steps=MAX_STEPS)
        hint = "env.max_episode_steps=<number> checks a different length"
        print(f"episodes of up to {horizon} env steps are truncated at {MAX_STEPS}; {hint}")
        horizon = MAX_STEPS
    width = max(map(len, PROPERTIES.values()))
    unchecked, num_violated = list(PROPERTIES), 0

    def make(num_envs: int, auto_reset: bool) -> VectorEnv:
        return make_env(config, num_envs, auto_reset=auto_reset)

    for key, violations in check_properties(make, max(horizon, MAX_STEPS)):
        unchecked.remove(key)
        num_violated += bool(violations)
        print(f"{PROPERTIES[key]:<{width}}  {'FAIL' if violations else 'pass'}", flush=True)
        for violation in violations:
            print(f"    {violation}", flush=True)
    for key in unchecked:
        print(f"{PROPERTIES[key]:<{width}}  not checked")
    print(f"\n{name}: {f'{num_violated} properties violated' if num_violated else 'fulfils the contract'}")
    return int(num_violated > 0)
