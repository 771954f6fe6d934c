"""Runs with rollout workers in Ray: equal to runs whose ranks collect and evaluate, also when rollout workers die."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from processes import is_running
from ray_clusters import two_machines
from ray_references import counted, is_freed
from run_results import QUIET, check_equal_runs, check_staleness, note_trained, run_config, untimed_metrics, weights_of

from rlinf.cluster.reservation import Reservation, reserved
from rlinf.cluster.rollout_workers import RolloutWorkers
from rlinf.commands.train import build, train
from rlinf.errors import ConfigError, RankError
from rlinf.evaluation.result import EvaluationResult

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
SHORT = [
    *QUIET, "rollout.num_envs=8", "rollout.num_chunks=3", "env.max_episode_steps=3", "trainer.minibatch_size=12",
    "model.micro_batch_size=12", "trainer.max_steps=3", "trainer.eval_every=2", "sft.max_steps=0", "evaluation.num_episodes=6",
    "evaluation.num_envs=4", "evaluation.probe=false",
]  # fmt: skip
PPO = ["experiment=quickstart", *SHORT]
STATE = ["model=mlp", "env.tasks=[reach]", "env.cameras=[]", *SHORT]
GRPO = [*STATE, "algorithm=grpo", "rollout.group_size=2", "rollout.auto_reset=false"]
NORMALISED = [*STATE, "model.init_config.normalize_state=true", "algorithm.scale_rewards=true"]
SHARDED = [*PPO, "cluster.num_processes=2", "trainer.sharding=fsdp2"]
SPLIT = ["cluster.start=ray", "cluster.placement=disaggregated", "cluster.num_rollout_workers=2"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two machines; this process is connected to the first."""
    with two_machines() as cluster:
        yield cluster


def check_equal(folder, other, last="rl_000003"):
    check_equal_runs(folder, other, last, ("before_rl", "step_000002", "after_rl"), 6)


@pytest.mark.parametrize(("name", "overrides"), [("grpo", GRPO), ("normalised", NORMALISED)])
def test_a_run_with_two_rollout_workers_is_bit_for_bit_the_run_of_one_process(runs, name, overrides):
    """A VLA: the runs of two ranks below."""
    colocated, split = runs(f"colocated {name}", *overrides), runs(f"split {name}", *overrides, *SPLIT)
    check_equal(split, colocated)
    assert json.loads((split / "summary.json").read_text())["rollout_workers"] == "2 workers"


def test_control_another_seed_is_another_run(runs):
    with pytest.raises(AssertionError):
        check_equal(runs("other", *STATE, "seed=1"), runs("state", *STATE))


@contextmanager
def disturbed(monkeypatch, moments):
    """Call ``moments[(method, count)](workers, worker)`` right after a rollout worker was called for the ``count``-th time in a run."""
    call, counts, done = RolloutWorkers._submit, {}, []

    def noted(self, number, deadline, method, *arguments):
        made = call(self, number, deadline, method, *arguments)
        name = arguments[0] if method == "run" else method
        counts[name] = counts.get(name, 0) + 1
        if (name, counts[name]) in moments:
            done.append(moments[name, counts[name]](self, number))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(RolloutWorkers, "_submit", noted)
        yield done
    assert len(done) == len(moments), "all of it happened"


def send(number):
    def signal_rollout_worker(workers, worker):
        import ray

        where = ray.get(workers._where[worker])
        os.kill(where.pid, number)
        return where.pid

    return signal_rollout_worker


def in_a_hurry(workers, worker):
    """Let a rollout worker's time pass a hundred thousand times faster until it is replaced."""
    watch, before = workers._watch, workers.num_replaced

    def fast(number, waited_s):
        watch(number, waited_s * (1e5 if number == worker and workers.num_replaced == before else 1))

    workers._watch = fast


def stop_the_other(workers, worker):
    """Stop rollout worker 1 before it is asked to collect."""
    in_a_hurry(workers, 1 - worker)
    return send(signal.SIGSTOP)(workers, 1 - worker)


