"""All cross-checks of a configuration, before any process, model or simulator starts.

``validate`` runs the functions in ``SECTIONS``; each checks the part of its section that the command uses. This module checks
processes, optimiser, rollout and cloning; ``compatibility`` checks model, env and data; ``folders`` and ``saved`` check the disk.
"""

import os
from bisect import bisect
from functools import cached_property

import torch

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import Algorithm
from rlinf.config.schema import RunConfig, chunks_needed, declared_policy, expert_acts, section_class
from rlinf.distributed.parallel import check_can_shard
from rlinf.distributed.process_group import resolve_device
from rlinf.distributed.ray.cluster import check_address, import_ray
from rlinf.distributed.start import is_connected, launch_context
from rlinf.envs import ENVS
from rlinf.envs.config import ProcessEnvConfig
from rlinf.errors import ConfigError, reject
from rlinf.memory import main_memory_bytes
from rlinf.models.building import check_features, entry_for
from rlinf.options import fixed_by_settings, override_text, require_values
from rlinf.preflight.compatibility import (
    check_chosen_rows,
    check_collect,
    check_cuda_graph,
    check_dataset,
    check_demonstrator,
    check_elsewhere,
    check_evaluation,
    check_history,
    check_inputs,
    check_merged,
    check_model,
    check_moments,
    check_performance,
    check_precision,
    check_rollout,
    require_package,
)
from rlinf.preflight.derived import trains_actor
from rlinf.preflight.folders import check_new_folder, check_sources, check_writable
from rlinf.preflight.memory import policy_on_meta_device
from rlinf.preflight.placement import check_evaluation_workers, check_placement, has_rollout_workers, ranks_by_ray
from rlinf.preflight.saved import check_no_actor, check_start, check_unread_keys
from rlinf.tracking.tracker import check_wandb
from rlinf.types import ClassAndConfig

CONTINUED = (
    ("rollout.auto_reset", True, "envs that reset automatically", "rollout.continue_episodes=false"),
    ("rollout.offload_envs", False, "simulators that stay in memory", "rollout.continue_episodes=false"),
    ("cluster.placement", "colocated", "rollout workers that are not replaced", "rollout.continue_episodes=false"),
)
"""What ``rollout.continue_episodes`` requires, so that simulators preserve the episodes; see ``require_values``."""

BY_TRAINER, TRAINERS = "algorithm.old_logprobs=trainer", "the trainer's own log-probabilities, because"
SCORED_IN_ROLLOUTS = (
    (
        "cluster.max_staleness",
        0,
        "log-probabilities of the current weights, because rollouts have older ones",
        BY_TRAINER,
    ),
    ("algorithm.tis_cap", None, f"{TRAINERS} the weights trainer / rollout would otherwise always be 1", BY_TRAINER),
    ("algorithm.kl_coef", 0, f"{TRAINERS} the reference's are computed in the same way", BY_TRAINER),
)
"""What ``algorithm.old_logprobs=rollout`` requires."""

IN_THIS_PROCESS = tuple(
    (key, value, "local ranks that also roll out", "trainer.on_collapse=stop")
    for key, value in (
        ("rollout.backend", "torch"), ("cluster.placement", "colocated"), ("cluster.start", "auto"), ("cluster.num_env_workers", 0),
    )
)  # fmt: skip
"""What a rollback requires, because it rebuilds the run in this process: engines, workers and Ray's ranks would remain."""

COMMANDS = ("train", "sft", "evaluate", "serve", "collect", "demonstrate", "diagnose")
WITH_RANKS = ("train", "sft", "evaluate")
"""Commands that run on several ranks, and evaluate."""


class Case:
    """A configuration and the command that will use it."""

    def __init__(self, config: RunConfig, command: str) -> None:
        self.config, self.command = config, command
        self.trains = command in ("train", "sft")
        self.learns = command == "train" and config.trainer.max_steps > 0

    @property
    def has_policy(self) -> bool:
        """Whether the command loads a policy; otherwise the env's scripted expert or a human acts."""
        return self.command != "demonstrate" and (self.command != "collect" or not expert_acts(self.config))

    @cached_property
    def policy(self) -> ClassAndConfig | None:
        """The policy's class and model configuration, available after the folders are checked; None if it is not on this machine."""
        return declared_policy(self.config)


