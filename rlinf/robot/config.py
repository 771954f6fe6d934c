"""Settings of ``rlinf robot``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlinf.options import PathText, option


@dataclass
class RobotConfig:
    """How a policy acts in real time, and how far the simulated robot is from its simulator."""

    arm: PathText | None = option(
        None,
        "YAML file with lerobot's configuration of a robot (type, port, cameras), which acts in place of a row of the env; null: the env.",
    )
    fps: float | None = option(
        None, "Actions a second; null: as many as rows in the cloned dataset, else 20.", minimum=0.1, maximum=1000
    )
    execution: str = option(
        "overlap",
        "overlap: the next chunk is computed while this one is executed, and starts with the action whose time has come; wait: the robot "
        "holds until it is there.",
        choices=("overlap", "wait"),
    )
    displacements: list[int] | None = option(
        None,
        "Numbers of an action, from 0, that are displacements: a hold sends 0 and repeats the others, which are positions; null: all.",
    )
    max_relative_target: float | None = option(
        None,
        "Largest change of each number of an action from one to the next, in the env's units; null: any.",
        minimum=1e-6,
    )
    max_observation_age_s: float = option(
        0.15,
        "Age of the newest observation from which the robot holds; younger ones stand in for lost ones.",
        minimum=0.001,
    )
    max_failures: int = option(3, "Calls of the policy in a row that may fail before the command ends.", minimum=1)
    teleoperator: PathText = option(
        "none",
        "Who may take over: none; scripted: the env's expert, as a person who watches; else a YAML file with lerobot's configuration of a "
        "teleoperator (type, port).",
    )
    handover_max_step: float | None = option(
        None,
        "Largest change of each position from one action to the next after a person has taken over, until robot and teleoperator have "
        "met, in the env's units.",
        minimum=1e-6,
    )
    record: PathText | None = option(
        None, "Folder to which the episodes are added, a LeRobotDataset with the column `intervention`; null: none."
    )
    first_episode: int = option(0, "Episodes of the split that are left out before the first.", minimum=0)
    expert_threshold: float = option(
        0.5,
        "Distance from the expert's action, as the mean over the numbers in halves of their range, beyond which the scripted person "
        "sees an error.",
        minimum=0,
    )
    expert_patience: int = option(3, "Errors in a row after which the scripted person takes over.", minimum=1)
    expert_steps: int = option(8, "Actions after which the scripted person hands back.", minimum=1)
    success: str = option(
        "env",
        "Who tells success: env; person: asked on the terminal before and after each episode; page: asked on a web page.",
        choices=("env", "person", "page"),
    )
    page_host: str = option(
        "127.0.0.1", "Address on which the page is served; 0.0.0.0: other machines see it, too, if they know its path."
    )
    page_port: int = option(8020, "Port of the page; 0: any that is free.", minimum=0, maximum=65535)
    blind: PathText | None = option(
        None,
        "Checkpoint, or address of a server if model.url is one, of a second policy: both play each episode, in an order that is drawn, and "
        "nobody is told which one acts until all are played; then they are compared, with this one as the baseline.",
    )
    real_time: bool = option(
        True, "False: a clock that jumps from action to action, so that equal settings give equal episodes."
    )
    latency_s: float = option(0.0, "Seconds that are added to each call of the policy.", minimum=0)
    delay_steps: int = option(0, "Actions by which the observations of the simulated robot are behind.", minimum=0)
    drop_frames: float = option(0.0, "Fraction of observations that the simulated robot loses.", minimum=0, maximum=1)
    noise: float = option(
        0.0,
        "Deviation of the Gaussian noise on each number that the simulated robot executes, in halves of its range.",
        minimum=0,
    )

    @property
    def rate(self) -> float:
        """Actions a second."""
        return 20.0 if self.fps is None else self.fps

    def conditions(self) -> dict[str, Any]:
        """Return the settings that an evaluation keeps when it continues: all but the page's address."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("page_")}