def test_rollout_workers_that_are_killed_or_silent_change_nothing(runs, monkeypatch, caplog):
    """While they collect, while they take weights, while they evaluate; one of them is stopped instead."""
    kill = send(signal.SIGKILL)
    moments = {("collect", 3): kill, ("push", 4): kill, ("evaluate", 4): kill, ("collect", 5): stop_the_other}
    trained = note_trained(monkeypatch)
    with disturbed(monkeypatch, moments) as pids:
        folder = runs("disturbed", *STATE, *SPLIT, "cluster.deadlines.rollout=600")
    check_staleness(trained, 0)
    check_equal(folder, runs("state", *STATE))
    assert len(set(pids)) == 4 and not any(map(is_running, pids))
    assert caplog.text.count("was lost: The actor died") == 3
    assert "was lost: it was in 'rollout' for more than 600 s" in caplog.text
    assert "set cluster.deadlines.rollout=1200" in caplog.text


def test_rollout_workers_that_collect_ahead_and_are_killed_collect_what_processes_collect_ahead(runs, monkeypatch):
    """While they evaluate with newer weights than those of rollouts that wait to be taken, and while they collect."""
    ahead = [*STATE, "cluster.max_staleness=2", "algorithm.tis_cap=2.0", "trainer.max_steps=5"]
    kill, trained = send(signal.SIGKILL), note_trained(monkeypatch)
    with disturbed(monkeypatch, {("evaluate", 4): kill, ("collect", 8): kill}):
        folder = runs("killed ahead", *ahead, *SPLIT)
    check_staleness(trained, 2)
    check_equal(folder, runs("ahead", *ahead, "rollout.worker_processes=2"), "rl_000005")
    staleness = [line.get("rollout/staleness_iterations") for line in untimed_metrics(folder)]
    assert [each for each in staleness if each is not None] == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_run_goes_on_with_other_rollout_workers_or_none(runs, tmp_path, monkeypatch, ahead):
    """Bit for bit as the run that was not interrupted, from a checkpoint of rollout workers and from one of ranks that collect."""
    trained = note_trained(monkeypatch)
    more = [*STATE, "trainer.max_steps=4", "trainer.save_every=1", "trainer.max_keep=-1"]
    more += ["cluster.max_staleness=1", "algorithm.tis_cap=2.0"] if ahead else []  # rollouts wait in the checkpoint
    whole = runs(f"whole {ahead}", *more, *SPLIT)
    check_staleness(trained, int(ahead))
    goes_on = [("colocated", whole, 1, ["rollout.worker_processes=2"] if ahead else [])]
    workers = ["cluster.num_rollout_workers=1"] if ahead else []
    goes_on += [("split again", tmp_path / "colocated", 3, [*SPLIT, *workers])]
    for name, before, step, where in goes_on:
        folder = tmp_path / name.replace(" ", "_")
        train(run_config(folder, *more, *where, f"resume={before}/checkpoints/rl_{step:06d}"))
        weights, expected = weights_of(folder, "rl_000004"), weights_of(whole, "rl_000004")
        assert all(torch.equal(weights[each], expected[each]) for each in expected), name
        lines = [line for line in untimed_metrics(whole) if "train/loss" in line]
        assert [line for line in untimed_metrics(folder) if "train/loss" in line] == lines[step:], name
        one, two = (EvaluationResult.from_json(each / "eval/after_rl/result.json") for each in (folder, whole))
        assert one.results == two.results


@pytest.fixture(scope="class")
def built(cluster, tmp_path_factory):
    """A run with rollout workers that has not started."""
    config = run_config(tmp_path_factory.mktemp("built"), *STATE, *SPLIT, "cluster.deadlines.rollout=600")
    with reserved(config) as reservation:
        run = build(config, reservation)
        run.rl.collector.wait_until_ready()
        try:
            yield run
        finally:
            run.close()


def wait_for(calls):
    import ray

    ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=300)