def validate(config: RunConfig, command: str = "train") -> None:
    """Check the parts of a configuration that ``command`` uses; raise ConfigError, MissingDependencyError or CheckpointError."""
    if command not in COMMANDS:
        raise ValueError(f"command is {command!r}; expected one of {', '.join(COMMANDS)}")
    case = Case(config, command)
    env_section(case)
    for check_section in SECTIONS if case.has_policy else ():
        check_section(case)


def env_section(case: Case) -> None:
    check_names(case.config)
    if case.config.rollout.num_chunks is None:  # the configuration was not created by `build_config`
        fix = f"rollout.num_chunks={chunks_needed(case.config)}"
        reject("rollout.num_chunks=null", "the number of policy calls per env and iteration", fix)
    if case.command in ("collect", "demonstrate"):
        check_collect(case.config, by_human=case.command == "demonstrate")


def model_section(case: Case) -> None:
    check_model(case.config)
    check_elsewhere(case.config, case.command)


def cluster_section(case: Case) -> None:
    check_devices(case.config, case.command)
    if case.command in WITH_RANKS and case.config.cluster.num_env_workers:
        check_env_nodes(case.config)


def sources_section(case: Case) -> None:
    config = case.config
    check_sources(config)
    if case.trains:
        check_unread_keys(config, case.command)
    if case.trains and (config.resume is not None or config.init_from is not None):
        check_start(config, case.command)
        check_no_actor(config)


def policy_section(case: Case) -> None:
    if case.policy is not None:
        if case.learns or case.command == "serve":
            check_history(case.policy[1])
        check_features(case.policy[0], case.config.model)
        check_inputs(case.config, case.policy)
    if case.config.model.cuda_graph:
        check_cuda_graph(case.config, case.policy)
    if case.command == "diagnose" and case.config.model.url is None:
        check_rollout(case.config, case.policy)


def evaluation_section(case: Case) -> None:
    if case.command in WITH_RANKS:
        check_evaluation(case.config, case.trains)


def trainer_section(case: Case) -> None:
    if case.trains:
        check_phases(case.config, case.command)
        check_collapse(case.config)
        check_sharding(case.config)
        check_profile(case.config)
        check_performance(case.config, case.policy)
        check_precision(case.config)


def rollout_workers_section(case: Case) -> None:
    cluster = case.config.cluster
    if cluster.start == "auto" and cluster.placement == "colocated" and cluster.num_rollout_workers is None:
        return
    if case.trains:
        check_placement(case.config)
    if case.command == "evaluate":
        check_evaluation_workers(case.config)


def learning_section(case: Case) -> None:
    if case.learns:
        check_env_groups(case.config)
        check_learning(case.config, case.policy)
        if not ALGORITHMS.get(case.config.algorithm.name).runs_episodes:
            check_whole_episodes(case.config)
    if case.trains and case.config.sft.max_steps > 0:
        check_sft(case.config, case.policy)
        if case.config.sft.dataset is None:
            check_demonstrator(case.config)


def output_section(case: Case) -> None:
    if case.trains and case.config.tracking.wandb:
        require_package("wandb", "tracking.wandb=true", "wandb", "tracking.wandb=false")
        check_wandb("tracking.wandb_project", case.config.tracking.wandb_project)
    if case.config.output_dir is not None and case.command in WITH_RANKS:
        check_writable(case.config.output_dir)
        if case.trains:
            check_new_folder(case.config)


SECTIONS = (
    model_section, cluster_section, sources_section, policy_section, evaluation_section, trainer_section, rollout_workers_section,
    learning_section, output_section,
)  # fmt: skip
"""Checks for a command with a policy; folders come first, because the policy is read from them."""


def check_names(config: RunConfig) -> None:
    """Check that env, algorithm, tasks and cameras exist."""
    for section in ("env", "algorithm"):
        chosen = getattr(config, section)
        expected = section_class(section, chosen.name)
        if not isinstance(chosen, expected):
            actual = f"{section}.name={chosen.name} with the settings of a {type(chosen).__name__}"
            reject(actual, f"a {expected.__name__}", f"{section}={chosen.name} instead of the name")
    ENVS.get(config.env.name).check_names(config.env)


def check_env_nodes(config: RunConfig) -> None:
    """Check that env workers are reachable, and that rollouts do not also run in processes."""
    actual = f"cluster.num_env_workers={config.cluster.num_env_workers}"
    no_processes = "none, because a rank's threads wait for remote simulators at no cost"
    require_values(config, actual, ("rollout.worker_processes", 0, no_processes))
    if isinstance(config.env, ProcessEnvConfig) and config.env.num_processes != 0:
        timeout, longest = (
            config.cluster.env_worker_timeout_s,
            max(config.env.step_timeout_s, config.env.reset_timeout_s),
        )
        if timeout <= longest:
            reject(
                f"cluster.env_worker_timeout_s={timeout:g} with a simulator that may take {longest:g} s (env.step_timeout_s, "
                "env.reset_timeout_s)",
                "a longer timeout, so that one slow simulator does not stop all envs of its worker",
                f"cluster.env_worker_timeout_s={2 * longest:g}",
            )
    import_ray(actual)
    check_address(actual)


