"""The Meta-World experiments on processes of their own, as short as it gets: cloning, RL, evaluation with a video."""

import importlib.util
import json

import numpy as np
import pytest

from rlinf.commands.collect import collect
from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.preflight.validation import validate

SHORT = [
    "env.tasks=[reach-v3,window-close-v3]", "env.max_episode_steps=2", "env.num_processes=1", "env.image_size=32",
    "rollout.num_envs=2", "rollout.num_chunks=2", "rollout.pipeline_stages=1", "sft.max_steps=1", "sft.num_demonstrations=2",
    "sft.batch_size=4", "trainer.max_steps=1", "trainer.minibatch_size=4", "trainer.eval_every=0", "evaluation.num_episodes=2",
    "evaluation.num_envs=2", "evaluation.num_videos_per_task=2", "evaluation.video_size=64", "cluster.num_threads=1",
]  # fmt: skip


@pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None, reason="metaworld is not installed (bash scripts/setup.sh --sims)"
)
@pytest.mark.parametrize("experiment", ["metaworld_quickstart", "metaworld_mt50"])
def test_a_metaworld_experiment_clones_trains_and_evaluates(experiment, tmp_path):
    is_mt50 = experiment == "metaworld_mt50"
    words = []
    if is_mt50:
        whole = [
            "env.max_episode_steps=100",
            "collect.num_episodes=2",
            "collect.num_envs=2",
            f"dataset={tmp_path}/data",
        ]
        collect(build_config(compose_config([f"experiment={experiment}", *SHORT, *whole])))
        words = ["algorithm.num_episodes=4", "algorithm.num_updates=2", f"sft.dataset={tmp_path}/data"]
    config = build_config(compose_config([f"experiment={experiment}", *SHORT, *words]))
    config.output_dir = str(tmp_path / "run")
    validate(config)
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/episodes" in line]
    assert len(evaluations) == 2 and all(line["eval/episodes"] == 2 for line in evaluations)
    for line in evaluations:
        assert {"eval/success_rate/reach-v3", "eval/success_rate/window-close-v3"} <= set(line)
    [rollout] = [line for line in lines if "rollout/success_rate" in line]
    if is_mt50:
        assert rollout["rollout/num_episodes"] == 4 and rollout["train/loss"] > 0
    else:  # PPO with 21 bins
        assert rollout["rollout/lost_episodes"] == 0 and 0 < rollout["train/entropy"] < np.log(21) + 0.05
    manifest = json.loads(next((tmp_path / "run").glob("checkpoints/*/manifest.json")).read_text())
    assert manifest["simulators"]["metaworld"] and manifest["simulators"]["mujoco"]
    assert len(list((tmp_path / "run").glob("**/*.mp4"))) >= 2
