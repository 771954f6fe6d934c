"""Where rollout workers are follows from the configuration and the machines alone; what does not fit is rejected without Ray."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.cluster.rollout_worker import worker_maker
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.process_group import rank_range
from rlinf.distributed.ray.ranks import neighbours_first
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.preflight.placement import COLOCATED, Node, Placement, check_evaluation_workers, check_placement
from rlinf.preflight.validation import validate

SPLIT = [
    "model=mlp", "env.cameras=[]", "rollout.num_envs=64", "cluster.device=cpu", "cluster.start=ray", "cluster.placement=disaggregated",
    "cluster.num_rollout_workers=4",
]  # fmt: skip
ENGINES = ["rollout.backend=vllm", "rollout.vllm.tensor_parallel_size=2"]
GROUPS = ["algorithm=grpo", "rollout.group_size=8", "rollout.auto_reset=false"]


def config_of(*overrides):
    return build_config(compose_config([*SPLIT, *overrides]))


PLAYERS = config_of()
MISFITS = {
    "nothing for ray": (["cluster.placement=colocated", "cluster.num_rollout_workers=null"], "cluster.start=auto"),
    "rollout workers of ranks that play": (
        ["cluster.placement=colocated", "cluster.start=auto"],
        "cluster.num_rollout_workers=null",
    ),
    "rollout workers without ray": (["cluster.start=auto"], "cluster.start=ray"),
    "nothing to play": (["trainer.max_steps=0", "sft.max_steps=5"], COLOCATED),
    "fewer rollout workers than ranks": (["cluster.num_processes=8"], "cluster.num_rollout_workers=8"),
    "rollout workers that ranks do not divide": (
        ["cluster.num_processes=3", "rollout.num_envs=48"],
        "cluster.num_rollout_workers=6",
    ),
    "envs that rollout workers do not divide": (["rollout.num_envs=66"], "rollout.num_envs=64"),
    "groups that rollout workers do not divide": ([*GROUPS, "rollout.num_envs=48"], "rollout.num_envs=64"),
    "more rollout workers than groups": ([*GROUPS, "cluster.num_rollout_workers=16"], "rollout.num_envs=128"),
    "processes that play, too": (
        ["rollout.worker_processes=2"],
        "rollout.worker_processes=0",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_the_override_that_mends_it(name):
    overrides, fix = MISFITS[name]
    with pytest.raises(ConfigError) as caught:
        check_placement(config_of(*overrides))
    assert f"Set {fix}" in str(caught.value)
    check_placement(config_of(*overrides, *fix.split()))


RANKS = [
    "cluster.device=auto",
    "cluster.placement=colocated",
    "cluster.num_rollout_workers=null",
    "cluster.num_processes=8",
]


@pytest.mark.parametrize(
    ("nodes", "overrides", "fix"),
    [
        ([Node("a", 2, 0), Node("b", 1, 0)], [], "cluster.num_rollout_workers=2"),
        ([Node("a", 4, 0)], ["cluster.num_processes=2"], "cluster.num_processes=2 cluster.num_rollout_workers=2"),
        ([Node("a", 0, 0)], [], COLOCATED),
        ([Node("a", 64, 2), Node("b", 0, 8)], ["cluster.device=cuda"], "cluster.num_rollout_workers=2"),
        ([Node("a", 64, 0)], ["cluster.device=cuda"], f"{COLOCATED}, or cluster.device=cpu"),
        ([Node("a", 64, 3), Node("b", 64, 5)], ["cluster.device=cuda", *ENGINES], "cluster.num_rollout_workers=2"),
        ([Node("a", 4, 0), Node("b", 3, 0)], RANKS, "cluster.num_processes=4"),
        ([Node("a", 1, 0)], RANKS, COLOCATED),
        ([Node("a", 64, 4), Node("b", 0, 8)], RANKS, "cluster.num_processes=4"),  # auto: on GPUs, if there are any
        ([Node("a", 64, 0)], [*RANKS, "cluster.device=cuda"], f"{COLOCATED}, or cluster.device=cpu"),
    ],
)  # fmt: skip
def test_machines_without_room_are_refused(monkeypatch, nodes, overrides, fix):
    """Where Ray starts the ranks, the machine of the command need not have a GPU."""
    of_ranks = overrides[:4] == RANKS
    if not of_ranks:
        monkeypatch.setattr("rlinf.preflight.placement.resolve_device", lambda device, _: device)
    with pytest.raises(ConfigError) as caught:
        Placement.of(config_of(*overrides), nodes)
    assert f"Set {fix}" in str(caught.value) and nodes[0].name in str(caught.value)
    roomy = Placement.of(config_of(*overrides), [*nodes, Node("roomy", 8, 8)])
    assert roomy.num_rollout_workers == (0 if of_ranks else 4), "control"
    assert not of_ranks or roomy.rank_bundle == {"CPU": 1, "GPU": 1}


def test_ranks_of_a_machine_are_neighbours_and_those_of_the_command_come_first():
    nodes = ["b", "a", "c", "b", "a", "c"]
    assert [nodes[bundle] for bundle in neighbours_first(nodes, "a")] == ["a", "a", "b", "b", "c", "c"]
    assert neighbours_first(nodes, "elsewhere") == [0, 3, 1, 4, 2, 5]


def test_the_command_checks_the_placement():
    with pytest.raises(ConfigError, match="Set cluster.start=ray"):
        validate(config_of("cluster.start=auto"))
    validate(config_of())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_every_player_and_every_block_has_one_owner(ranks, per_rank, per_player, group):
    workers = ranks * per_rank
    config = replace(
        PLAYERS,
        cluster=replace(PLAYERS.cluster, num_processes=ranks, num_rollout_workers=workers),
        rollout=replace(PLAYERS.rollout, group_size=group, num_envs=workers * per_player * group),
    )
    placement = Placement.of(config)
    owned = [list(placement.rollout_workers_of(rank)) for rank in range(ranks)]
    assert sum(owned, []) == list(range(workers)) and {len(each) for each in owned} == {per_rank}
    env_groups = [
        list(rank_range(placement.num_env_groups, worker, placement.num_rollout_workers)) for worker in range(workers)
    ]
    assert sum(env_groups, []) == list(range(workers * per_player))
    for rank, own in enumerate(owned):
        assert sum((env_groups[worker] for worker in own), []) == list(
            range(rank * per_rank * per_player, (rank + 1) * per_rank * per_player)
        )


@pytest.mark.parametrize(
    ("ranks", "workers", "of_rank", "of_player"), [(1, 2, 2, 1), (1, 1, 2, 2), (2, 2, 2, 2), (1, 8, 2, 1)]
)
def test_players_share_the_worker_threads_of_the_ranks(ranks, workers, of_rank, of_player):
    placement = Placement(ranks, workers, num_env_groups=64, gpus_per_rollout_worker=0)
    assert placement.worker_threads(of_rank) == of_player


@pytest.mark.parametrize(("key", "variable", "expected"), [(6, "2", 3), (None, "16", 8), (None, None, 5)])
def test_a_rollout_worker_has_its_part_of_the_threads_of_the_key_then_of_the_variable_then_of_the_cores(
    key, variable, expected, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    placement = Placement(1, 2, num_env_groups=64, gpus_per_rollout_worker=0)
    make = worker_maker(config_of(f"cluster.num_threads={key or 'null'}"), None, placement)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # by Ray, in the process of the rollout worker
    assert placement.torch_threads(make.args[0].cluster.num_threads, of_machine=5) == expected


@pytest.mark.parametrize("start", ["ray", "auto"])
def test_a_launcher_and_a_missing_package_are_refused(monkeypatch, start):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    split = config_of("cluster.num_processes=4", f"cluster.start={start}")
    few = config_of("cluster.placement=colocated", f"cluster.start={start}")
    for check, config, number in ((check_placement, split, 4), (check_evaluation_workers, few, 1)):
        words = f"torchrun has started 4 times.*Set cluster.start=ray cluster.num_processes={number} and"
        with pytest.raises(ConfigError, match=words):
            check(config)
    monkeypatch.delenv("RANK")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"needs Ray.*pip install -e '\.\[ray\]'"):
        check_placement(config_of())


LAPTOP = """
import sys, torch.distributed as dist
from pathlib import Path
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.commands.train import train
config = build_config(compose_config([
    "model=mlp", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=3", "rollout.num_envs=4", "rollout.num_chunks=3",
    "trainer.minibatch_size=12", "model.micro_batch_size=12", "trainer.max_steps=1", "evaluation.num_episodes=1", "evaluation.num_envs=1",
    "evaluation.num_videos_per_task=0", "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1"]))
config.output_dir = sys.argv[1]
made = []
dist.init_process_group = lambda *args, **kwargs: made.append(args)
train(config)
print("ray" in sys.modules, made, dist.is_initialized())
"""


def test_one_process_imports_no_ray_and_makes_no_process_group(tmp_path):
    done = subprocess.run([sys.executable, "-c", LAPTOP, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False [] False", done.stdout + done.stderr
