"""Configuration that every environment shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rlinf.errors import ConfigError, closest, did_you_mean
from rlinf.memory import num_cores
from rlinf.options import PathText, option, override_text

SMALL_GPU = 40 * 10**9
"""Bytes of a GPU below which simulators that draw on it leave too little to the policy."""
FEW_SIMULATORS = 8
"""Simulator processes that may draw on such a GPU, over all worker threads of a rollout."""
SIMULATOR_BYTES = 250 * 10**6
"""Bytes of a GPU that a process with a graphics context takes: an assumption."""


@dataclass
class EnvConfig:
    """Settings that the base class of all environments implements. A simulator's subclass adds its own."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("front",)  # the default of `cameras`

    name: str = option("tabletop", "Registered environment.")
    tasks: list[str] | None = option(None, "Task names to draw from; null: all tasks of the suite.")
    max_episode_steps: int = option(16, "Env steps after which a running episode is truncated.", minimum=1)
    image_size: int = option(64, "Height and width of the camera images in pixels.", minimum=16)
    cameras: list[str] | None = option(
        None,
        "Cameras to render, in the order in which the policy gets them; null: the usual ones of the environment, as many as the "
        "model reads (a state policy reads none).",
    )
    reward_mode: str = option(
        "shaped",
        "sparse: success bonus only; shaped: dense reward of the simulator plus the bonus; relative: change of "
        "the dense reward since the previous step plus the bonus.",
        choices=("sparse", "shaped", "relative"),
    )
    success_bonus: float = option(1.0, "Reward added at the step of success.")
    terminate_on_success: bool = option(True, "End the episode at success.")
    success_classifier: PathText | None = option(
        None,
        "Folder of `rlinf classifier`, which decides on success by the image after each env step; null: the simulator does.",
    )
    success_label_noise: float | None = option(
        None,
        "Fraction of failing episodes that are called a success at a step drawn evenly; null: none.",
        minimum=0,
        maximum=1,
    )
    num_train_init_states: int = option(100_000, "Initial states per task in the training split.", minimum=1)
    num_eval_init_states: int = option(1_000, "Initial states per task in the evaluation split (disjoint).", minimum=1)

    def __post_init__(self) -> None:
        if self.cameras is None:
            self.cameras = list(self.usual_cameras)

    def default_cameras(self) -> list[str]:
        """Return the cameras that are rendered unless others are named."""
        return list(self.usual_cameras)


@dataclass
class ProcessEnvConfig(EnvConfig):
    """Settings of environments whose simulators run one environment each, in worker processes."""

    num_processes: int | None = option(
        None,
        "Simulator processes of each worker thread of a rollout, and of the evaluation; null: one per core, shared by threads and ranks, "
        "at most one per env, and 8 over all threads that draw on a GPU below 40 GB; 0: none, they run in the calling process, without "
        "deadlines and restarts.",
        minimum=0,
    )
    step_timeout_s: float = option(60, "Seconds that one env step or one image may take.", minimum=0.1)
    reset_timeout_s: float = option(300, "Seconds that making or resetting one simulator may take.", minimum=0.1)
    max_restarts: int = option(
        20, "Worker processes that may be replaced (after a crash or a missed deadline) before the run ends.", minimum=0
    )


ROWS_OF_GPU_STAGE = 32
"""Rows below which a policy call on a GPU takes as long with half of them: its time is the launch of its kernels."""


def default_num_worker_threads(config: EnvConfig, num_envs: int, policy_on_gpu: bool = False) -> int:
    """Return how many threads play ``num_envs`` envs best: two, or one if two cost more.

    They do where a step costs less than handing it over, and on a GPU where each would have fewer than ``ROWS_OF_GPU_STAGE`` rows.
    """
    if policy_on_gpu and num_envs < 2 * ROWS_OF_GPU_STAGE:
        return 1
    in_process = not isinstance(config, ProcessEnvConfig) or config.num_processes == 0
    return 1 if num_envs == 1 or (in_process and not config.cameras) else 2


def with_share_of_cores(config: EnvConfig, num_sharers: int, most: int | None = None) -> EnvConfig:
    """Return the settings of one of ``num_sharers`` envs that step at the same time: its fraction of processes, unless set.

    It has at most ``most`` of them, if given.
    """
    if not isinstance(config, ProcessEnvConfig) or config.num_processes is not None:
        return config
    share = max(1, num_cores() // num_sharers)
    return replace(config, num_processes=share if most is None else min(share, most))


def most_simulators(config: EnvConfig, gpu_bytes: int | None, num_threads: int) -> int | None:
    """Return how many processes each of ``num_threads`` envs of a rank may have on a GPU of ``gpu_bytes``; None: any number."""
    if gpu_bytes is None or gpu_bytes >= SMALL_GPU or not config.cameras:
        return None
    return max(1, FEW_SIMULATORS // num_threads)


def select_tasks(names: list[str], wanted: list[str] | None) -> list[str]:
    """Return the ``names`` that are ``wanted`` (None: all), in the suite's order. Reject unknown or repeated ones."""
    if wanted is None:
        return list(names)
    for name in wanted:
        if name not in names:
            mended = list(dict.fromkeys(closest(other, names) or names[0] for other in wanted))
            raise ConfigError(
                f"Unknown task '{name}' in env.tasks.{did_you_mean(name, names)} Set env.tasks={override_text(mended)}"
            )
    if not wanted:
        raise ConfigError(f"env.tasks is []; required: at least one task, or null for all. Set env.tasks=[{names[0]}]")
    once = list(dict.fromkeys(wanted))
    if len(once) < len(wanted):
        raise ConfigError(f"env.tasks={override_text(wanted)} names a task twice. Set env.tasks={override_text(once)}")
    return [name for name in names if name in wanted]


def check_cameras(cameras: Sequence[str], known: Sequence[str] | None = None) -> None:
    """Raise ConfigError if a name in ``env.cameras`` is not ``known`` (None: any name is) or is there twice."""
    for camera in cameras:
        if known is not None and camera not in known:
            mended = dict.fromkeys(closest(name, known) or known[0] for name in cameras)
            raise ConfigError(
                f"Unknown camera '{camera}' in env.cameras.{did_you_mean(camera, known)} "
                f"Set env.cameras={override_text(list(mended))}"
            )
    once = list(dict.fromkeys(cameras))
    if len(once) < len(cameras):
        raise ConfigError(
            f"env.cameras={override_text(list(cameras))} names a camera twice. Set env.cameras={override_text(once)}"
        )
