"""All cross-checks of a configuration, before any process, model or simulator starts.

``validate`` is their list. Here are those of names, devices and batch sizes; in ``compatibility`` whether model, env, dataset
and command fit each other; in ``folders`` and ``saved`` what is on disk.
"""

from __future__ import annotations

import math
import os

from rlinf.config.schema import RunConfig, chunks_needed, section_class
from rlinf.config.text_inputs import check_no_text
from rlinf.distributed.devices import refuse_another_launcher
from rlinf.errors import ConfigError
from rlinf.options import closest, override_text
from rlinf.preflight.compatibility import (
    check_collect,
    check_dataset,
    check_demonstrator,
    check_evaluation,
    check_generator,
    check_inputs,
    check_logprobs,
    check_precision,
    require_package,
)
from rlinf.preflight.derived import DerivedNumbers, derive
from rlinf.preflight.folders import check_new_folder, check_sources, check_writable
from rlinf.preflight.saved import check_start

GATHERED_COPIES = 3
"""Of a rollout's observations, at the peak of a rank's memory: what came, what is joined, and what is put in order."""
ATTENTION = ("sdpa", "eager", "flash_attention_2")
COMMANDS = ("train", "sft", "evaluate", "collect", "diagnose")


def validate(config: RunConfig, command: str = "train") -> DerivedNumbers:
    """Check that the parts of a configuration fit each other and this machine.

    Args:
        config: Typed configuration.
        command: One of ``COMMANDS``; what a command does not use is not checked for it.

    Returns:
        The numbers that follow from the configuration.

    Raises:
        ConfigError: Values contradict each other, or name something that does not exist.
        MissingDependencyError: An option needs a package that is not installed.
        CheckpointError: A folder that is to be loaded is not a checkpoint.
    """
    if command not in COMMANDS:
        raise ValueError(f"command is {command!r}; required: one of {', '.join(COMMANDS)}")
    check_names(config)
    if config.rollout.num_chunks is None:
        config.rollout.num_chunks = chunks_needed(config)
    if command in ("train", "sft"):
        check_no_text(config, command)
    if command == "collect":
        check_collect(config)
        if config.checkpoint is None:  # The scripted expert acts.
            return derive(config)
    check_model(config)
    check_devices(config, config.cluster.num_processes if command in ("train", "sft") else 1)
    check_sources(config)
    if command in ("train", "sft"):
        check_start(config, command)
    check_inputs(config)
    if command == "diagnose":
        check_logprobs(config, without=None)
        check_generator(config)
    if command in ("collect", "diagnose"):
        return derive(config)
    check_evaluation(config)
    if command != "evaluate":
        check_no_comparison(config, command)
        check_phases(config, command)
        check_precision(config)
    if command == "train" and config.trainer.max_steps > 0:
        check_batches(config)
        check_algorithm(config)
        check_logprobs(config)
        check_generator(config)
    if command != "evaluate" and config.sft.max_steps > 0:
        check_sft(config)
        if config.sft.dataset is None:
            check_demonstrator(config)
        else:
            check_dataset(config)
    if command != "evaluate" and config.tracking.wandb:
        require_package("wandb", "tracking.wandb=true", "wandb", "tracking.wandb=false")
    if config.output_dir is not None:
        check_writable(config.output_dir)
        if command != "evaluate":
            check_new_folder(config)
    return derive(config)


def check_names(config: RunConfig) -> None:
    """Check that env, algorithm, tasks and cameras exist."""
    from rlinf.envs import ENVS

    for section in ("env", "algorithm"):
        chosen = getattr(config, section)
        expected = section_class(section, chosen.name)
        if not isinstance(chosen, expected):
            raise ConfigError(
                f"{section}.name is '{chosen.name}', whose settings are a {expected.__name__}, not a "
                f"{type(chosen).__name__}. Choose the group instead of the name: {section}={chosen.name}"
            )
    ENVS.get(config.env.name).check_names(config.env)


def check_model(config: RunConfig) -> None:
    """Model type, number format, attention kernel and adapters."""
    from rlinf.models import entry_for, torch_dtype_from_precision

    model = config.model
    if not entry_for(model).acts:
        raise ConfigError(
            f"model.model_type is '{model.model_type}', a language model, and env.name={config.env.name} shows images to a policy "
            "that acts; required: a policy, or a vision-language model to make one of. Set model=hf_vla "
            "model.model_path=<folder of an image-text-to-text model>"
        )
    torch_dtype_from_precision(model.precision)
    if model.attn_implementation not in ATTENTION:
        raise ConfigError(
            f"model.attn_implementation is '{model.attn_implementation}'; required: one of {', '.join(ATTENTION)}. "
            f"Set model.attn_implementation={closest(model.attn_implementation, ATTENTION) or ATTENTION[0]}"
        )
    if model.attn_implementation == "flash_attention_2":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "model.attn_implementation=flash_attention_2 needs an NVIDIA GPU, and torch sees none here. "
                "Set model.attn_implementation=sdpa"
            )
        require_package(
            "flash_attn", "model.attn_implementation=flash_attention_2", "flash-attn", "model.attn_implementation=sdpa"
        )
    if model.image_size is not None and (len(model.image_size) != 2 or min(model.image_size) < 1):
        raise ConfigError(
            f"model.image_size is {override_text(model.image_size)}; required: [height, width] in pixels. "
            "Set 'model.image_size=[224,224]'"
        )
    if model.lora_path is not None and not model.is_lora:
        raise ConfigError(
            f"model.lora_path={model.lora_path} is given, but model.is_lora=false. Set model.is_lora=true"
        )
    if model.is_lora and model.lora.dropout > 0 and config.trainer.max_steps > 0:
        raise ConfigError(
            f"model.lora.dropout={model.lora.dropout} would make the log-probs of rollout and training differ; RL needs 0. "
            "Set model.lora.dropout=0"
        )


