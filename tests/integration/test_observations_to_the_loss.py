"""What becomes of the observations of a rollout on their way to the loss."""

from pathlib import Path

from run_results import SMALL_RUN, run_config

from rlinf.algorithms.ppo import PPO
from rlinf.commands.train import build
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.embodiment.openvla.policy import OpenVLAForRLActionPrediction
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor

SMALL = [*SMALL_RUN, "trainer.max_steps=4", "algorithm.critic_warmup_steps=1"]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


def test_pictures_are_resized_once_and_nothing_else_changes(tmp_path, monkeypatch):
    small = ["model=openvla_tiny", "env.cameras=[front]", "env.image_size=72", "trainer.max_steps=1", "rollout.num_envs=4",
             "algorithm.update_epochs=2", "algorithm.critic_warmup_steps=0"]  # fmt: skip
    resize, num_rows = PrismaticImageProcessor._resize_for_towers, []

    def counting(self, images, *arguments):
        num_rows.append(len(images))
        return resize(self, images, *arguments)

    def iterate(name):
        run = build(config_of(tmp_path / name, *small))
        num_rows.clear()
        metrics = run.rl.iteration(0)
        run.close()
        return sum(num_rows), {key: x for key, x in metrics.items() if not key.startswith(("time/", "throughput/"))}

    monkeypatch.setattr(PrismaticImageProcessor, "_resize_for_towers", counting)
    once, metrics = iterate("once")
    monkeypatch.setattr(OpenVLAForRLActionPrediction, "resize_images", ActionModel.resize_images)
    each_time, same = iterate("each time")
    assert metrics == same
    rows = 4 * build_config(compose_config([*SMALL, *small])).rollout.num_chunks
    around = 1 + 4 * 2  # one row to learn the size of the arrays; the last observations, for the bootstrap values
    assert rows <= once <= rows + around
    assert 4 * rows <= each_time  # to act, to score, and in each epoch


def test_a_loss_gets_the_observations_of_its_rows(tmp_path, monkeypatch):
    loss, batches = PPO.loss, []

    def recorded(self, batch, evaluation, counts, iteration):
        batches.append((batch.observation.state, batch.episode_ids))
        return loss(self, batch, evaluation, counts, iteration)

    monkeypatch.setattr(PPO, "loss", recorded)
    run = build(config_of(tmp_path, "trainer.max_steps=1", "model.micro_batch_size=16"))
    collector, collected, collect = run.rl.collector, [], run.rl.collector.collect
    monkeypatch.setattr(collector, "collect", lambda *a, **k: collected.append(collect(*a, **k)) or collected[-1])
    run.execute()
    whole = {(tuple(row), number) for row, number in zip(
        collected[0].observation.state.tolist(), collected[0].episode_ids.flatten().tolist(), strict=True
    )}  # fmt: skip
    seen = [
        (tuple(row), number)
        for states, ids in batches
        for row, number in zip(states.tolist(), ids.tolist(), strict=True)
    ]
    assert len(seen) == 64 and set(seen) == whole
