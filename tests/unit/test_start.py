"""The place of a process among those of torchrun or srun, and what its ranks must have in common."""

import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rlinf
from rlinf.commands import hydra_app
from rlinf.commands.ranks import reject_expandable_segments
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed import deadlines, launch, process_group, start
from rlinf.distributed.start import LaunchContext, first_host, launch_context, reject_differences
from rlinf.errors import ConfigError
from rlinf.options import to_mapping
from rlinf.preflight.validation import check_devices

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu-[007-010,12],login",
}  # fmt: skip


def test_torchrun_says_which_rank_a_process_is():
    assert launch_context(TORCHRUN) == LaunchContext("torchrun", 5, 8, 1, ("node-a", 29500), serves=False)
    first = {**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert launch_context(first).serves and not launch_context({**first, "RANK": "1"}).serves


def test_srun_says_it_too_and_the_first_node_has_the_store():
    place = launch_context(SRUN)
    assert (place.launcher, place.rank, place.size, place.local_rank) == ("srun", 0, 4, 0)
    assert place.address[0] == "gpu-007" and place.serves
    assert launch_context({**SRUN, "SLURM_PROCID": "3"}).address == place.address
    assert launch_context({**SRUN, "SLURM_STEP_ID": "3"}).address != place.address, "two steps on one node"
    assert launch_context({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "7"}).address == ("x", 7)
    assert launch_context({**SRUN, **TORCHRUN}).launcher == "torchrun", "srun has started torchrun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[03,07-9]-ib,m", "n03-ib"), ("r[1-2]c[05-8]", "r1c05")],
)
def test_the_first_host_of_a_list_of_slurm(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"WORLD_SIZE": "8"}],
    ids=["a shell", "one process of torchrun", "a batch script, which srun has not multiplied", "a variable left over"],
)
def test_one_process_is_alone(environment):
    assert launch_context(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is ''.*unset RANK WORLD_SIZE"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_LOCALID is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "torchrun or srun"),
    ],
)
def test_a_launcher_that_says_half_of_it_is_refused(environment, words):
    with pytest.raises(ConfigError, match=words):
        launch_context(environment)


def configured(monkeypatch, *overrides: str, connected: bool = True):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "_connected", connected)
    return build_config(compose_config(["experiment=quickstart", *overrides]))


def test_the_number_of_ranks_is_the_launchers_and_another_one_is_refused(monkeypatch):
    config = configured(monkeypatch)
    assert config.cluster.num_processes == 8
    check_devices(config, "train")
    for number in (1, 4):
        other = configured(monkeypatch, f"cluster.num_processes={number}")
        with pytest.raises(ConfigError, match=f"={number}, but torchrun started 8.*Set cluster.num_processes=null"):
            check_devices(other, "train")
    with pytest.raises(ConfigError, match="torchrun has started 8 copies of this program.*-m rlinf train"):
        check_devices(configured(monkeypatch, connected=False), "train")
    monkeypatch.delenv("RANK")
    assert build_config(compose_config(["experiment=quickstart"])).cluster.num_processes == 1