def check_devices(config: RunConfig, num_processes: int) -> None:
    """Processes and devices must be there; ``num_processes`` is what the command starts."""
    refuse_another_launcher(os.environ)
    cluster = config.cluster
    if config.trainer.sharding == "none" and cluster.num_processes > 1:
        raise ConfigError(
            f"trainer.sharding=none works in one process, but cluster.num_processes={cluster.num_processes}. "
            "Set trainer.sharding=auto"
        )
    if cluster.device == "cuda":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < num_processes:
            example = f"cluster.num_processes={count}" if count else "cluster.device=cpu"
            raise ConfigError(
                f"cluster.device=cuda with {num_processes} processes (cluster.num_processes) needs a GPU for each, "
                f"but torch sees {count}. Set {example}"
            )


def check_phases(config: RunConfig, command: str) -> None:
    """There must be something to do."""
    cloning = config.sft.max_steps > 0
    if command == "sft" and not cloning:
        raise ConfigError("`rlinf sft` with sft.max_steps=0 has nothing to do. Set sft.max_steps=700")
    if command == "train" and not cloning and config.trainer.max_steps == 0:
        raise ConfigError(
            "trainer.max_steps=0 and sft.max_steps=0: there is nothing to train. Set trainer.max_steps=100"
        )
    if config.sft.dataset is not None and not cloning:
        raise ConfigError(
            f"sft.dataset is '{config.sft.dataset}', and sft.max_steps=0: nothing would be cloned. "
            "Set sft.max_steps=500, or sft.dataset=null"
        )


def check_batches(config: RunConfig) -> None:
    """Envs, samples, minibatches and micro-batches must divide."""
    rollout, trainer, ranks = config.rollout, config.trainer, config.cluster.num_processes
    for number, reason in ((ranks, "cluster.num_processes"), (rollout.group_size, "rollout.group_size")):
        if rollout.num_envs % number:
            raise ConfigError(
                f"rollout.num_envs={rollout.num_envs} does not divide by {reason}={number}. "
                f"Set rollout.num_envs={nearest_multiple(rollout.num_envs, number)}"
            )
    if rollout.num_envs // ranks < (rollout.num_lanes or 1):
        raise ConfigError(
            f"{rollout.num_envs // ranks} env per rank (rollout.num_envs={rollout.num_envs} over {ranks} ranks) cannot be split "
            f"into rollout.num_lanes={rollout.num_lanes}. Set rollout.num_lanes=1"
        )
    samples = rollout.num_envs * rollout.num_chunks
    if trainer.minibatch_size % ranks:
        raise ConfigError(
            f"trainer.minibatch_size={trainer.minibatch_size} does not divide over cluster.num_processes={ranks}. "
            f"Set trainer.minibatch_size={nearest_divisor(samples, trainer.minibatch_size, ranks)}"
        )
    if samples % trainer.minibatch_size:
        best = nearest_divisor(samples, trainer.minibatch_size, ranks)
        raise ConfigError(
            f"{samples} samples per iteration (rollout.num_envs={rollout.num_envs} x rollout.num_chunks={rollout.num_chunks}) do "
            f"not divide into minibatches of {trainer.minibatch_size}. "
            f"Use one of {divisors_text(samples, ranks)}, e.g. trainer.minibatch_size={best}"
        )
    check_micro_batch(config, trainer.minibatch_size, "trainer.minibatch_size")
    check_gathered(config)


def check_gathered(config: RunConfig) -> None:
    """The observations of all ranks, which each of them gathers, must fit into the machine's memory."""
    from rlinf.envs import ENVS
    from rlinf.memory import main_memory_bytes

    rollout, env, ranks = config.rollout, config.env, config.cluster.num_processes
    if ranks == 1:
        return
    row = ENVS.get(env.name).observation_bytes(env)
    of_an_env = GATHERED_COPIES * ranks * rollout.num_chunks * row
    available = main_memory_bytes()
    if rollout.num_envs * of_an_env > available:
        step = math.lcm(ranks, rollout.group_size)
        fitting = available // of_an_env // step * step
        raise ConfigError(
            f"Each of cluster.num_processes={ranks} ranks gathers the observations of all ranks, {rollout.num_envs} envs x "
            f"{rollout.num_chunks} calls of {row} bytes: {rollout.num_envs * of_an_env / 1e9:.0f} GB at their peak on this machine, which has "
            f"{available / 1e9:.0f} GB. Set {f'rollout.num_envs={fitting}' if fitting else 'a smaller env.image_size'}, or fewer processes"
        )


