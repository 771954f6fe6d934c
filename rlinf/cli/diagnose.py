"""``rlinf diagnose``: checks whether a model's samples and scores agree, in torch and vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rlinf import wings
from rlinf.checkpoints.folders import resolve_checkpoint
from rlinf.commands.hydra_app import configure, parse, split
from rlinf.commands.open_checkpoint import open_checkpoint, open_remote, policy_for
from rlinf.config.schema import RunConfig
from rlinf.contracts.env import spread_specs
from rlinf.contracts.report import Check, print_checks, rejected_by_vllm
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.engines.vllm_engine import check_temperature
from rlinf.envs import make_env
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError, RLinfError
from rlinf.models.precision import autocast
from rlinf.seeding import seed_everything

if TYPE_CHECKING:
    from rlinf.contracts.policy import PolicyChecker


def diagnose(arguments: Sequence[str]) -> int:
    """Print whether the samples and scores of a model agree, in torch and, if installed, in vLLM.

    Specify an action model by overrides, as for `rlinf train`, or by its checkpoint; it is tested on initial observations of its
    env. Specify a language model by its folder or hub id, optionally followed by key=value for fields of CausalLMConfig.

    The exit status is 1 if a check failed. If vLLM supports a model but cannot run it, that is also a failed check.
    """
    args, unknown = split(arguments)
    # ~key is an override that deletes the key; ~/folder is a folder.
    names = [name for name in args.overrides if "=" not in name and (name[:1] != "~" or name[1:2] == "/")]
    if len(names) > 1 or not (args.overrides or args.config_name):
        usage = "<folder or hub id> for a language model; model=<name>, experiment=<name> or <run folder> for a policy"
        raise ConfigError(f"`rlinf diagnose` needs one model, not {names or 'none'}. Run rlinf diagnose {usage}")
    if names and not unknown and not _is_checkpoint(names[0]):
        return wings.load("variants", "diagnose <folder>")(args.overrides)
    return _diagnose_policy([f"checkpoint={item}" if item in names else item for item in arguments])


def _is_checkpoint(name: str) -> bool:
    try:
        resolve_checkpoint(name)
    except CheckpointError:
        return False
    return True


def _diagnose_policy(arguments: Sequence[str]) -> int:
    config = configure(parse(arguments), "diagnose")
    if config is None:
        return 0
    with _checker(config) as checker:
        if config.model.url is not None:
            checks, note = checker.remote_checks(), None
        else:
            checks = checker.torch_checks()
            note = _check_vllm(checker, config, checks) if checks[0].passed else None
    model = config.model
    print(f"{model.model_type} on {config.env.name}, {model.precision}, temperature {config.rollout.temperature:g}\n")
    return print_checks(checks, note)


def _check_vllm(checker: PolicyChecker, config: RunConfig, checks: list[Check]) -> str | None:
    """Add the engine's checks; return the note below the table."""
    from rlinf.contracts.policy import NUM_ROWS
    from rlinf.rollout.vllm_policy import VllmPolicy

    try:
        vllm_policy = VllmPolicy(checker.model, config.rollout.vllm, NUM_ROWS, torch.get_num_threads())
        check_temperature(checker.temperature, "rollout.temperature")
    except (ConfigError, MissingDependencyError) as error:
        return f"vllm: not checked. {error}"
    try:
        checks += checker.vllm_checks(vllm_policy)
    except RLinfError as error:
        return rejected_by_vllm(checks, error)
    finally:
        vllm_policy.close()
    return None


@contextlib.contextmanager
def _checker(config: RunConfig) -> Iterator[PolicyChecker]:
    """Load the policy of a configuration or of its checkpoint, and reset its env to get initial observations."""
    from rlinf.contracts.policy import NUM_ROWS, PolicyChecker

    checkpoint = config.checkpoint or config.init_from or config.resume
    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    env = make_env(config.env, NUM_ROWS, auto_reset=False)
    try:
        # Import before rendering the first image: once software OpenGL is loaded, libraries of transformers fail to load.
        if config.model.url is not None:
            model = open_remote(config, env, config.evaluation.allow_mismatch).policy
        elif checkpoint is None:
            model = policy_for(config, env)
        else:
            model = open_checkpoint(checkpoint, config).policy
        observation, _ = env.reset(options={"episodes": spread_specs(env, NUM_ROWS)})
        observation = observation.select(range(NUM_ROWS))  # a copy, which remains valid after the env is closed
        action_range = torch.from_numpy(env.action_high - env.action_low).float()
    finally:
        env.close()
    model = model.to(resolve_device(config.cluster.device, 1)).eval()
    with autocast(model, config.model.precision):
        yield PolicyChecker(
            model,
            observation,
            action_range,
            config.rollout.temperature,
            is_exact=config.model.precision != "bf16-mixed" and model.dtype == torch.float32,
            num_trained_rows=min(NUM_ROWS, config.model.micro_batch_size),
        )