class TestRolloutWorkersOfARunThatHasNotBegun:
    @pytest.mark.parametrize("answers_are_lost", [False, True])
    def test_a_rollout_that_waits_to_be_taken_survives_its_rollout_worker(self, built, monkeypatch, answers_are_lost):
        """If the results are lost with the machine, they are collected again with the weights of then."""
        collector, sync, policy = built.rl.collector, built.rl.sync, built.parts.worker.model
        workers, version = collector.workers, 10 * (1 + answers_are_lost)
        sync.push(version)
        expected = collector.result(collector.submit(None, 3, version, True))
        calls = collector.submit(None, 3, version, True)
        refs = [call.ref for call in calls]
        wait_for(calls)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(0.5)
        sync.push(version + 1)
        if answers_are_lost:
            monkeypatch.setattr("rlinf.cluster.rollout_workers._has_result", lambda call: False)
        send(signal.SIGKILL)(workers, 0)
        newer = collector.result(collector.submit(None, 3, version + 1, True))
        assert newer.policy_version.unique().tolist() == [version + 1]
        assert [call.ref for call in calls[1:]] == refs[1:] and (calls[0].ref == refs[0]) == (not answers_are_lost)
        batch = collector.result(calls)
        assert batch.policy_version.unique().tolist() == [version]
        assert batch.tensors().keys() == expected.tensors().keys()
        assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in batch.tensors().items())
        assert not torch.equal(newer.rollout_logprobs, expected.rollout_logprobs), "control: the weights differ"

    def test_weights_are_stored_as_long_as_a_question_may_need_them(self, built):
        collector, workers = built.rl.collector, built.rl.collector.workers
        built.rl.sync.push(20)
        old = workers.weights.trained[0].hex()
        calls = collector.submit(None, 0, 20, True)
        wait_for(calls)
        built.rl.sync.push(21)
        assert old in counted(), "a rollout worker that is lost now acts with them"
        collector.result(calls)
        del calls
        assert is_freed(old) and workers.weights.trained[0].hex() in counted()

    def test_a_rollout_that_waits_to_be_taken_is_not_late(self, built):
        """The time that an evaluation takes is that of the evaluation, and its deadline is longer."""
        collector, workers = built.rl.collector, built.rl.collector.workers
        built.rl.sync.push(30)
        calls = collector.submit(None, 0, 30, True)
        wait_for(calls)
        evaluation = workers.submit(0, "evaluate", "evaluate", [])
        lost = workers.num_replaced
        workers._watch(0, 601.0)
        assert workers.num_replaced == lost
        assert workers.results([evaluation]) == [([], 0)]
        collector.result(calls)

    def test_a_rollout_worker_for_which_no_machine_has_room_ends_the_run(self, built, monkeypatch):
        """Instead of as many replacements as are allowed, each after a whole deadline."""
        import ray

        workers, everywhere = built.rl.collector.workers, {"num_cpus": 1000}
        built.rl.sync.push(40)
        send(signal.SIGKILL)(workers, 0)
        call = workers.submit(0, "evaluate", "evaluate", [])
        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "start", lambda self, actor, number: ray.remote(**everywhere)(actor).remote())
            workers._replace(0, "its machine is lost")
            workers._watch(0, 899.0)
            with pytest.raises(
                RankError, match=r"The Ray cluster has had no free place for rollout worker 0 for 900 s\..*resume="
            ):
                workers._watch(0, 2.0)
        workers._replace(0, "there is room again")
        assert workers.results([call]) == [([], 0)]

    def test_where_several_ranks_train_a_silent_rollout_worker_has_half_of_a_deadline(self, built, monkeypatch):
        """Its rank has to collect again before the remaining ranks have waited for all of it."""
        monkeypatch.setattr("rlinf.cluster.rollout_workers.DUMP_S", 0.0)  # nobody reads the stacks
        workers = built.rl.collector.workers
        built.rl.sync.push(45)
        send(signal.SIGSTOP)(workers, 0)
        call = workers.submit(0, "rollout", "evaluate", [])
        with monkeypatch.context() as patch:
            patch.setattr(workers, "placement", replace(workers.placement, num_ranks=2))
            workers._watch(0, 299.0)
            assert not call.missed
            workers._watch(0, 2.0)
            assert call.missed
        assert workers.results([call]) == [([], 0)]

    def test_a_rollout_worker_that_is_late_twice_with_the_same_work_ends_the_run(self, built, monkeypatch):
        monkeypatch.setattr("rlinf.cluster.rollout_workers.DUMP_S", 0.0)  # nobody reads the stacks
        workers = built.rl.collector.workers
        built.rl.sync.push(50)
        for repeats in (False, True):  # it may be late with other work as often as others may be lost
            send(signal.SIGSTOP)(workers, 1)
            call = workers.submit(1, "rollout", "evaluate", [])
            workers._watch(1, 599.0)
            assert not call.missed
            workers._watch(1, 2.0)
            assert call.missed
            if not repeats:
                workers.results([call])
        send(signal.SIGSTOP)(workers, 1)  # while it is built
        with pytest.raises(RankError, match=r"Rollout worker 1 was lost: .* Its predecessor was lost in the same call"):
            workers._watch(1, 1000.0)


def test_two_ranks_that_share_the_weights_collect_with_rollout_workers_what_they_collect_themselves(runs):
    check_equal(runs("two fsdp2 split", *SHARDED, *SPLIT), runs("two fsdp2", *SHARDED))


