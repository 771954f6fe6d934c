"""Launches a recipe: checks it against this machine, prints its plan, and starts the ranks."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from rlinf.cluster.reservation import check_machine, reserved_places
from rlinf.distributed.devices import hide_gpus, isolate_rank, visible_gpus
from rlinf.distributed.launch import launch as start_ranks
from rlinf.distributed.process_group import local_world_size, resolve_device, set_num_threads
from rlinf.distributed.start import is_connected, launch_context
from rlinf.errors import CheckpointError, ConfigError, RLinfError, UploadError
from rlinf.llm.hf_model import load_config
from rlinf.models.loading import hide_progress_bars
from rlinf.options import fixed_by_settings
from rlinf.recipes.build import split_rows
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import SECTION, check_place, local_folder, made_by
from rlinf.recipes.launch_worker import find_script, rows_of, train
from rlinf.recipes.load import recipe_names
from rlinf.recipes.plan import (
    Plan,
    asks_for_gpus,
    check_engines,
    choose_device,
    describe,
    make_plan,
    store_capacity,
)
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces, place_rollout_workers

SHARED_GPUS = "each rank that a launcher has started generates on its own GPU, between its updates (mode=colocated)"
ON_THE_CPU = "on the CPU, the trained model itself generates, as with rollout.backend=torch"


def launch(config: RecipeConfig, script: str | None, dry_run: bool, arguments: Sequence[str]) -> None:
    """Check a recipe, print its plan, and train it unless ``dry_run``; ``arguments`` are repeated in the command that resumes it."""
    script_path = find_script(script) if script else None
    place = launch_context(os.environ) if is_connected() else None
    if place is not None and config.cluster.workers_override:
        raise ConfigError(
            f"{config.cluster.workers_override} in a command that {place.launcher} has started {place.size} times; expected a single command, which starts "
            "all ranks on its own machine. Start it once"
        )
    if asks_for_gpus(config) and not dry_run:
        # Download the config now: the plan depends on whether the model reads images. Errors are reported when the model loads.
        with suppress(RLinfError):
            load_config(config.policy.model_name_or_path)
    plan = make_plan(config, None if place is None else place.size)
    # A launcher has already assigned one GPU to each rank, if there are GPUs.
    device = (
        resolve_device(config.policy.device, 1, "policy.device=cpu")
        if is_connected()
        else choose_device(config, plan, dry_run)
    )
    check_engines(config, plan, device)
    is_elsewhere = device == "cuda" and torch.cuda.device_count() == 0
    if plan.workers and not is_elsewhere:
        check_machine(partial(place_rollout_workers, config, plan, device), store_capacity(config))
    try:
        _check_sources(config, script_path)
    except (ConfigError, CheckpointError) as error:
        typed = tuple(argument.partition("=")[0] for argument in arguments if "=" in argument)
        if not dry_run or str(error).startswith(typed):
            raise
        # A dry run also shows the plan if the recipe's own data and model do not exist yet.
        print(f"warning: a run would be rejected: {error}", file=sys.stderr)
    print(describe(config, plan, *count_rows(config, script_path)), flush=True)
    where = "GPUs" if device == "cuda" else "CPU"
    machine = (
        f"a machine with {plan.num_gpus} GPUs (this one has none)" if is_elsewhere else f"this one, on its {where}"
    )
    print(f"{'machine:':<14}{machine}", flush=True)
    if script_path is not None:
        print(f"{'script:':<14}{script_path}", flush=True)
    if asks_for_gpus(config) and not plan.workers:
        print(f"note: {SHARED_GPUS if device == 'cuda' else ON_THE_CPU}", file=sys.stderr)
    if dry_run:
        return
    if device == "cpu" and not plan.workers:
        config.rollout.backend = "torch"
    _warn_about_wandb(config)
    deadlines = asdict(config.cluster.deadlines)
    with _places(config, plan, device) as places:
        work = (config, script_path, device, places)
        with _resume_hint(config, arguments):
            start_ranks(_execute_rank, work, plan.policy_gpus, device, config.train.fsdp_offload, deadlines)


@contextmanager
def _resume_hint(config: RecipeConfig, arguments: Sequence[str]) -> Iterator[None]:
    """Print the command that resumes a run after a signal or a failed upload."""
    rest = [argument for argument in arguments if not argument.startswith("train.resume=")]
    command = shlex.join(["rlinf", "launch", *rest, "train.resume=true"])
    saves = config.train.ckpt.enable_checkpoint
    try:
        yield
    except SystemExit:
        if saves:
            print(f"continue with: {command}", file=sys.stderr, flush=True)
        raise
    except UploadError as error:
        raise UploadError(f"{error}. To retry the upload: {command}" if saves else str(error)) from None


@contextmanager
def _places(config: RecipeConfig, plan: Plan, device: str) -> Iterator[RolloutWorkerPlaces | None]:
    """Reserve a place for each rollout worker; yield None without rollout workers."""
    if not plan.workers:
        yield None
        return
    placement_of = partial(place_rollout_workers, config, plan, device)
    with reserved_places(placement_of, config.cluster.deadlines.start, capacity=store_capacity(config)) as reservation:
        yield RolloutWorkerPlaces(placement_of(), reservation)


def count_rows(config: RecipeConfig, script: Path | None) -> tuple[int | None, str]:
    """Return the number of training rows, or None and why it is unknown; raise ConfigError for unreadable data."""
    dataset = config.train.train_policy.dataset
    if script is not None:
        return None, f"{script.name} may read different rows"
    if dataset.streaming:
        return None, f"'{dataset.name}' is a stream"
    if local_folder(dataset.name) is None:
        make = made_by(dataset.name)
        return None, f"'{dataset.name}' is not on this machine{f' ({make} makes it)' if make else ''}"
    rows = rows_of(dataset)
    if config.validation.enable and not config.validation.dataset.name:
        rows = split_rows(config, rows)[1]
    return len(rows), ""


def _check_sources(config: RecipeConfig, script: Path | None) -> None:
    """Raise an error if rewards, data or model are missing, unless they may be on the hub."""
    method, validation = config.train.train_policy, config.validation
    if script is None:
        if config.is_grpo:
            make_rewards(method.reward_function)
        if validation.reward_function:
            make_rewards(validation.reward_function, setting="validation.reward_function")
        check_place(method.dataset.name, SECTION)
        if validation.enable and validation.dataset.name:
            check_place(validation.dataset.name, "validation.dataset")
    model = config.policy.model_name_or_path
    if Path(model).exists():
        with fixed_by_settings("policy", path="model_name_or_path", trust_remote_code=None):
            load_config(model)
    elif model.startswith(("/", ".")) or model.count("/") > 1 or made_by(model):  # the ranks check hub ids
        recipe = next((name for name in recipe_names() if name in Path(model).parts), None)
        make = f"rlinf launch --config {recipe}" if recipe else made_by(model)
        fix = f"Make it with {make}, or set" if make else "Set"
        raise ConfigError(
            f"policy.model_name_or_path={model} does not exist. {fix} policy.model_name_or_path=<folder or hub id>"
        )


def _warn_about_wandb(config: RecipeConfig) -> None:
    """Remove the wandb logger if its package is missing, and warn if it writes offline."""
    loggers = [name.lower() for name in config.logging.logger]
    if "wandb" in loggers and importlib.util.find_spec("wandb") is None:
        hint = "pip install wandb"
        print(f"warning: wandb is not installed, so metrics stay on this machine ({hint})", file=sys.stderr)
        loggers.remove("wandb")
    elif "wandb" in loggers and not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "disabled"):
        print("warning: WANDB_API_KEY is not set, so wandb writes offline, into the folder of the run", file=sys.stderr)
    config.logging.logger = loggers


def _execute_rank(work: tuple[RecipeConfig, Path | None, str, RolloutWorkerPlaces | None]) -> None:
    config, script, device, places = work
    if device == "cpu":
        hide_gpus()
    else:
        # Without this, a single rank would also see the rollout workers' GPUs.
        isolate_rank(visible_gpus(os.environ, torch.cuda.device_count()), 0)
    hide_progress_bars()
    set_num_threads(config.cluster.num_threads, local_world_size())
    train(config, script, places)