def check_devices(config: RunConfig, command: str) -> None:
    """Check that there are devices for the command's ranks, and that a launcher has started the same number."""
    cluster, has_ranks = config.cluster, command in WITH_RANKS
    place = launch_context(os.environ)
    if place is not None and not is_connected():
        raise ConfigError(
            f"{place.launcher} has started {place.size} copies of this program, and each would do all of the work. Start the command "
            f"instead: torchrun ... -m rlinf {command} <overrides>, or start the program once"
        )
    if place is not None and cluster.num_processes != place.size:
        actual = f"cluster.num_processes={cluster.num_processes}, but {place.launcher} started {place.size} processes"
        reject(actual, "the same number", "cluster.num_processes=null to use all of them")
    num_processes = cluster.num_processes if has_ranks and place is None else 1
    # GPUs of a Ray cluster are not known here; its machines are checked once the cluster exists.
    if cluster.device == "cuda" and not (command in ("train", "sft") and ranks_by_ray(config)):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < num_processes:
            actual = (
                f"cluster.device=cuda for {num_processes} processes (cluster.num_processes), but torch sees {count}"
            )
            reject(actual, "a GPU for each", f"cluster.num_processes={count}" if count else "cluster.device=cpu")


def check_sharding(config: RunConfig) -> None:
    """Check the sharding settings; a policy can be sharded only if it declares its layers."""
    trainer, ranks = config.trainer, config.cluster.num_processes
    if trainer.shard_size is not None and ranks % trainer.shard_size:
        actual = f"trainer.shard_size={trainer.shard_size} with cluster.num_processes={ranks}"
        reject(actual, "a divisor of the number of ranks", "trainer.shard_size=null")
    if trainer.sharding == "replicate" and (trainer.cpu_offload or trainer.shard_size is not None):
        actual = f"trainer.cpu_offload={trainer.cpu_offload}, trainer.shard_size={trainer.shard_size}"
        reject(f"trainer.sharding=replicate with {actual}".lower(), "shards", "trainer.sharding=fsdp2")
    if trainer.sharding == "fsdp2" or trainer.cpu_offload:
        with fixed_by_settings("trainer"):
            check_can_shard(policy_on_meta_device(config))


def check_phases(config: RunConfig, command: str) -> None:
    """Check that there is at least one step of cloning or RL."""
    if config.sft.max_steps > 0:
        return
    if command == "sft" or config.trainer.max_steps == 0:
        fix = "sft.max_steps=700" if command == "sft" else "trainer.max_steps=100, or sft.max_steps=700"
        reject(f"sft.max_steps=0 for `rlinf {command}`, which leaves nothing to train", "at least one step", fix)
    if not ALGORITHMS.get(config.algorithm.name).runs_episodes:
        require_values(config, "sft.max_steps=0", ("sft.dataset", None, "cloning steps", "sft.max_steps=500"))


