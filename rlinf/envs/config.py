"""Configuration common to all environments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rlinf.errors import ConfigError, closest, did_you_mean
from rlinf.memory import num_cores
from rlinf.options import PathText, option, override_text

SMALL_GPU = 40 * 10**9
"""On GPUs with less memory (bytes), many rendering simulators leave too little for the policy."""
FEW_SIMULATORS = 8
"""Maximum number of simulator processes that may render on such a GPU, across all worker threads of a rollout."""
SIMULATOR_BYTES = 250 * 10**6
"""Assumed GPU memory of a process with a graphics context, in bytes."""


@dataclass
class EnvConfig:
    """Settings implemented by the base class of all environments. Each simulator's subclass adds its own."""

    usual_cameras: ClassVar[tuple[str, ...]] = ("front",)  # the default of `cameras`

    name: str = option("tabletop", "Name of the registered environment.")
    tasks: list[str] | None = option(None, "Task names; null: all tasks of the suite.")
    max_episode_steps: int = option(16, "Env steps after which an episode is truncated.", minimum=1)
    image_size: int = option(64, "Height and width of the camera images in pixels.", minimum=16)
    cameras: list[str] | None = option(None, "Cameras to render, in order; null: as many defaults as the model uses.")
    reward_mode: str = option(
        "shaped",
        "sparse: success bonus; shaped: plus dense reward; relative: plus its change.",
        choices=("sparse", "shaped", "relative"),
    )
    success_bonus: float = option(1.0, "Reward added at the first step of success.")
    terminate_on_success: bool = option(True, "End the episode at success.")
    success_classifier: PathText | None = option(None, "Folder of a success classifier; null: the simulator decides.")
    num_train_init_states: int = option(100_000, "Initial states per task in the training split.", minimum=1)
    num_eval_init_states: int = option(1_000, "Initial states per task in the evaluation split (disjoint).", minimum=1)

    def __post_init__(self) -> None:
        if self.cameras is None:
            self.cameras = list(self.usual_cameras)

    def default_cameras(self) -> list[str]:
        """Return the cameras rendered by default."""
        return list(self.usual_cameras)


@dataclass
class ProcessEnvConfig(EnvConfig):
    """Settings of environments whose simulators run in worker processes."""

    num_processes: int | None = option(
        None,
        "Simulator processes per rollout thread; null: by cores, fewer on a small GPU; 0: none, run in this process.",
        minimum=0,
    )
    step_timeout_s: float = option(60, "Time limit for one env step or image, in seconds.", minimum=0.1)
    reset_timeout_s: float = option(300, "Time limit for building or resetting a simulator, in seconds.", minimum=0.1)
    max_restarts: int = option(20, "Maximum number of worker processes replaced after a crash or timeout.", minimum=0)


ROWS_OF_GPU_STAGE = 32
"""Batch size below which halving it saves no time on a GPU, because kernel launches dominate."""


def default_num_worker_threads(config: EnvConfig, num_envs: int, policy_on_gpu: bool = False) -> int:
    """Return 2 rollout threads, or 1 if a step is cheaper than a thread switch or the GPU would process tiny batches."""
    if policy_on_gpu and num_envs < 2 * ROWS_OF_GPU_STAGE:
        return 1
    in_process = not isinstance(config, ProcessEnvConfig) or config.num_processes == 0
    return 1 if num_envs == 1 or (in_process and not config.cameras) else 2


def with_share_of_cores(config: EnvConfig, num_sharers: int, most: int | None = None) -> EnvConfig:
    """Unless ``num_processes`` is set, divide the cores among ``num_sharers`` parallel envs, with at most ``most`` processes each."""
    if not isinstance(config, ProcessEnvConfig) or config.num_processes is not None:
        return config
    count = max(1, num_cores() // num_sharers)
    return replace(config, num_processes=count if most is None else min(count, most))


def most_simulators(config: EnvConfig, gpu_bytes: int | None, num_threads: int) -> int | None:
    """Return how many processes each of a rank's ``num_threads`` envs may use on a GPU with ``gpu_bytes``; None: no limit."""
    if gpu_bytes is None or gpu_bytes >= SMALL_GPU or not config.cameras:
        return None
    return max(1, FEW_SIMULATORS // num_threads)


def check_listed(kind: str, names: Sequence[str], known: Sequence[str] | None) -> None:
    """Raise ConfigError if a name in ``env.<kind>s`` is repeated or not ``known`` (None: any name is valid)."""
    key, unique = f"env.{kind}s", list(dict.fromkeys(names))
    for name in names if known is not None else ():
        if name not in known:
            fixed = override_text(list(dict.fromkeys(closest(other, known) or known[0] for other in names)))
            raise ConfigError(f"Unknown {kind} '{name}' in {key}.{did_you_mean(name, known)} Set {key}={fixed}")
    if len(unique) < len(names):
        raise ConfigError(f"{key}={override_text(list(names))} repeats a {kind}. Set {key}={override_text(unique)}")
