"""What ranks of a recipe wait for while another one still generates, and under which deadline."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from rlinf.distributed.deadlines import clock, deadline
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.losses import GRPOLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.preflight.placement import Placement
from rlinf.recipes import rollout_workers as recipe_players
from rlinf.recipes.completions import Completer
from rlinf.recipes.datasets import PackedRows, Rows
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.rollout_workers import RemoteGenerator
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt


class Letters:
    def decode(self, tokens, skip_special_tokens=False):
        return str(tokens)


def reward(text, prompt, **facts):
    return float(len(text)), {}


def wait_for(path: Path, seconds: float = 60.0) -> bool:
    """Return whether a file has appeared."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def update_on_one_rank(work) -> None:
    """Take a step in which rank 1 generates until rank 0 has waited for it for two seconds; note the deadlines of the wait."""
    model, folder = work
    policy = HuggingFacePolicy(model, sharding="replicate", max_new_tokens=2, device_map=None)
    generator = TorchGenerator(policy)
    completer = Completer(generator, Letters(), reward, batch_size=4, max_new_tokens=2, end_tokens=[2])
    rows = PackedRows(Rows([{"ids": [5, 6]}, {"ids": [7, 8]}]), lambda row: Prompt(row["ids"]), seed=0)
    sizes = {"num_steps": 1, "batch_size": 4, "groups": Groups(2, seed=0)}
    trainer = GRPOTrainer(policy, rows, loss=GRPOLossFn(), completer=completer, **sizes)
    ready = generator.ready

    def watch() -> None:
        names = set()
        for _ in range(200):
            names.add(clock.name)
            time.sleep(0.01)
        (folder / "names").write_text(" ".join(sorted(map(str, names))))

    @contextmanager
    def late():
        with ready():
            yield
            if rank() == 0:
                threading.Thread(target=watch).start()
            else:
                assert wait_for(folder / "names")

    generator.ready = late
    with deadline("update"):
        trainer.step(0)


def test_a_rank_waits_for_the_answers_of_another_under_the_deadline_of_the_rollout(tiny_lm, tmp_path):
    """That of the update ends a run before a silent rollout worker is replaced."""
    launch(update_on_one_rank, (tiny_lm(), tmp_path), 2, "cpu")
    assert (tmp_path / "names").read_text() == "rollout"


def batch_of(first: int, second: int) -> BatchedDataDict:
    return BatchedDataDict({"input_ids": torch.tensor([[first, second]])})


class SlowPlayer:
    """Answers a batch only when rank 1 knows of the answer before, and doubles it."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        self.folder, self.placement = folder, placement

    def distribute(self, deadline, method, parts):
        for number, (batch, greedy) in enumerate(parts):
            assert (deadline, method, greedy) == ("rollout", "generate", False)
            assert number == 0 or wait_for(self.folder / f"known_{number}", 20), f"rank 1 waits for answer {number}"
            yield number, BatchedDataDict({"input_ids": 2 * batch["input_ids"]})


def generate_on_one_rank(work) -> None:
    for folder, num_batches in work:
        known = []

        def went_on(folder=folder, known=known) -> None:
            known.append(True)
            if rank() == 1:
                (folder / f"known_{len(known)}").touch()

        recipe_players.heartbeat = went_on  # of this process
        generator = RemoteGenerator(SimpleNamespace(), SlowPlayer(folder, Placement(3, 1, 0, 0)))
        batches = [batch_of(rank(), place) for place in range(num_batches[rank()])]
        found = [each["input_ids"].tolist() for each in generator.generate(batches, greedy=False)]
        assert found == [[[2 * rank(), 2 * place]] for place in range(num_batches[rank()])]


def test_ranks_that_share_a_player_know_of_each_answer(tmp_path):
    work = [(tmp_path / str(case), case) for case in ((1, 3, 2), (0, 0, 2), (2, 0, 0), (0, 0, 0))]
    for folder, _ in work:
        folder.mkdir()
    launch(generate_on_one_rank, work, 3, "cpu")
    for folder, num_batches in work:
        assert len(list(folder.iterdir())) == sum(num_batches)