def check_collapse(config: RunConfig) -> None:
    """Check that a run with ``trainer.on_collapse`` is evaluated, and can roll back if configured to."""
    mode = f"trainer.on_collapse={config.trainer.on_collapse}"
    if config.trainer.on_collapse == "continue" or config.trainer.max_steps == 0:
        return
    if not config.trainer.eval_every:
        every = max(1, config.trainer.max_steps // 10)
        reject(f"{mode} with trainer.eval_every=0", "evaluations to detect it", f"trainer.eval_every={every}")
    if config.trainer.on_collapse == "stop":
        return
    if trains_actor(config):
        actual = f"{mode} with algorithm.name={config.algorithm.name}"
        reject(actual, "an algorithm that uses trainer.learning_rate", "trainer.on_collapse=stop")
    require_values(config, mode, *IN_THIS_PROCESS)


def check_learning(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check the requirements of the algorithm: of all policy-gradient ones, and its own (``AnyAlgorithm.check``)."""
    algorithm = ALGORITHMS.get(config.algorithm.name)
    check_merged(config, issubclass(algorithm, Algorithm))
    if issubclass(algorithm, Algorithm):
        check_batches(config)
        check_algorithm(config)
        check_rollout(config, policy)
        check_old_logprobs(config, algorithm, policy)
    algorithm.check(config, policy)


def check_batches(config: RunConfig) -> None:
    """Check that envs, samples, minibatches and micro-batches divide evenly."""
    rollout, ranks, minibatch = config.rollout, config.cluster.num_processes, config.trainer.minibatch_size
    if rollout.num_envs // ranks < (rollout.pipeline_stages or 1):
        actual = f"{rollout.num_envs // ranks} env per rank (rollout.num_envs={rollout.num_envs} over {ranks} ranks)"
        required = f"at least one for each of rollout.pipeline_stages={rollout.pipeline_stages}"
        reject(actual, required, "rollout.pipeline_stages=1")
    check_rollout_processes(config)
    if rollout.continue_episodes:
        require_values(config, "rollout.continue_episodes=true", *CONTINUED)
    check_staleness(config)
    samples = rollout.num_envs * rollout.num_chunks
    if minibatch % ranks:
        fix = f"trainer.minibatch_size={nearest_divisor(samples, minibatch, ranks)}"
        reject(f"trainer.minibatch_size={minibatch}", f"a multiple of cluster.num_processes={ranks}", fix)
    if samples % minibatch:
        reject(
            f"trainer.minibatch_size={minibatch} for {samples} samples per iteration (rollout.num_envs={rollout.num_envs} x "
            f"rollout.num_chunks={rollout.num_chunks})",
            f"one of {divisors_text(samples, minibatch, ranks)}",
            f"trainer.minibatch_size={nearest_divisor(samples, minibatch, ranks)}",
        )
    check_micro_batch(config, minibatch, "trainer.minibatch_size")
    check_rollout_memory(config)


def check_env_groups(config: RunConfig) -> None:
    """Check that every rank has the same number of complete env groups."""
    rollout, ranks = config.rollout, config.cluster.num_processes
    if rollout.num_envs % (ranks * rollout.group_size):
        unit = f"cluster.num_processes={ranks} x rollout.group_size={rollout.group_size}"
        fix = f"rollout.num_envs={nearest_multiple(rollout.num_envs, ranks * rollout.group_size)}"
        reject(f"rollout.num_envs={rollout.num_envs}", f"a multiple of {unit}, because a group stays on one rank", fix)


def check_rollout_processes(config: RunConfig) -> None:
    """Check the requirements of ``rollout.worker_processes``."""
    rollout, env, count = config.rollout, config.env, config.rollout.worker_processes
    if not count:
        return
    actual = f"rollout.worker_processes={count}"
    off = "rollout.worker_processes=0"
    require_values(
        config, actual, ("rollout.pipeline_stages", None, "one of them"), ("rollout.backend", "torch", "no engine", off)
    )
    if resolve_device(config.cluster.device, 1) != "cpu":
        reject(f"{actual} with a policy on a GPU", "a policy on the CPU", off)
    if ENVS.get(env.name).on_gpu or (isinstance(env, ProcessEnvConfig) and env.num_processes != 0):
        kind = "simulates on the GPU" if ENVS.get(env.name).on_gpu else "has its own processes (env.num_processes)"
        actual += f" with env.name={env.name}, which {kind}"
        reject(actual, "an env in the rollout process", off)
    num_groups = rollout.num_envs // (config.cluster.num_processes * rollout.group_size)
    if num_groups % count:
        what = "envs" if rollout.group_size == 1 else "groups"
        fix = f"rollout.worker_processes={nearest_divisor(num_groups, count, 1)}"
        reject(f"{actual} for {num_groups} {what} per rank", f"one of {divisors_text(num_groups, count, 1)}", fix)


def check_staleness(config: RunConfig) -> None:
    """Check that rollouts can run ahead of training, and that the loss corrects for outdated weights."""
    ahead = config.cluster.max_staleness
    if not ahead:
        return
    actual = f"cluster.max_staleness={ahead}"
    if config.cluster.placement == "colocated" and not config.rollout.worker_processes:
        reject(
            f"{actual} with rollouts in the training ranks",
            "processes or rollout workers that roll out while ranks train",
            "rollout.worker_processes=1, or cluster.placement=disaggregated cluster.start=ray, or cluster.max_staleness=0",
        )
    if config.algorithm.tis_cap is None:
        reject(
            f"{actual} with algorithm.tis_cap=null",
            "a cap: losses are weighted by min(trainer / rollout probability, cap), because rollouts use older weights",
            "algorithm.tis_cap=2.0",
        )


def check_rollout_memory(config: RunConfig) -> None:
    """Check that the observations of a rollout fit into the machine's memory."""
    rollout, env, ranks = config.rollout, config.env, config.cluster.num_processes
    observation = ENVS.get(env.name).observation_bytes(env)
    ranks_here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    # A rollout process has its own copy and transfers it in shared memory, where finished rollouts also wait.
    waiting = max(0, config.cluster.max_staleness - 1)
    copies = 3 + waiting if rollout.worker_processes else 1
    size = f"{observation} bytes"
    size += f" x {copies} copies (rollout.worker_processes={rollout.worker_processes})" if copies > 1 else ""
    per_env = copies * rollout.num_chunks * observation
    num_envs, available = rollout.num_envs * ranks_here // ranks, main_memory_bytes()
    if num_envs * per_env > available:
        step = ranks_here * rollout.group_size
        fitting = available // per_env // step * step * ranks // ranks_here
        reject(
            f"The observations of a rollout, {num_envs} envs on this machine x {rollout.num_chunks} calls of {size}, take "
            f"{num_envs * per_env / 1e9:.0f} GB",
            f"at most the {available / 1e9:.0f} GB of this machine",
            f"rollout.num_envs={fitting}" if fitting else "a smaller env.image_size",
        )


def check_micro_batch(config: RunConfig, batch: int, key: str) -> None:
    """Check that a rank's batch divides into micro-batches, or fits into one."""
    ranks, micro = config.cluster.num_processes, config.model.micro_batch_size
    rows = batch // ranks
    if rows > micro and rows % micro:
        reject(
            f"model.micro_batch_size={micro} for {rows} rows per rank ({key}={batch} over {ranks} ranks)",
            f"one of {divisors_text(rows, micro, 1)}",
            f"model.micro_batch_size={nearest_divisor(rows, micro, 1)}",
        )


def check_algorithm(config: RunConfig) -> None:
    """Check what the algorithm requires of model and rollout."""
    algorithm, rollout = config.algorithm, config.rollout
    algorithm_class, name = ALGORITHMS.get(algorithm.name), f"algorithm.name={algorithm.name}"
    if algorithm_class.needs_values:
        require_values(config, name, ("model.value_head", True, "a value head", "algorithm=grpo rollout=groups"))
    if algorithm.advantage_level == "action":
        per_action = ("algorithm.logprob_level", "action", "a probability ratio per action")
        require_values(config, "algorithm.advantage_level=action", per_action)
    if algorithm_class.needs_groups:
        per_episode = ("algorithm.advantage_level", "chunk", "one advantage per episode", "algorithm=ppo")
        require_values(config, name, per_episode)
        fixes = ["rollout.group_size=8"] if rollout.group_size < 2 else []
        fixes += ["rollout.auto_reset=false"] if rollout.auto_reset else []
        if fixes:
            actual = f"{name} with rollout.group_size={rollout.group_size}"
            actual += f" and rollout.auto_reset={override_text(rollout.auto_reset)}"
            required = "groups of episodes, one per env and iteration (the group rollout=groups sets both)"
            reject(actual, required, " ".join(fixes))
    elif algorithm_class.needs_full_episodes:
        complete = "complete episodes, one per env and iteration (the group rollout=episodes sets this)"
        require_values(config, name, ("rollout.auto_reset", False, complete))


def check_old_logprobs(config: RunConfig, algorithm_class: type[Algorithm], policy: ClassAndConfig | None) -> None:
    """Raise ConfigError for ``old_logprobs=rollout`` if the rollout's log-probs or values cannot replace the trainer's."""
    actual, backend = "algorithm.old_logprobs=rollout", config.rollout.backend
    if config.algorithm.old_logprobs == "trainer":
        return
    require_values(config, actual, *SCORED_IN_ROLLOUTS)
    is_equal = backend == "torch" and (policy is None or policy[0].values_in_rollouts(policy[1]))
    if algorithm_class.needs_values and not is_equal:
        who = f"rollout.backend={backend}" if backend != "torch" else f"{policy[0].__name__} as configured"
        required = "rollout values that equal the trainer's"
        fix = f"{BY_TRAINER}, or algorithm=grpo rollout=groups"
        reject(f"{actual} with algorithm.name={config.algorithm.name} and {who}", required, fix)


def check_whole_episodes(config: RunConfig) -> None:
    """Check that the first episode of each env ends within an iteration; otherwise only its success would be counted."""
    rollout, chunk_len = config.rollout, config.model.action_chunks_len
    longest = ENVS.get(config.env.name).longest_horizon(config.env)
    covered = rollout.num_chunks * chunk_len
    if covered < longest:
        reject(
            f"{covered} env steps per iteration (rollout.num_chunks={rollout.num_chunks} x model.action_chunks_len={chunk_len})",
            f"the longest episode's {longest} steps, because each iteration starts new episodes",
            f"rollout.num_chunks={chunks_needed(config)}",
        )


def check_sft(config: RunConfig, policy: ClassAndConfig | None) -> None:
    """Check policy, batch size and demonstrations of behaviour cloning, in the phase ``sft`` or by the algorithm."""
    policy_class = entry_for(config.model).resolve().model if policy is None else policy[0]
    steps, without, fraction = (
        f"sft.max_steps={config.sft.max_steps}",
        "sft.max_steps=0",
        config.sft.advantage_top_fraction,
    )
    if config.sft.max_steps == 0:
        steps, without = f"algorithm.name={config.algorithm.name}", "algorithm=ppo"
    labels, off = f"sft.advantage_top_fraction={fraction}", "sft.advantage_top_fraction=null"
    needed = [(steps, "sft_loss", without)] + [(labels, "_propose", off)] * (fraction is not None)
    for actual, method, fix in needed:
        if not policy_class.implements(method):
            reject(f"{actual}, but {policy_class.__name__} does not implement {method}", "a policy with it", fix)
    if fraction is not None and has_rollout_workers(config):
        features = "ranks with a rollout policy, which provides the value model's features"
        require_values(config, labels, ("cluster.placement", "colocated", features, off))
    if policy is not None:
        policy_class.check_sft(policy[1])
    check_moments(config, policy, steps, without)
    sft, ranks = config.sft, config.cluster.num_processes
    if sft.max_steps > 0 and sft.batch_size % ranks:
        fix = f"sft.batch_size={nearest_multiple(sft.batch_size, ranks)}"
        reject(f"sft.batch_size={sft.batch_size}", f"a multiple of cluster.num_processes={ranks}", fix)
    if sft.max_steps > 0:
        check_micro_batch(config, sft.batch_size, "sft.batch_size")
    crop_area = None if policy is None else getattr(policy[1], "crop_area", None)
    section = "init_config" if config.model.model_path is None else "override_config"
    if crop_area is not None and sft.augment.crop_area < 1.0 and sft.augment.crop_area != crop_area:
        reject(
            f"sft.augment.crop_area={sft.augment.crop_area:g} for a policy that crops images to {crop_area:g} of their area in evaluations",
            "the same area, or no crop",
            f"model.{section}.center_crop=true sft.augment.crop_area=0.9, or sft.augment.crop_area=1",
        )
    check_chosen_rows(sft, None if sft.dataset is None else check_dataset(config, policy))


def nearest_multiple(number: int, of: int) -> int:
    """Return the positive multiple of ``of`` closest to ``number``."""
    return max(1, round(number / of)) * of


def nearest_divisor(number: int, target: int, multiple_of: int) -> int:
    """Return the divisor of ``number`` that is a multiple of ``multiple_of`` and closest to ``target``."""
    return min(_divisors(number, multiple_of), key=lambda divisor: (abs(divisor - target), divisor))


def divisors_text(number: int, target: int, multiple_of: int) -> str:
    """List up to six divisors of ``number`` around ``target`` that are multiples of ``multiple_of``."""
    divisors = _divisors(number, multiple_of)
    start = min(max(0, bisect(divisors, target) - 3), max(0, len(divisors) - 6))
    return ", ".join(map(str, divisors[start : start + 6]))


def _divisors(number: int, multiple_of: int) -> list[int]:
    return [divisor for divisor in range(multiple_of, number + 1, multiple_of) if number % divisor == 0] or [number]


def check_profile(config: RunConfig) -> None:
    """Check that the profiled steps exist."""
    steps, trainer = config.trainer.profile_steps, config.trainer
    if steps is None:
        return
    section = "trainer" if trainer.max_steps > 0 else "sft"
    num_steps = getattr(config, section).max_steps
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1] < num_steps:
        last = num_steps - 1
        reject(
            f"trainer.profile_steps={override_text(steps)} with {section}.max_steps={num_steps}",
            f"[first, last] with 0 <= first <= last <= {last}",
            f"'trainer.profile_steps=[0,{min(2, last)}]', or trainer.profile_steps=null",
        )