def check_micro_batch(config: RunConfig, batch: int, key: str) -> None:
    """Rows of a rank must divide into micro-batches, unless they all fit into one."""
    rows, micro = batch // config.cluster.num_processes, config.model.micro_batch_size
    if rows > micro and rows % micro:
        raise ConfigError(
            f"{rows} rows per rank ({key}={batch} over {config.cluster.num_processes} ranks) do not divide into micro-batches of "
            f"{micro}. Use one of {divisors_text(rows, 1)}, e.g. model.micro_batch_size={nearest_divisor(rows, micro, 1)}"
        )


def check_algorithm(config: RunConfig) -> None:
    """What the algorithm asks of model and rollout."""
    from rlinf.algorithms import ALGORITHMS
    from rlinf.envs import ENVS

    algorithm, rollout = config.algorithm, config.rollout
    algorithm_class = ALGORITHMS.get(algorithm.name)
    if getattr(algorithm_class, "needs_values", False) and not config.model.value_head:
        raise ConfigError(
            f"algorithm.name={algorithm.name} learns values, but model.value_head=false. "
            "Set model.value_head=true, or algorithm=grpo rollout=groups"
        )
    if algorithm.advantage_level == "action" and algorithm.logprob_level == "chunk":
        raise ConfigError(
            "algorithm.advantage_level=action gives each action of a chunk its own advantage, but "
            "algorithm.logprob_level=chunk has one ratio per chunk. Set algorithm.logprob_level=action"
        )
    if algorithm.advantage_level == "action" and algorithm_class.needs_groups:
        raise ConfigError(
            f"algorithm.name={algorithm.name} has one advantage per episode; algorithm.advantage_level=action needs one "
            "per policy call. Set algorithm.advantage_level=chunk, or algorithm=ppo"
        )
    longest = ENVS.get(config.env.name).longest_horizon(config.env)
    covered = rollout.num_chunks * config.model.action_chunks_len
    if algorithm_class.needs_groups:
        mending = ["rollout.group_size=8"] if rollout.group_size < 2 else []
        mending += ["rollout.auto_reset=false"] if rollout.auto_reset else []
        if mending:
            raise ConfigError(
                f"algorithm.name={algorithm.name} compares the episodes of a group, one per env and iteration, but "
                f"rollout.group_size={rollout.group_size} and rollout.auto_reset={override_text(rollout.auto_reset)} "
                f"(the group rollout=groups sets both). Set {' '.join(mending)}"
            )
    elif algorithm_class.needs_whole_episodes and rollout.auto_reset:
        raise ConfigError(
            f"algorithm.name={algorithm.name} takes the return of a whole episode, one per env and iteration, but "
            "rollout.auto_reset=true (the group rollout=episodes sets it). Set rollout.auto_reset=false"
        )
    if covered < longest:
        raise ConfigError(
            f"{covered} env steps per iteration (rollout.num_chunks={rollout.num_chunks} x model.action_chunks_len="
            f"{config.model.action_chunks_len}) do not reach the end of an episode of {longest} steps, and an iteration begins "
            f"with fresh episodes. Set rollout.num_chunks={chunks_needed(config)}"
        )


def check_sft(config: RunConfig) -> None:
    """Batch and demonstrator of behaviour cloning."""
    sft, ranks = config.sft, config.cluster.num_processes
    if sft.batch_size % ranks:
        raise ConfigError(
            f"sft.batch_size={sft.batch_size} does not divide over cluster.num_processes={ranks}. "
            f"Set sft.batch_size={nearest_multiple(sft.batch_size, ranks)}"
        )
    check_micro_batch(config, sft.batch_size, "sft.batch_size")


def check_no_comparison(config: RunConfig, command: str) -> None:
    """Only ``rlinf evaluate`` compares; a run's own evaluations can be compared when it has ended."""
    if config.evaluation.compare is not None:
        raise ConfigError(
            f"evaluation.compare={config.evaluation.compare} is for `rlinf evaluate`, not for `rlinf {command}`. Set "
            f"evaluation.compare=null, and later: rlinf evaluate --compare {config.evaluation.compare} <run folder>/eval/<tag>"
        )


def nearest_multiple(number: int, of: int) -> int:
    """Return the positive multiple of ``of`` closest to ``number``."""
    return max(1, round(number / of)) * of


def nearest_divisor(number: int, wanted: int, multiple_of: int) -> int:
    """Return the divisor of ``number`` that is a multiple of ``multiple_of`` and closest to ``wanted``."""
    return min(_divisors(number, multiple_of), key=lambda divisor: (abs(divisor - wanted), divisor))


def divisors_text(number: int, multiple_of: int) -> str:
    """List the divisors of ``number`` that are multiples of ``multiple_of``, the six largest if there are many."""
    return ", ".join(map(str, _divisors(number, multiple_of)[-6:]))


def _divisors(number: int, multiple_of: int) -> list[int]:
    found = [divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor % multiple_of == 0]
    return found or [number]
