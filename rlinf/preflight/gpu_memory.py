"""Estimates the peak GPU memory of each phase, and finds settings that fit, before weights are read.

Weights and optimiser are estimated by ``rlinf.preflight.memory``, and passes by ``rlinf.preflight.activations``.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import nn

from rlinf.algorithms import ALGORITHMS
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import local_world_size, world_size
from rlinf.engines.gpu_fraction import colocated_fraction, engine_fraction
from rlinf.engines.weight_handle import BUCKET_BYTES
from rlinf.envs import ENVS
from rlinf.envs.config import (
    SIMULATOR_BYTES,
    ProcessEnvConfig,
    default_num_worker_threads,
    most_simulators,
    with_share_of_cores,
)
from rlinf.envs.graphics.backend import may_draw_on_gpu
from rlinf.errors import RLinfError, reject
from rlinf.models.building import get_model_config_and_processor
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.layers import find_layers
from rlinf.number_formats import format_bytes, format_count
from rlinf.preflight.activations import NOTHING, PassMemory, measure_passes
from rlinf.preflight.compatibility import env_spec
from rlinf.preflight.derived import trains_actor
from rlinf.preflight.memory import MemoryEstimate, estimate_memory, policy_on_meta_device
from rlinf.preflight.placement import Placement
from rlinf.rollout.config import VllmOptions
from rlinf.types import Observation

logger = logging.getLogger("rlinf")

GB = 10**9
CARDS = (24, 40, 80, 141)
"""GPU memory sizes in GB, for tables."""
LIBRARIES = 3 * GB // 2
"""Assumed memory of CUDA, its libraries' workspaces, and fragmentation, in bytes."""
FILLED = 0.95
"""Fraction of a GPU's memory that ``model.gradient_checkpointing=auto`` may fill."""
CARD_HEAD = ("GPU", "peak", "layers recomputed", "largest model.micro_batch_size", "with all layers recomputed")
ASSUMED = (
    f"assumed: {LIBRARIES / 1e9:g} GB for CUDA and gaps between tensors, {SIMULATOR_BYTES / 1e9:g} GB for each simulator process that renders on "
    "the GPU;\nnot counted: a simulation on the GPU itself (ManiSkill)"
)


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a rank on its GPU, in bytes."""

    state: int  # weights, optimiser and rollout copies, in all phases
    half_gradients: int  # 16-bit gradients of layers, which take the memory of activations freed in the backward pass
    gathered: int  # layers that a sharded model gathers
    simulators: int  # graphics contexts of simulator processes
    engine: int  # a vLLM engine on the policy's GPU
    engine_sleeps: bool  # the engine frees its memory outside of rollouts
    passes: PassMemory
    pipeline_stages: int  # worker threads whose policy calls may overlap
    acting_rows: int  # batch size of a policy call
    scoring_rows: int  # batch size of a scoring pass
    unknown: str = ""  # why the passes could not be measured; empty if they were

    @property
    def resident(self) -> int:
        """Bytes allocated in all phases."""
        return self.state + self.gathered + self.simulators + LIBRARIES + (0 if self.engine_sleeps else self.engine)

    @property
    def acting(self) -> int:
        """Peak bytes during a rollout."""
        awake = self.engine if self.engine_sleeps else 0
        return self.resident + awake + self.pipeline_stages * self.passes.acts.at(self.acting_rows)

    @property
    def scoring(self) -> int:
        """Peak bytes during scoring."""
        return self.resident + self.passes.scores.at(self.scoring_rows)

    def passing(self, micro_batch: int) -> int:
        """Return the peak bytes of the passes alone, without recomputation."""
        passes = self.passes
        acts = self.pipeline_stages * passes.acts.at(self.acting_rows)
        return max(acts, passes.scores.at(self.scoring_rows), passes.updates.at(micro_batch))

    def peak(self, micro_batch: int, recomputed: int) -> int:
        """Return the peak bytes over all phases."""
        return max(self.acting, self.scoring, self.updating(micro_batch, recomputed))

    def rows(self, micro_batch: int) -> list[tuple[str, str, str]]:
        """Return table rows ``(role, part, size)`` of passes and simulators."""
        if self.unknown:
            return [("passes", f"unknown: {self.unknown}", "-")]
        passes, layers = self.passes, len(self.passes.saved)
        calls = f"{format_count(self.pipeline_stages, 'call')} of {format_count(self.acting_rows, 'row')}"
        batch = f"activations of a micro-batch of {format_count(micro_batch, 'row')}"
        recomputed = passes.update(layers).at(micro_batch) if layers else 0
        parts = [
            ("rollout", calls, self.pipeline_stages * passes.acts.at(self.acting_rows)),
            ("scoring", format_count(self.scoring_rows, "row"), passes.scores.at(self.scoring_rows)),
            ("update", batch, passes.updates.at(micro_batch)),
            ("update", f"the same, all {layers} layers recomputed", recomputed),
            ("simulators", "graphics contexts", self.simulators),
        ]
        return [(role, part, format_bytes(size)) for role, part, size in parts if size]

    def updating(self, micro_batch: int, recomputed: int) -> int:
        """Return the peak bytes of an update that recomputes the first ``recomputed`` layers."""
        return self.resident + max(self.half_gradients, self.passes.update(recomputed).at(micro_batch))

    def layers_to_recompute(self, micro_batch: int, limit: float) -> int | None:
        """Return the minimum number of recomputed layers for an update to fit into ``limit`` bytes; None if it never fits."""
        counts = range(len(self.passes.saved) + 1)
        return next((n for n in counts if self.updating(micro_batch, n) <= limit), None)

    def largest_micro_batch(self, limit: float, recomputed: int | None = None) -> int:
        """Return the largest micro-batch that fits into ``limit`` bytes if all layers (None) or only the first ones are recomputed."""
        line = self.passes.update(len(self.passes.saved) if recomputed is None else recomputed)
        return max(0, math.floor((limit - self.resident - line.fixed) / line.row)) if line.row > 0 else 0


class Measured(NamedTuple):
    """A policy on the meta device (None if it cannot be built), its passes, and the reason if these are unknown."""

    model: ActionModel | None
    passes: PassMemory
    unknown: str


def measure(config: RunConfig) -> Measured:
    """Measure the memory of a policy's passes on the meta device."""
    plain, model = replace(config.model, gradient_checkpointing=False, compile=False, cuda_graph=False), None
    try:
        model = policy_on_meta_device(replace(config, model=plain))
        for statistics in (getattr(model.config, "norm_stats", None) or {}).values():
            width = env_spec(config).state_dim or 1
            statistics.setdefault("proprio", unit_range_stats(1, width)["unit_range"]["proprio"])
        model.processor = get_model_config_and_processor(config)[1]
        observe, precision = partial(_observation, config), config.model.precision
        return Measured(model, measure_passes(model, observe, precision, phases_of(config)), "")
    except Exception as error:  # plug-in code may raise any exception on the meta device
        if model is None and isinstance(error, RLinfError):
            raise  # a configuration error, which the real model would raise, too
        return Measured(model, NOTHING, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def phases_of(config: RunConfig) -> list[str]:
    """Return the phases of a run, as arguments for ``measure_passes``."""
    phases = ["sft"] if config.sft.max_steps > 0 else []
    if config.trainer.max_steps > 0:
        clones = ALGORITHMS.get(config.algorithm.name).runs_episodes
        phases.append("sft" if clones else "actor" if trains_actor(config) else "rl")
    return list(dict.fromkeys(phases))


def _observation(config: RunConfig, rows: int) -> Observation:
    """Return a batch of the env's observations, with the longest task name as instruction."""
    spec, env = env_spec(config), config.env
    names = ENVS.get(env.name).selected_tasks(env)
    images = {name: np.zeros((rows, spec.image_size, spec.image_size, 3), np.uint8) for name in env.cameras}
    state = np.zeros((rows, spec.state_dim), np.float32) if spec.state_dim else None
    return Observation(images, state, [max(names, key=len).replace("_", " ")] * rows)


def estimate_gpu(
    config: RunConfig, gpu_bytes: int, measured: Measured | None = None
) -> tuple[MemoryEstimate, GpuMemory]:
    """Estimate the memory of a rank on a (possibly hypothetical) GPU; ``measured`` is the result of ``measure``, called if None."""
    model, passes, unknown = measure(config) if measured is None else measured
    estimate = estimate_memory(config, gpu_bytes, model)
    workers = Placement.of(config).num_rollout_workers
    offloads = config.trainer.cpu_offload
    half = 0 if offloads or estimate.is_sharded else max(0, estimate.gradients - 4 * estimate.num_trainable)
    streams, rows = _calls(config)
    return estimate, GpuMemory(
        state=(0 if offloads else estimate.trainer - half) + (0 if workers else estimate.rollout_weights),
        half_gradients=half,
        gathered=gathered_bytes(model) if estimate.is_sharded else 0,
        simulators=SIMULATOR_BYTES * simulators_on_gpu(config, gpu_bytes),
        engine=0 if workers else _engine_beside(config, estimate, gpu_bytes),
        engine_sleeps=config.rollout.vllm.sleep,
        passes=passes,
        pipeline_stages=0 if workers else streams,
        acting_rows=rows,
        scoring_rows=config.model.val_micro_batch_size,
        unknown=unknown,
    )


def _engine_beside(config: RunConfig, estimate: MemoryEstimate, gpu_bytes: int) -> int:
    """Return the bytes of a vLLM engine on the policy's GPU; by default, the engine uses all memory that the policy leaves free."""
    options = config.rollout.vllm
    if not estimate.engine or options.kv_cache_memory_bytes is not None:
        return estimate.engine
    fraction = options.gpu_memory_utilization
    if fraction is None:
        fraction = colocated_fraction(gpu_bytes, _policy_bytes(config, estimate))
    return 2 * BUCKET_BYTES["cuda"] + int(fraction * gpu_bytes)


def _policy_bytes(config: RunConfig, estimate: MemoryEstimate) -> int:
    """Return the bytes of GPU memory that the policy takes between passes."""
    return (0 if config.trainer.cpu_offload else estimate.trainer) + estimate.rollout_weights


def _calls(config: RunConfig) -> tuple[int, int]:
    """Return a rank's number of worker threads, and the batch size of their policy calls."""
    if config.trainer.max_steps == 0:
        return 1, 1
    envs, on_gpu = config.rollout.num_envs // config.cluster.num_processes, config.rollout.backend == "torch"
    streams = config.rollout.pipeline_stages or default_num_worker_threads(config.env, envs, on_gpu)
    streams = 1 if ENVS.get(config.env.name).on_gpu else streams
    return streams, math.ceil(envs / streams)


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of two layers (FSDP2 prefetches the next one) and of all parameters outside the layers."""
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in find_layers(model)]
    return 2 * max(sizes, default=0) + sum(p.numel() * p.element_size() for p in model.parameters()) - sum(sizes)


def simulators_on_gpu(config: RunConfig, gpu_bytes: int) -> int:
    """Return how many of a rank's simulator processes render on its GPU, in rollouts and evaluations."""
    env, is_remote = config.env, config.cluster.num_env_workers > 0
    if not isinstance(env, ProcessEnvConfig) or not env.cameras or is_remote or not may_draw_on_gpu():
        return 0
    count, all_ranks = 0, config.cluster.num_processes
    ranks = local_world_size() if world_size() > 1 else all_ranks  # ranks that share the cores of a machine
    streams, rows = _calls(config)
    num_eval_envs = max(1, config.evaluation.num_envs // all_ranks)
    for threads, envs in ([(streams, rows)] if config.trainer.max_steps > 0 else []) + [(1, num_eval_envs)]:
        shared = with_share_of_cores(env, threads * ranks, most_simulators(env, gpu_bytes, threads))
        count += threads * min(envs, shared.num_processes or 1)
    return count


def _most_processes(config: RunConfig, gpu_bytes: int, free: int) -> int:
    """Return the maximum ``env.num_processes`` (at least 1) whose simulators use no more than ``free`` bytes."""
    for number in range(max(1, simulators_on_gpu(config, gpu_bytes)), 1, -1):
        fewer = replace(config, env=replace(config.env, num_processes=number))
        if SIMULATOR_BYTES * simulators_on_gpu(fewer, gpu_bytes) <= free:
            return number
    return 1


def card_rows(config: RunConfig, measured: Measured) -> list[tuple[str, ...]]:
    """Return one table row per GPU size, with a rank's peak memory and the micro-batches that fit (columns: ``CARD_HEAD``)."""
    micro, rows = config.model.micro_batch_size, []
    for size in CARDS:
        _, memory = estimate_gpu(config, size * GB, measured)
        num_layers, fewest = len(memory.passes.saved), memory.layers_to_recompute(micro, FILLED * size * GB)
        peak = memory.peak(micro, num_layers if fewest is None else fewest)
        fits = fewest is not None and peak <= size * GB
        layers = f"{fewest} of {num_layers}" if fits else "does not fit"
        has_updates = memory.passes.updates.row > 0
        largest = [memory.largest_micro_batch(size * GB, number) for number in (0, None)]
        texts = [f"{number:,}" if has_updates else "-" for number in largest]
        rows.append((f"{size} GB", f"{peak / GB:.1f} GB", layers, *texts))
    return rows


def fit_to_gpu(config: RunConfig, gpu_bytes: int, measured: Measured | None = None) -> bool | int:
    """Return the number of layers to recompute on a GPU (True: all); raise ConfigError if the run does not fit."""
    measured = measure(config) if measured is None else measured
    if measured.model is None:
        return config.model.gradient_checkpointing is not False
    estimate, memory = estimate_gpu(config, gpu_bytes, measured)
    num_layers, chosen = len(find_layers(measured.model)), config.model.gradient_checkpointing
    # The memory of simulators is only assumed: warn about it below, but do not reject a run because of it.
    certain = replace(memory, simulators=0)
    _check_state(config, estimate, certain, gpu_bytes)
    if memory.engine:
        engine_options(config, estimate, gpu_bytes)
    micro = config.model.micro_batch_size
    recomputed = 0 if chosen is False else num_layers
    if not memory.unknown:
        _check_passes(config, certain, gpu_bytes, recomputed)
        if chosen == "auto" and (fewest := memory.layers_to_recompute(micro, FILLED * gpu_bytes)) is not None:
            recomputed = fewest
    if memory.simulators and memory.peak(micro, recomputed) > gpu_bytes:
        free = gpu_bytes - certain.peak(micro, recomputed)
        logger.warning(
            "The simulators of a rank are assumed to use %.1f GB of its GPU (%.2f GB each); only %.1f GB are left. If memory runs out, "
            "set env.num_processes=%d, or MUJOCO_GL=osmesa to render on the CPU.",
            memory.simulators / GB, SIMULATOR_BYTES / GB, free / GB, _most_processes(config, gpu_bytes, free),
        )  # fmt: skip
    return recomputed


def _check_state(config: RunConfig, estimate: MemoryEstimate, memory: GpuMemory, gpu_bytes: int) -> None:
    needed = memory.resident + memory.half_gradients
    if needed <= gpu_bytes:
        return
    frozen = not estimate.num_trainable
    trains = f"Training {estimate.num_trainable / 1e9:.3g} of" if not frozen else "A frozen policy of"
    parts = "weights, gradients, optimiser, libraries" if not frozen else "weights, libraries"
    reject(
        f"{trains} {estimate.num_parameters / 1e9:.3g} billion weights takes {needed / GB:.1f} GB on each GPU before any pass ({parts})",
        f"at most the {gpu_bytes / GB:.1f} GB of the GPU",
        _less_state(config, memory, frozen),
    )


def _less_state(config: RunConfig, memory: GpuMemory, frozen: bool) -> str:
    """Return overrides that reduce the memory of a policy between its passes."""
    fixes = ["rollout.vllm.sleep=true"] if memory.engine and not memory.engine_sleeps else []
    fixes += ["rollout.merge_adapters=false"] if config.rollout.merge_adapters else []
    fixes += [] if config.model.is_lora or frozen else ["model.is_lora=true"]
    fixes += [] if config.trainer.cpu_offload or trains_actor(config) else ["trainer.cpu_offload=true"]
    if not (trains_actor(config) or config.trainer.cpu_offload or config.trainer.shard_size):
        fixes.append("cluster.num_processes to more ranks, which shard the weights")
    return ", or ".join(fixes) or "model to a smaller one"


def _check_passes(config: RunConfig, memory: GpuMemory, gpu_bytes: int, recomputed: int) -> None:
    micro, card = config.model.micro_batch_size, f"at most the {gpu_bytes / GB:.1f} GB of the GPU"
    needed = memory.updating(micro, recomputed)
    if needed > gpu_bytes:
        fits = memory.largest_micro_batch(gpu_bytes, recomputed)
        fix = f"model.micro_batch_size={_divisor_up_to(micro, fits)}"
        fix = fix if fits else _less_state(config, memory, frozen=False)
        if config.model.gradient_checkpointing is False and memory.passes.saved:
            fix += ", or model.gradient_checkpointing=auto"
        reject(f"model.micro_batch_size={micro} takes {needed / GB:.1f} GB in an update", card, fix)
    if memory.scoring > gpu_bytes:
        line = memory.passes.scores
        fits = max(1, math.floor((gpu_bytes - memory.resident - line.fixed) / max(line.row, 1.0)))
        actual = f"model.val_micro_batch_size={memory.scoring_rows} takes {memory.scoring / GB:.1f} GB in scoring"
        fix = f"model.val_micro_batch_size={fits}"
        reject(actual, card, fix if fits < memory.scoring_rows else _less_state(config, memory, frozen=False))
    if config.trainer.max_steps > 0 and memory.pipeline_stages and memory.acting > gpu_bytes:
        _check_engine(config, memory, gpu_bytes)
        line = memory.passes.acts
        free = gpu_bytes - memory.acting + memory.pipeline_stages * line.at(memory.acting_rows)
        rows = max(1, math.floor((free / memory.pipeline_stages - line.fixed) / max(line.row, 1.0)))
        envs = rows * memory.pipeline_stages * config.cluster.num_processes
        step = config.cluster.num_processes * config.rollout.group_size
        actual = (
            f"rollout.num_envs={config.rollout.num_envs} takes {memory.acting / GB:.1f} GB on each GPU in a rollout"
        )
        fits = max(1, envs // step) * step
        fix = f"rollout.num_envs={fits}"
        fix = fix if fits < config.rollout.num_envs else _less_state(config, memory, trains_actor(config))
        reject(actual, card, fix)


def _check_engine(config: RunConfig, memory: GpuMemory, gpu_bytes: int) -> None:
    """Reject an engine if a rollout would fit without it, and suggest the largest memory fraction that fits."""
    free = gpu_bytes - memory.acting + memory.engine - 2 * BUCKET_BYTES["cuda"]
    if memory.engine and config.rollout.vllm.kv_cache_memory_bytes is None and free >= gpu_bytes / 100:
        reject(
            f"A rollout takes {memory.acting / GB:.1f} GB on each GPU, {memory.engine / GB:.1f} GB of them for an engine",
            f"at most the {gpu_bytes / GB:.1f} GB of the GPU",
            f"rollout.vllm.gpu_memory_utilization={math.floor(100 * free / gpu_bytes) / 100:g}",
        )


def _divisor_up_to(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` up to ``most``, so that micro-batches still divide a minibatch."""
    return max(divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor <= max(1, most))


def engine_options(config: RunConfig, memory: MemoryEstimate, gpu_bytes: int) -> VllmOptions:
    """Return ``rollout.vllm`` with the GPU fraction of an engine on the policy's GPU; raise ConfigError if both do not fit."""
    options = config.rollout.vllm
    if options.kv_cache_memory_bytes is not None:
        return options
    fraction = engine_fraction(
        options.gpu_memory_utilization,
        gpu_bytes,
        _policy_bytes(config, memory),
        2 * memory.num_parameters,
        key="rollout.vllm.gpu_memory_utilization",
        apart="rollout.backend=torch, or cluster.placement=disaggregated cluster.start=ray",
    )
    return replace(options, gpu_memory_utilization=fraction)