def listening_addresses(port: int) -> set[str]:
    """Local addresses, as the kernel writes them, that listen on a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def test_the_store_of_ranks_that_are_started_here_listens_on_this_machine_only():
    store = launch._store("127.0.0.1")
    assert listening_addresses(store.port) == {"0100007F"}
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    plain = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening_addresses(plain.port) - {"0100007F"}, "a control"


def test_a_resumed_run_takes_the_number_of_ranks_of_its_launcher(monkeypatch, tmp_path):
    saved = to_mapping(build_config(compose_config(["experiment=quickstart", "cluster.num_processes=2"])))
    monkeypatch.setattr(hydra_app, "resolve_checkpoint", Path)
    monkeypatch.setattr(hydra_app, "read_saved_config", lambda folder: saved)
    args = hydra_app.parse([f"resume={tmp_path}"])
    assert hydra_app.compose_resumed(args, str(tmp_path)).cluster.num_processes == 2, "a control"
    configured(monkeypatch)
    assert build_config(hydra_app.compose_resumed(args, str(tmp_path))).cluster.num_processes == 8
    given = hydra_app.parse([f"resume={tmp_path}", "cluster.num_processes=4"])
    assert hydra_app.compose_resumed(given, str(tmp_path)).cluster.num_processes == 4


def test_a_launchers_rank_needs_one_gpu_and_a_run_that_starts_its_ranks_one_for_each(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_devices(configured(monkeypatch, "cluster.device=cuda"), "train")
    monkeypatch.delenv("RANK")
    config = build_config(compose_config(["experiment=quickstart", "cluster.device=cuda", "cluster.num_processes=2"]))
    for command in ("train", "evaluate"):
        with pytest.raises(ConfigError, match=r"2 processes \(cluster.num_processes\), but torch sees 1"):
            check_devices(config, command)
    check_devices(config, "collect")


def test_a_rank_that_differs_is_named_with_its_host_and_what_differs():
    same = start.rank_fingerprint(["train", "seed=3"])
    assert same["argument seed"] == "seed=3" and "version of torch" in same
    reject_differences([("a", same), ("b", dict(same))])
    other = {**same, "version of torch": "1.0", "argument seed": "seed=4"}
    with pytest.raises(ConfigError) as error:
        reject_differences([("a", same), ("a", same), ("b", other)])
    lines = str(error.value).splitlines()
    assert "argument seed: rank 2 on b has seed=4, rank 0 on a has seed=3" in lines[1]
    assert f"version of torch: rank 2 on b has 1.0, rank 0 on a has {same['version of torch']}" in lines[2]
    assert len(lines) == 4
    many = {f"version of {number}": "1" for number in range(100)}
    with pytest.raises(ConfigError, match="and 80 more"):
        reject_differences([("a", {}), ("b", many)])


def test_another_line_of_code_is_another_source(monkeypatch, tmp_path):
    assert start.source_hash() == start.source_hash()
    copy = tmp_path / "rlinf"
    shutil.copytree(Path(rlinf.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(start, "__file__", str(copy / "distributed" / "start.py"))
    before = start.source_hash()
    with open(copy / "seeding.py", "a", encoding="utf-8") as file:
        file.write("\n")
    assert start.source_hash() != before


def started_on_gpus(monkeypatch, gpus, started_early=False):
    """Let two ranks, threads here, do their part of a launch on GPUs; return what each of them raised or did."""
    store, ended = dist.HashStore(), [None, None]
    rank_of = threading.local()
    # A process has one rank, and one clock: two threads would leave it at a wait of the other one.
    monkeypatch.setattr(deadlines, "clock", deadlines.Clock())
    monkeypatch.setattr(launch, "gpu_uuids", lambda: gpus[rank_of.number])
    monkeypatch.setattr(launch, "isolate_rank", lambda gpus, rank: None)
    monkeypatch.setattr(launch, "_join_group", lambda *_: None)
    monkeypatch.setattr(launch.dist, "barrier", lambda: None)
    monkeypatch.setattr(launch, "Watchdog", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started_early and rank_of.number == 1)
    work = launch.Work(lambda rank: ended.__setitem__(rank_of.number, "worked"), None, "cuda", {})

    def be(rank):
        rank_of.number = rank
        try:
            launch._take_part(work, store, rank, 2, ends_process=False, gpus=["0", "1"])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            ended[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads[started_early:]:  # the other one waits for it until it is ended
        thread.join(60)
    return ended


def test_ranks_of_a_launch_compare_their_gpus_before_they_join(monkeypatch):
    """A rank that asked CUDA for its GPUs before it hid the others sits on the first one."""
    assert started_on_gpus(monkeypatch, [["A"], ["B"]]) == ["worked", "worked"], "the control"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", (
        "inherited by ranks: asking whether there is a GPU starts no CUDA"
    )
    for gpus, words in ((["A"], "has the same GPU A as rank 0"), ([], "sees 0 GPUs"), (["B", "C"], "sees 2 GPUs")):
        for error in started_on_gpus(monkeypatch, [["A"], gpus]):
            assert isinstance(error, ConfigError) and "rank 1 on" in str(error) and words in str(error)


def test_a_rank_that_has_started_cuda_before_its_gpu_is_chosen_says_so(monkeypatch):
    error = started_on_gpus(monkeypatch, [["A"], ["B"]], started_early=True)[1]
    assert isinstance(error, launch.RankError) and "Rank 1 started CUDA while importing modules" in str(error)


def reject_segments_of_the_last_rank(folder):
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    reject_expandable_segments()  # a control
    if process_group.rank() == 1:
        os.environ[variable] = "max_split_size_mb:64,expandable_segments:True"
    with pytest.raises(ConfigError) as error:
        reject_expandable_segments()
    (Path(folder) / f"error{process_group.rank()}").write_text(str(error.value))


def test_memory_that_one_rank_could_not_share_with_its_engine_is_refused_on_all(tmp_path, monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    launch.launch(reject_segments_of_the_last_rank, str(tmp_path), 2, "cpu")
    first, second = ((tmp_path / f"error{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert "PYTORCH_CUDA_ALLOC_CONF is 'max_split_size_mb:64,expandable_segments:True' on rank 1 on " in first


def test_a_sweep_under_a_launcher_is_rejected(monkeypatch):
    monkeypatch.setattr(start, "_connected", True)
    with pytest.raises(ConfigError, match="^-m under torchrun or srun.*Remove -m"):
        hydra_app.run_training(["-m", "experiment=quickstart", "seed=1,2"], "train")


@pytest.mark.parametrize("own", [None, "max_split_size_mb:64"])
def test_ranks_of_a_launcher_take_the_allocator_of_rank_0_unless_they_have_their_own(monkeypatch, own):
    """Torch reads the variable when CUDA starts, and only rank 0 runs the command that sets it."""
    seen = []
    monkeypatch.setattr(launch, "_take_part", lambda *_, **__: seen.append(os.environ.get(launch.ALLOCATOR)))
    monkeypatch.delenv(launch.ALLOCATOR, raising=False)
    if own is not None:
        monkeypatch.setenv(launch.ALLOCATOR, own)
    ranks = SimpleNamespace(num_launches=1, store=dist.HashStore(), context=SimpleNamespace(rank=1, size=2))
    launch._run_with_launcher(ranks, None, "expandable_segments:True")
    assert seen == [own or "expandable_segments:True"]
