"""`rlinf evaluate` on several ranks: the result of one, also after the death of a rank."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_running, wait_until
from run_results import result_content

from rlinf.commands import evaluate as command
from rlinf.commands.evaluate import evaluate
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.distributed.deadlines import portable
from rlinf.envs import make_env
from rlinf.errors import ConfigError, RankError, RankKilledError
from rlinf.evaluation.evaluator import evaluate_policy, rank_slice
from rlinf.evaluation.partial import PartialResults, num_saved, partial_files
from rlinf.evaluation.result import EvaluationResult
from rlinf.models import build_policy
from rlinf.models.embodiment.openvla.processing import PrismaticImageProcessor
from rlinf.types import EpisodeResult, EpisodeSpec

PLUGIN = Path(__file__).parents[1] / "fixtures" / "slow_tabletop.py"
NUM_EPISODES = 120


@pytest.fixture(scope="module", autouse=True)
def plugin_folder():
    """Spawned ranks inherit the path on which they find the plugin."""
    sys.path.append(str(PLUGIN.parent))
    yield
    sys.path.remove(str(PLUGIN.parent))


def configured(output: Path, *overrides: str) -> RunConfig:
    words = [
        "model=mlp", f"plugins=[{PLUGIN}]", "env=tabletop", "env.name=slow_tabletop", "env.tasks=[reach,push]",
        "env.cameras=[]", "env.max_episode_steps=8", f"evaluation.num_episodes={NUM_EPISODES}", "evaluation.num_envs=4",
        "evaluation.num_videos_per_task=0", "cluster.num_threads=1", f"output_dir={output}", *overrides,
    ]  # fmt: skip
    return build_config(compose_config(words))


@pytest.fixture(scope="module")
def of_one(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("one")
    evaluate(configured(folder))
    return result_content(folder)


def test_control_other_actions_write_another_file(of_one, tmp_path):
    evaluate(configured(tmp_path, "seed=1", "evaluation.greedy=false"))
    assert result_content(tmp_path) != of_one


def kill_a_rank_after(folder: Path, numbers: list[int], killed: list[int]) -> None:
    """Kill a rank each time that so many results are on disk."""
    for number in numbers:
        while num_saved(folder) < number:
            time.sleep(0.01)
        ranks = [process.pid for process in multiprocessing.active_children() if is_running(process.pid)]
        killed.append(random.choice(ranks))
        os.kill(killed[-1], signal.SIGKILL)
        assert wait_until(lambda: not is_running(killed[-1]), 60)  # its status is for the thread that has started it


def test_ranks_write_the_file_of_one_also_if_two_die(of_one, tmp_path, caplog):
    killed: list[int] = []
    numbers = [NUM_EPISODES // 10, NUM_EPISODES // 2]  # each start must find new results
    thread = threading.Thread(target=kill_a_rank_after, args=(tmp_path, numbers, killed), daemon=True)
    thread.start()
    result = evaluate(configured(tmp_path, "cluster.num_processes=3", "env.sleep_s=0.01"))
    assert len(killed) == len(numbers) == caplog.text.count("was killed by SIGKILL")
    assert result_content(tmp_path) == of_one and result == EvaluationResult.from_json(tmp_path / "result.json")
    assert len(result.results) == NUM_EPISODES and not partial_files(tmp_path)


def test_ranks_that_die_without_a_result_are_not_started_for_ever(tmp_path, monkeypatch, capsys):
    launches = []

    def launch(*arguments, **options):
        launches.append(len(launches))
        if len(launches) < 3:  # each of two launches finds one more episode
            partial = PartialResults(tmp_path, {"a": 1}, rank=1)
            partial.add(EpisodeResult(EpisodeSpec("x", 0, len(launches), 0), "reach", True, 1.0, 3))
            partial._file.close()
        raise RankKilledError("Rank 1 was killed by SIGKILL")

    monkeypatch.setattr(command, "launch", launch)
    with pytest.raises(RankError, match="killed by SIGKILL"):
        evaluate(configured(tmp_path, "cluster.num_processes=2"))
    assert len(launches) == 3 and "2 results are saved in" in capsys.readouterr().err
    error = RankError("a bug")
    monkeypatch.setattr(command, "launch", lambda *_, **__: (_ for _ in ()).throw(portable(error, 1)))
    with pytest.raises(RankError, match="a bug"):
        evaluate(configured(tmp_path, "cluster.num_processes=2"))
    assert f"2 results are saved in {tmp_path};" in capsys.readouterr().err
    rejected = ConfigError("other conditions")
    monkeypatch.setattr(command, "launch", lambda *_, **__: (_ for _ in ()).throw(rejected))
    with pytest.raises(ConfigError, match="other conditions"):
        evaluate(configured(tmp_path, "cluster.num_processes=2"))
    assert "continues" not in capsys.readouterr().err, "the same command would be rejected again"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_deletes_a_file_without_results_only(tmp_path, rank):
    with PartialResults(tmp_path, {"a": 1}, rank) as partial:
        for number in range(2):
            partial.add(EpisodeResult(EpisodeSpec("x", 0, number, 0), "reach", True, 1.0, 3))
        partial.rank = 1  # rank 0 would delete the files of all as it ends well
    with pytest.raises(KeyError), PartialResults(tmp_path, {"a": 1}, rank):
        raise KeyError
    assert num_saved(tmp_path) == 2
    with pytest.raises(KeyError), PartialResults(tmp_path, {"a": 1}, 2) as empty:
        raise KeyError
    assert not empty.path.exists() and num_saved(tmp_path) == 2, "a control"


def test_results_of_any_number_of_ranks_are_known_to_the_next(tmp_path):
    rows = [EpisodeResult(EpisodeSpec("x", 0, number, 0), "reach", True, 1.0, 3) for number in range(4)]
    for rank in (0, 2):
        partial = PartialResults(tmp_path, {"a": 1}, rank)
        for row in rows[rank : rank + 2]:
            partial.add(row)
        partial._file.close()
    with open(tmp_path / "result.partial.2.jsonl", "a", encoding="utf-8") as file:
        file.write('{"spec": ')  # the rank was killed as it wrote
    assert num_saved(tmp_path) == 4
    with PartialResults(tmp_path, {"a": 1}, rank=1) as second:
        assert second.known == []
    first = PartialResults(tmp_path, {"a": 1})
    first._file.close()
    assert sorted(first.known, key=lambda row: row.spec.init_state_id) == rows
    with pytest.raises(ConfigError, match=r"different conditions \(a\)"):
        PartialResults(tmp_path, {"a": 2})
    with PartialResults(tmp_path, {"a": 1}):
        pass
    assert not partial_files(tmp_path)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_episode_has_one_rank_and_every_rank_all_tasks(num_ranks):
    episodes = [number % 4 for number in range(50)]  # the tasks take turns
    shares = [rank_slice(episodes, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(shares, []) == episodes
    for task in range(4):
        counts = [share.count(task) for share in shares]
        assert max(counts) - min(counts) <= 1 and min(counts) > 2
    if num_ranks == 2:
        assert 0 not in episodes[1::2], "a control: every second episode"


def test_images_are_prepared_once_for_each_call_of_the_policy(monkeypatch):
    words = ["model=openvla_tiny", "env=tabletop", "env.max_episode_steps=4", "output_dir=unused"]
    config = build_config(compose_config(words))
    env = make_env(config.env, 20, auto_reset=False)
    model = build_policy(config, {"norm_stats": {"tabletop": env.action_statistics()}})
    prepared, acted = [], []
    prepare, act = PrismaticImageProcessor.preprocess_tensors, model.predict_action_batch

    def counted(self, images, *arguments, **options):
        prepared.append(len(images))
        return prepare(self, images, *arguments, **options)

    monkeypatch.setattr(PrismaticImageProcessor, "preprocess_tensors", counted)
    monkeypatch.setattr(model, "predict_action_batch", lambda **inputs: acted.append(1) or act(**inputs))
    evaluate_policy(model, env, env.episode_specs("eval")[:20])
    assert len(prepared) == len(acted) > 4 and set(prepared) == {16}, "sixteen rows at once"
    env.close()