def test_two_ranks_that_share_the_weights_train_while_rollout_workers_collect_with_those_of_the_iteration_before(runs):
    ahead = ["cluster.max_staleness=1", "algorithm.tis_cap=2.0", "algorithm.old_logprobs=trainer"]
    ahead += ["algorithm.critic_warmup_steps=0", "trainer.max_steps=2"]
    folder = runs("two fsdp2 ahead", *SHARDED, *SPLIT, *ahead)
    lines = [line for line in untimed_metrics(folder) if "rollout/staleness_iterations" in line]
    assert [line["rollout/staleness_iterations"] for line in lines] == [0, 1]
    assert lines[0]["rollout/staleness_updates"] == 0 < lines[1]["rollout/staleness_updates"]
    ratios = [line["rollout/importance_ratio_max"] for line in lines]  # of trained weights to those that acted
    assert ratios[0] <= 1 + 1e-5 and min(ratios[1:]) > 1 + 1e-4
    assert all(line["rollout/logprob_gap_max"] <= 1e-5 for line in lines), "the gate compares at the weights that acted"


def test_machines_whose_store_is_too_small_are_refused_before_a_model_is_built(tmp_path, monkeypatch):
    """Ray would write what has no room to disks."""
    monkeypatch.setattr("rlinf.commands.train.build", lambda *_: pytest.fail("a model was built"))
    large = ["rollout.num_envs=4096", "trainer.minibatch_size=4096"]
    with pytest.raises(
        ConfigError, match=r"object store has .* MiB on .*; expected .*`ray start --object-store-memory=\d+`"
    ):
        train(run_config(tmp_path, *PPO, *SPLIT, *large))


def test_more_losses_than_allowed_end_the_run(tmp_path, monkeypatch):
    moments = {("collect", 1): send(signal.SIGKILL)}
    with (
        disturbed(monkeypatch, moments),
        pytest.raises(RankError, match=r"Rollout worker 0 was lost.*cluster.max_restarts=0"),
    ):
        train(run_config(tmp_path, *STATE, *SPLIT, "cluster.max_restarts=0"))


def test_a_machine_with_other_packages_is_refused_before_a_model_is_built(cluster, tmp_path, monkeypatch):
    package = tmp_path / "other" / "another_package-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    node = cluster.add_node(num_cpus=2, object_store_memory=100 << 20, env_vars={"PYTHONPATH": path})
    try:
        monkeypatch.setattr("rlinf.commands.train.build", lambda *_: pytest.fail("a model was built"))
        spread = ["cluster.num_rollout_workers=4", "rollout.num_envs=8"]
        with pytest.raises(ConfigError, match=r"machines of this run differ:\n.*version of another-package.*has 1.0"):
            train(run_config(tmp_path / "run", *STATE, *SPLIT, *spread))
    finally:
        cluster.remove_node(node)


def test_a_gpu_that_a_rank_uses_is_refused(cluster, tmp_path, monkeypatch):
    """Ray counts GPUs that are not there, and gives the only one of the third machine to the rollout worker."""
    config = run_config(tmp_path, *STATE, *SPLIT, "cluster.num_rollout_workers=1")
    monkeypatch.setattr("rlinf.preflight.placement.resolve_device", lambda device, _: "cuda")
    node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20)
    try:
        monkeypatch.setattr("rlinf.cluster.reservation._gpus", lambda _: ["0", "1"])  # the first is that of rank 0
        with pytest.raises(
            ConfigError, match="Ray assigned GPU 0 of .* to a rollout worker, but a rank uses it.*--num-gpus=0"
        ):
            with reserved(config):
                pytest.fail("a model would be built")
        monkeypatch.setattr("rlinf.cluster.reservation._gpus", lambda _: ["1", "0"])
        with reserved(config) as reservation:  # control
            assert reservation.machine.gpus == ["1"]
    finally:
        cluster.remove_node(node)


def test_a_machine_that_is_lost_changes_nothing_where_another_one_has_room(cluster, runs, monkeypatch, caplog):
    (second,) = cluster.worker_nodes

    def lose(workers, _):
        cluster.remove_node(second, allow_graceful=False)

    try:
        with disturbed(monkeypatch, {("collect", 3): lose}):
            folder = runs("lost", *STATE, *SPLIT)
    finally:
        cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    check_equal(folder, runs("state", *STATE))
    assert (
        "A replacement will rerun the same env groups" in caplog.text
    )  # more than once if Ray notices the loss of the machine late
