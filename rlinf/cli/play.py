"""``rlinf play``: records one episode of a policy as a video."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.commands.hydra_app import configure, own_settings, require_policy, with_checkpoint
from rlinf.config.schema import RunConfig
from rlinf.envs import make_env
from rlinf.errors import ConfigError, reject
from rlinf.evaluation.video import write_video
from rlinf.options import PathText, option
from rlinf.seeding import seed_everything


@dataclass
class PlayConfig:
    """Episode and video of ``rlinf play``."""

    episode: int = option(0, "Index in the list of evaluation episodes.", minimum=0)
    output: PathText | None = option(None, "MP4 file to write; null: a file in outputs/<experiment_name>/play.")
    window: bool = option(True, "Open the MP4 in the desktop's video player if there is a display.")


def play(arguments: Sequence[str]) -> int:
    """Run one evaluation episode of a checkpoint, write it as an MP4, and open it in a window if there is a display.

    Keys and episodes are the same as for `rlinf evaluate`, e.g. evaluation.split=train, evaluation.greedy=false or
    evaluation.video_size=448. For a remote policy, set model=remote model.url=ws://... env=<name>.
    """
    arguments = with_checkpoint(arguments)
    args, settings = own_settings(arguments, PlayConfig)
    require_policy(arguments, "play", more=" episode=3")
    output = None if settings.output is None else Path(settings.output).expanduser()
    if output is not None and output.exists() and output.suffix != ".mp4":
        reject(f"output='{output}', which exists and is not an .mp4 file", "a new file or an .mp4", "output=play.mp4")
    config = configure(args, "evaluate")
    if config is not None:
        play_episode(config, settings)
    return 0


def play_episode(config: RunConfig, settings: PlayConfig) -> Path:
    """Run an episode of ``config.checkpoint`` or the configured model, write and open its video, and return the path of the MP4."""
    from rlinf.commands.open_evaluation import open_policy
    from rlinf.distributed.process_group import resolve_device, set_num_threads
    from rlinf.evaluation.evaluator import BatchedPolicy, replay_episodes, success_of
    from rlinf.models.precision import autocast, evaluation_mode

    set_num_threads(config.cluster.num_threads, 1)
    seed_everything(config.seed)
    evaluation = config.evaluation
    env = make_env(config.env, 1, auto_reset=False)
    try:
        specs = env.episode_specs(evaluation.split)
        if settings.episode >= len(specs):
            actual = f"episode={settings.episode}, and the split '{evaluation.split}' has {len(specs)} episodes, from 0"
            fix = f"raise env.num_{evaluation.split}_init_states"
            raise ConfigError(f"{actual}. Set episode={len(specs) - 1}, or {fix}")
        model, *_ = open_policy(replace(config, evaluation=replace(evaluation, probe=False)), env)
        model = model.to(resolve_device(config.cluster.device, 1))
        policy = BatchedPolicy(model, env.stream_names, evaluation.greedy, config.evaluation_temperature, config.seed)
        with evaluation_mode(model), autocast(model, config.model.precision):
            episodes = replay_episodes(policy, env, [specs[settings.episode]], evaluation.video_size)
            ((result, instruction, frames),) = episodes
    finally:
        env.close()
    success = success_of(result, env)
    outcome = {True: "success", False: "failure", None: "ended"}[success]
    name = f"{Path(config.checkpoint or config.model.model_type).name}_episode_{settings.episode:03d}_{outcome}.mp4"
    path = Path(settings.output or f"outputs/{config.experiment_name}/play/{name}").expanduser()
    write_video(path, frames, instruction, success)
    print(f"episode {settings.episode}: {result.task}, '{instruction}': {outcome} after {result.num_env_steps} env steps, "
          f"return {result.episode_return:.3g}")  # fmt: skip
    print(f"video: {path}", flush=True)
    if settings.window:
        show(path)
    return path


def show(path: Path) -> bool:
    """Open a file in the desktop's video player; return whether there is a display and a player."""
    has_display = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if not has_display or opener is None:
        return False
    subprocess.Popen([opener, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    return True
