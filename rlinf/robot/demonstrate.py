"""Demonstrations by an operator at a browser."""

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np

from rlinf.commands.collect import Demonstrate, collect
from rlinf.config.schema import RunConfig
from rlinf.envs.base import VectorEnv
from rlinf.errors import reject
from rlinf.robot.browser import DISCARD, DONE, HOLD_S, TeleoperationPage, displacement
from rlinf.robot.config import DemonstrationConfig
from rlinf.robot.page import listening
from rlinf.robot.robot import EpisodeVoidError
from rlinf.rollout.demonstrations import EpisodeBatch, run_episodes
from rlinf.training.recording import rate_of
from rlinf.types import EpisodeResult, EpisodeSpec, Observation

logger = logging.getLogger("rlinf")

POLL_S = 0.005
"""Time between two looks at the page while nothing moves."""


class Operator:
    """Acts in one env (an ``ActionSource``) as the operator of its page does; time stands still unless the switch is held."""

    def __init__(self, env: VectorEnv, rate: float, num_episodes: int, settings: DemonstrationConfig) -> None:
        self.env, self.period, self.num_episodes, self.number = env, 1 / rate, num_episodes, 0
        self.image: np.ndarray | None = None
        self.outcome = ""
        names = [f"action_{index}" for index in range(env.action_dim)]
        address = settings.page_host, settings.page_port
        self.page = TeleoperationPage(names, lambda: self.image, HOLD_S, *address, ends=True)
        self._problem = ""

    def restart(self, row: int) -> None:
        """Start an episode: wait until the switch is released, so that a hand that still holds it does not act."""
        self.num_steps, self._is_released, self._due = 0, False, 0.0
        self.page.take_end()

    def act(self, observation: Observation, running: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        self.image = next(iter(observation.images.values()))[0]
        while True:
            end = self.page.take_end()
            if end == DISCARD:
                raise EpisodeVoidError("the operator repeats it")
            if end == DONE and self.num_steps:
                return None
            is_held, axes = self._read()
            self._is_released |= not is_held
            status = f"{self.num_steps} steps" if self._is_released else f"{self.outcome}release the switch to start"
            self.page.text = f"episode {self.number} of {self.num_episodes}: {observation.instruction[0]}\n{status}"
            if is_held and self._is_released and (now := time.monotonic()) >= self._due:
                break
            time.sleep(POLL_S)
        # A step that was late, or came after a pause, does not make the following ones faster.
        self._due, self.num_steps = max(self._due, now - self.period) + self.period, self.num_steps + 1
        action = displacement(axes, self.env.action_low, self.env.action_high)[None].astype(np.float32)
        return action, action

    def _read(self) -> tuple[bool, np.ndarray]:
        """Return the page's command; while nothing may move, the switch counts as released."""
        try:
            command, problem = self.page.read(), ""
        except OSError as error:
            command, problem = (False, np.zeros(self.env.action_dim)), str(error)
        if problem not in ("", self._problem):
            logger.warning("Paused: %s", problem)
        self._problem = problem
        return command

    def episode(self, env: VectorEnv, spec: EpisodeSpec) -> EpisodeBatch:
        """Run an episode until it is not discarded; the operator may label it a success, which ends it."""
        self.number += 1
        while True:
            self.restart(0)
            try:
                batch = run_episodes(env, [spec], self)
            except EpisodeVoidError:
                continue
            if batch.results[0] is None:
                batch.success[-1] = True
                total = float(batch.rewards[batch.alive].sum())
                task = env.task_names[spec.task_id]
                batch.results[0] = EpisodeResult(spec, task, True, total, self.num_steps, success_reported=True)
            self.outcome = f"the last one was a {'success' if batch.results[0].success else 'failure'}; "
            return batch


def demonstrate(config: RunConfig, settings: DemonstrationConfig) -> Path:
    """Record ``collect.num_episodes`` episodes of an operator by ``rlinf.commands.collect.collect``; raise as it does."""
    if not config.env.cameras:
        reject(
            "env.cameras=[] with teleoperator=browser",
            "a camera, because the operator sees only its images",
            "env.cameras=null",
        )
    # Fail now if the port is occupied, not after building the env.
    listening(settings.page_host, settings.page_port, BaseHTTPRequestHandler).server_close()
    config = replace(config, collect=replace(config.collect, num_envs=1))
    with ExitStack() as stack:

        def start(env: VectorEnv) -> Demonstrate:
            operator = Operator(env, rate_of(config, env), config.collect.num_episodes, settings)
            stack.callback(operator.page.close)
            print(f"teleoperation: {operator.page.url}", flush=True)
            return operator.episode

        return collect(config, start)
