"""Settings of ``rlinf robot``."""

from dataclasses import asdict, dataclass
from typing import Any

from rlinf.options import PathText, option

HOST_ABOUT = "Address on which the page is served; 0.0.0.0: reachable from other machines."
PORT_ABOUT = "Port of the page; 0: any free port."


@dataclass
class DemonstrationConfig:
    """Demonstrations by an operator (`rlinf collect teleoperator=browser`)."""

    teleoperator: str = option("browser", "browser: an operator on a web page.", choices=("browser",))
    page_host: str = option("127.0.0.1", HOST_ABOUT)
    page_port: int = option(8020, PORT_ABOUT, minimum=0, maximum=65535)


@dataclass
class RobotConfig:
    """Real-time execution of a policy, and how the simulated robot differs from its simulator."""

    arm: PathText | None = option(
        None, "YAML file with lerobot's robot configuration (type, port, cameras); null: the env."
    )
    fps: float | None = option(
        None, "Actions per second; null: the cloned dataset's rate, or 20 without one.", minimum=0.1, maximum=1000
    )
    execution: str = option(
        "async",
        "async: compute the next chunk while executing this one; sync: hold until it is ready.",
        choices=("async", "sync"),
    )
    relative_dims: list[int] | None = option(
        None, "Action dimensions (from 0) that are displacements, not positions; null: all."
    )
    max_relative_target: float | None = option(
        None, "Maximum change of each action dimension per step, in env units; null: unlimited.", minimum=1e-6
    )
    max_observation_age_s: float = option(
        0.15, "Maximum age of the newest observation, in seconds, before the robot holds.", minimum=0.001
    )
    max_failures: int = option(3, "Consecutive failed policy calls after which the command ends.", minimum=1)
    teleoperator: PathText = option(
        "none",
        "none; scripted: the env's expert intervenes; browser: an operator on a web page; or YAML file with lerobot's "
        "teleoperator (type, port).",
    )
    handover_max_step: float | None = option(
        None, "Maximum position change per step until robot and teleoperator meet, in env units.", minimum=1e-6
    )
    record: PathText | None = option(None, "LeRobotDataset folder to add the episodes to; null: none.")
    expert_threshold: float = option(
        0.5,
        "Mean distance from the expert's action, in half ranges, above which the policy's action is an error.",
        minimum=0,
    )
    expert_patience: int = option(3, "Consecutive errors after which the scripted operator takes over.", minimum=1)
    expert_steps: int = option(8, "Number of actions after which the scripted operator hands back.", minimum=1)
    success: str = option(
        "env",
        "Source of the success label: env; human: on the terminal; page: on a web page.",
        choices=("env", "human", "page"),
    )
    page_host: str = option("127.0.0.1", HOST_ABOUT)
    page_port: int = option(8020, PORT_ABOUT, minimum=0, maximum=65535)
    blind: PathText | None = option(
        None, "Checkpoint (or server address if model.url is set) of the baseline policy in a blind comparison."
    )
    real_time: bool = option(True, "false: use a simulated clock, which makes episodes reproducible.")
    latency_s: float = option(0.0, "Seconds added to each policy call.", minimum=0)
    delay_steps: int = option(0, "Observation delay of the simulated robot, in steps.", minimum=0)
    drop_frames: float = option(0.0, "Fraction of observations that the simulated robot loses.", minimum=0, maximum=1)
    noise: float = option(
        0.0, "Std of the Gaussian noise on each executed action dimension, in half ranges.", minimum=0
    )

    @property
    def rate(self) -> float:
        """Actions per second."""
        return 20.0 if self.fps is None else self.fps

    def is_relative(self, action_dim: int) -> list[bool]:
        """Return for every action dimension whether it is a displacement."""
        return [self.relative_dims is None or dim in self.relative_dims for dim in range(action_dim)]

    def conditions(self) -> dict[str, Any]:
        """Return the settings that must not change when an evaluation is resumed: all except the page's address."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("page_")}
