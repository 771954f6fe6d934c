"""A head that learns off-policy, with updates while the envs play (``algorithm.overlap``), next to the run that takes turns.

The envs sleep for as long as a heavy simulator would compute in another process, or a robot would move. Both runs are otherwise the same,
and take turns by iteration, so that a busy machine slows both; the median time of an iteration is compared. The first iteration, which
makes no updates, is left out. ``bound`` is the ratio that no order of the work can exceed: playing and updating, by the longer of the
two. One thread for torch in each run; a second core is needed.

    python benchmarks/offpolicy_overlap.py [--iterations 6] [--num-envs 8] [--num-chunks 16] [--sleep-ms 5] [--updates-per-env-step 0.5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rlinf.commands.train import build
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.offpolicy.head_trainer import HeadTrainer
from rlinf.preflight.validation import validate

PLUGIN = Path(__file__).parents[1] / "tests" / "fixtures" / "slow_tabletop.py"


def begun(folder: Path, options: argparse.Namespace, overlap: bool) -> HeadTrainer:
    """Return the trainer of a run, ready for its first iteration."""
    words = [
        f"plugins=[{PLUGIN}]", "model=mlp", "env=tabletop", "env.name=slow_tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.state=full",
        f"env.sleep_s={options.sleep_ms / 1000}", "env.reward_mode=sparse", f"env.max_episode_steps={options.num_chunks}", "algorithm=sac",
        f"algorithm.overlap={str(overlap).lower()}", f"algorithm.updates_per_env_step={options.updates_per_env_step}",
        f"algorithm.warmup_env_steps={options.num_envs * options.num_chunks}", f"rollout.num_envs={options.num_envs}",
        f"rollout.num_chunks={options.num_chunks}", f"trainer.max_steps={options.iterations + 1}", "evaluation.probe=false",
        "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1", "cluster.device=cpu", f"output_dir={folder}",
    ]  # fmt: skip
    config = build_config(compose_config(words))
    validate(config)
    trainer = build(config).rl
    trainer.make_parts(trainer.parts.worker.model)
    trainer.parts.worker.end_phase()
    return trainer


def main() -> None:
    """Measure both, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("iterations", 6), ("num-envs", 8), ("num-chunks", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sleep-ms", type=float, default=5.0, help="of each env's step; they step one after the other")
    parser.add_argument("--updates-per-env-step", type=float, default=0.5)
    options = parser.parse_args()
    sys.path.append(str(PLUGIN.parent))
    with tempfile.TemporaryDirectory() as place:
        runs = {name: begun(Path(place) / name, options, name == "ours") for name in ("ours", "peer")}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for step in range(options.iterations + 1):
            for name, trainer in runs.items():
                start = time.perf_counter()
                metrics = trainer.iteration(step)
                if step:  # the first one makes no updates
                    seconds[name].append(time.perf_counter() - start)
                if name == "peer":
                    parts = [metrics["time/rollout_s"], metrics["time/update_s"]]
        staleness = runs["ours"].iteration(options.iterations + 1)["rollout/staleness_updates"]
        for trainer in runs.values():
            trainer.close()
            trainer.parts.evaluator.env.close()
    found = {name: statistics.median(each) for name, each in seconds.items()}
    result = {
        "name": "offpolicy_overlap",
        **found,
        "unit": "s",
        "ratio": found["peer"] / found["ours"],
        "bound": sum(parts) / max(parts),
    }
    result |= {"rollout_s": parts[0], "update_s": parts[1], "staleness_updates": staleness, **vars(options)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
