"""Rollout workers with a vLLM engine each: the run of a rank with its engine, also when engines and rollout workers are killed."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
import torch
from processes import engines_of, is_running, wait_until
from run_results import QUIET, run_config, untimed_metrics, weights_of
from vllm_models import crossed

from rlinf.cluster.rollout_worker import RolloutWorker
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.cluster.weights import stored_buckets
from rlinf.commands.train import build, train
from rlinf.engines.weight_transfer import PushHeader, manifest_of
from rlinf.errors import RLinfError
from rlinf.preflight.placement import Placement
from rlinf.rollout.policy_skeleton import PolicySkeleton

MISSING = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.new_processes,  # of engines
]
SHORT = [
    "experiment=quickstart_vllm", *QUIET, "sft.max_steps=0", "trainer.max_steps=2", "trainer.minibatch_size=24", "trainer.eval_every=0",
    "rollout.num_envs=8", "rollout.num_chunks=3", "env.max_episode_steps=3", "evaluation.num_episodes=2", "evaluation.num_envs=2",
    "evaluation.probe=false", "algorithm.tis_cap=2.0", "algorithm.critic_warmup_steps=0",
]  # fmt: skip
SPLIT = ["cluster.start=ray", "cluster.placement=disaggregated", "cluster.num_rollout_workers=1"]


def check_equal(folder, other):
    assert untimed_metrics(folder) == untimed_metrics(other)
    weights, others = (weights_of(each, "rl_000002") for each in (folder, other))
    assert all(torch.equal(weights[name], others[name]) for name in weights | others)


def test_a_run_with_an_engine_in_a_rollout_worker_is_bit_for_bit_that_of_an_engine_in_a_rank(
    tmp_path, monkeypatch, caplog
):
    """Although an engine is killed in one iteration, and a rollout worker with a kill -9 in the next."""
    import ray

    call, engines, counts = RolloutWorkers._submit, {}, []

    def disturbing(self, number, deadline, method, *arguments):
        made = call(self, number, deadline, method, *arguments)
        if arguments[:1] == ("collect",):
            counts.append(number)
            pid = ray.get(self._where[number]).pid
            if len(counts) == 1:
                (engines["killed"],) = engines_of(pid)
                os.kill(engines["killed"], signal.SIGKILL)
            elif len(counts) == 2:
                (engines["orphan"],) = engines_of(pid)
                os.kill(pid, signal.SIGKILL)
        return made

    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    with monkeypatch.context() as patch:
        patch.setattr(RolloutWorkers, "_submit", disturbing)
        split = train(run_config(tmp_path / "split", *SHORT, *SPLIT))
    assert counts == [0, 0], "the rollout worker is asked again without RolloutWorkers._submit"
    assert caplog.text.count("was lost: The actor died") == 1
    assert wait_until(lambda: not any(map(is_running, engines.values())), 60) and len(engines) == 2
    colocated = train(run_config(tmp_path / "colocated", *SHORT, "rollout.pipeline_stages=1"))
    check_equal(split, colocated)
    gaps = [line["rollout/logprob_gap_max"] for line in untimed_metrics(split) if "rollout/logprob_gap_max" in line]
    assert len(gaps) == 2 and all(0 < gap <= 1e-4 for gap in gaps), "0 would mean that torch sampled"
    with pytest.raises(AssertionError):  # control: torch draws other actions
        check_equal(
            train(run_config(tmp_path / "torch", *SHORT, "rollout.pipeline_stages=1", "rollout.backend=torch")),
            colocated,
        )


def push(worker, model, version, base=None, end=True):
    manifest = manifest_of(model)
    worker.start_push(PushHeader(version, manifest if base is None else None, base))
    for bucket in stored_buckets(model.state_dict().items(), version):
        worker.load(bucket)
    return worker.commit() if end else None


def test_an_engine_of_two_processes_collects_with_committed_weights_only_and_comes_back(tmp_path, monkeypatch):
    """Tensor parallelism: what is sent to the engine, and from it to its workers, does not grow with the model."""
    before = set(engines_of(os.getpid()))
    run = build(run_config(tmp_path, *SHORT, "rollout.backend=torch"))
    config = run_config(tmp_path, *SHORT, *SPLIT, "rollout.vllm.tensor_parallel_size=2")
    model, trainer = run.parts.worker.model, run.parts.worker
    worker = RolloutWorker(config, PolicySkeleton.of(model), Placement.of(config), 0, 1)

    def collect():
        """Return a rollout, and how far the log-probabilities of the engine are from those of the trained policy."""
        batch = worker.collect(0, True, 0, range(8))
        logprobs, _ = trainer.evaluate(batch)
        gap = (batch.rollout_logprobs - logprobs)[batch.loss_mask].abs().max()
        return batch, float(gap)

    try:
        with pytest.raises(RLinfError, match="no complete weights"):
            collect()
        assert push(worker, model, 1) == 1
        first, gap = collect()
        assert 0 < gap <= 1e-4 and first.policy_version.unique().tolist() == [1]
        (engine,) = set(engines_of(os.getpid())) - before
        os.kill(engine, signal.SIGKILL)
        again, _ = collect()
        assert torch.equal(again.rollout_logprobs, first.rollout_logprobs)
        assert worker.engine.engine.num_starts == 2 and not is_running(engine)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        assert collect()[1] > 1e-3, "control: stale weights"
        push(worker, model, 2, base=1, end=False)
        with pytest.raises(RLinfError, match="no complete weights"):
            collect()
        assert worker.engine.engine.version == 1, "the engine takes a version as a whole"
        counts = crossed(worker.engine, monkeypatch)
        assert worker.commit() == 2
        assert counts["messages"] < 50_000 < counts["tensors"]
        newer, gap = collect()
        assert 0 < gap <= 1e-4 and newer.policy_version.unique().tolist() == [2]
    finally:
        worker.close()
        run.close()
    assert set(engines_of(os.getpid())) <= before
