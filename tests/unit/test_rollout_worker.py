"""A rollout worker in this process collects what the ranks that train would collect, and only with complete weights."""

from dataclasses import replace

import pytest
import torch
from run_results import run_config

from rlinf.cluster.ray_actor import Arrays
from rlinf.cluster.rollout_worker import RolloutWorker
from rlinf.cluster.rollout_workers import RemoteEpisodes
from rlinf.cluster.weights import stored_buckets
from rlinf.commands.train import build
from rlinf.engines.weight_handle import WeightsRejectedError
from rlinf.engines.weight_transfer import PushHeader, manifest_of
from rlinf.errors import ConfigError, RLinfError
from rlinf.evaluation.evaluator import episode_list, evaluate_policy
from rlinf.models.precision import evaluation_mode
from rlinf.preflight.placement import Placement
from rlinf.rollout.policy_skeleton import PolicySkeleton
from rlinf.types import RolloutBatch

SMALL = [
    "experiment=quickstart", "rollout.num_envs=8", "rollout.num_chunks=3", "trainer.minibatch_size=12", "model.micro_batch_size=12",
    "sft.max_steps=0", "env.max_episode_steps=3", "evaluation.num_episodes=5", "evaluation.num_envs=4", "evaluation.probe=false",
    "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose rank collects with two worker threads."""
    run = build(run_config(tmp_path_factory.mktemp("run"), *SMALL))
    run.rl.sync.push(0)
    yield run
    run.close()


@pytest.fixture(scope="module")
def workers(run):
    """Two rollout workers with the weights of the run, version 7."""
    config = run.parts.config
    split = replace(config, cluster=replace(config.cluster, placement="disaggregated", num_rollout_workers=2))
    placement, shell = Placement.of(split), PolicySkeleton.of(run.parts.sync.rollout_model)
    made = [RolloutWorker(split, shell, placement, number, 2) for number in range(2)]
    for worker in made:
        push(worker, run.parts.sync.rollout_model, 7)
    yield made
    for worker in made:
        worker.close()


def push(worker, model, version, base=None, end=True):
    manifest = manifest_of(model)
    worker.start_push(PushHeader(version, manifest if base is None else None, base))
    for bucket in stored_buckets(model.state_dict().items(), version):
        worker.load(bucket)
    return worker.commit() if end else None


def check_equal(batch, other):
    assert batch.tensors().keys() == other.tensors().keys()
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    for name, image in batch.observation.images.items():
        assert (image == other.observation.images[name]).all()
    assert batch.observation.instruction == other.observation.instruction
    assert (batch.specs, batch.episodes) == (other.specs, other.episodes)


def test_two_rollout_workers_collect_bit_for_bit_what_two_threads_of_a_rank_collect(run, workers):
    model = run.parts.sync.rollout_model
    for step, attempt in ((0, 0), (3, 2)):
        expected = run.rl.collector.collect(model.eval(), step, 7, True, attempt)
        parts = [workers[k].collect(step, True, attempt, range(4 * k, 4 * k + 4)) for k in (1, 0)]  # in any order
        check_equal(RolloutBatch.concatenate([Arrays.of(part).batch() for part in reversed(parts)]), expected)
    with pytest.raises(AssertionError):  # control
        check_equal(RolloutBatch.concatenate(parts), expected)


def test_any_rollout_worker_can_collect_any_blocks(run, workers):
    env_groups = [1, 2, 4, 7]
    check_equal(workers[0].collect(1, True, 0, env_groups), workers[1].collect(1, True, 0, env_groups))


def test_rollout_workers_evaluate_as_the_run_does(run, workers):
    env, model = run.parts.evaluator.env, run.parts.sync.rollout_model
    specs = episode_list(env, "eval", 5)
    expected = evaluate_policy(model, env, specs).results
    first, second = (workers[k].evaluate(specs[k::2]) for k in range(2))
    assert [result for pair in zip(first[0], [*second[0], None], strict=True) for result in pair if result] == expected
    assert first[1] == 0


def test_a_rollout_worker_acts_only_with_complete_weights(run, workers):
    worker, model = workers[0], run.parts.sync.rollout_model
    with pytest.raises(
        WeightsRejectedError, match="replaces some tensors of version 3, but the receiver has version 7"
    ):
        push(worker, model, 8, base=3)
    assert worker.version == 7, "the old weights stay"
    worker.start_push(PushHeader(8, manifest_of(model)))
    buckets = list(stored_buckets(model.state_dict().items(), 8))
    damaged = buckets[0].data.copy()
    damaged[100_000] ^= 1
    for act in (lambda: worker.collect(0, True, 0, [0]), lambda: worker.evaluate([])):
        with pytest.raises(RLinfError, match="no complete weights"):
            act()
    with pytest.raises(WeightsRejectedError, match="damaged in transfer"):
        worker.load(replace(buckets[0], data=damaged))
    with pytest.raises(WeightsRejectedError):
        worker.commit()
    assert push(worker, model, 7) == 7
    worker.collect(0, True, 0, [0, 1, 2, 3])


def test_a_shell_has_no_weights_and_keeps_what_a_push_does_not_bring(run):
    model = run.parts.sync.rollout_model
    shell = PolicySkeleton.of(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert len(shell.data) < 0.2 * size
    built = shell.build("cpu")
    kept = dict(model.named_buffers()).keys() - model.state_dict().keys()
    assert kept, "control"
    for name in kept:
        assert torch.equal(built.get_buffer(name), model.get_buffer(name))
    assert {n: p.requires_grad for n, p in built.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    model.hook = lambda: None
    try:
        with pytest.raises(ConfigError, match=r"cannot be sent to rollout workers.*Set cluster.placement=colocated"):
            PolicySkeleton.of(model)
    finally:
        del model.hook


def test_the_rank_writes_the_videos_of_rollout_workers(run, workers, tmp_path):
    """A machine of rollout workers need not see the run folder."""
    folder = tmp_path / "step_000001" / "videos"

    class Direct:
        numbers = range(2)

        def submit(self, number, _, method, *arguments):
            result = getattr(workers[number], method)(*arguments)
            assert not folder.exists(), "a rollout worker has written it"
            return result

        def results(self, calls):
            return calls

    results, _ = workers[0].evaluate(episode_list(workers[0].env, "eval", 3))
    numbered = list(enumerate(results))
    videos = sorted(RemoteEpisodes(Direct(), 4).record(numbered, folder, 32), key=lambda video: video[0])
    alone = tmp_path / "alone" / "videos"
    with evaluation_mode(workers[0].model):
        assert videos == workers[0]._episodes.record(numbered, alone, 32)
    names = sorted(path.name for path in alone.iterdir())
    assert len(names) == 3 and sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
