"""The manager of checkpoints: what is saved is the moment of the call, whatever the run does or suffers meanwhile."""

import logging
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf.checkpoints import checkpoint_manager as manager_module
from rlinf.checkpoints import folders
from rlinf.checkpoints.checkpoint import load_checkpoint
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.checkpoints.folders import read_loop_state
from rlinf.checkpoints.trainer_state import read_entries
from rlinf.distributed.launch import launch
from rlinf.errors import CheckpointError, ManifestMismatchError
from rlinf.llm.batched_data_dict import BatchedDataDict
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.llm.losses import NLLLossFn
from rlinf.manifest import Manifest, check
from rlinf.models.config import LoraConfig
from rlinf.recipes.checkpoints import RecipeCheckpoints
from rlinf.recipes.hf_folder import HFFolder, token_manifest
from rlinf.recipes.run import newest_checkpoint
from rlinf.recipes.token_trainer import best_of

CONFIG = {"policy": {"model_name_or_path": "tiny"}}


def batch(seed: int) -> BatchedDataDict:
    ids = torch.randint(3, 48, (4, 6), generator=torch.Generator().manual_seed(seed))
    return BatchedDataDict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": torch.ones_like(ids)}
    )


def train(policy: HuggingFacePolicy, first: int, steps: int) -> list[float]:
    return [policy.train(batch(number), NLLLossFn())["loss"] for number in range(first, first + steps)]


def state_of(policy: HuggingFacePolicy, source: str, step: int, lora: LoraConfig | None = None, **more) -> dict:
    manifest = token_manifest(policy.model, source, precision="float32", seed=0, policy_version=step, lora=lora)
    return {"model": policy.model, "optimizer": policy._optimizer, "loop_state": {"step": step, "trainer": {"data": {}}}, "run_config": CONFIG,
            "manifest": manifest, **more}  # fmt: skip


@pytest.fixture
def trained(tiny_lm):
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2, device_map="cpu")
    train(policy, 0, 2)
    return policy


def weights_in(checkpoint: Path, source: str) -> dict[str, torch.Tensor]:
    policy = HuggingFacePolicy(source, learning_rate=1e-2, device_map="cpu")
    load_checkpoint(checkpoint, model=policy.model, optimizer=policy._optimizer)
    state = {f"weight {name}": tensor.clone() for name, tensor in policy.model.state_dict().items()}
    moments = policy._optimizer.state.values()
    return state | {f"{key} {n}": tensor for n, each in enumerate(moments) for key, tensor in each.items()}


def hold(monkeypatch) -> threading.Event:
    """Let nothing be written until the event is set."""
    go, write = threading.Event(), manager_module.write_snapshot

    def late(*arguments, **more):
        assert go.wait(60)
        write(*arguments, **more)

    monkeypatch.setattr(manager_module, "write_snapshot", late)
    return go


def mutate(policy: HuggingFacePolicy, counters: dict) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
        for state in policy._optimizer.state.values():
            for tensor in state.values():
                tensor.add_(1)
    counters["step"] = 99
    counters["list"].append(99)
    torch.rand(1)


def test_an_asynchronous_save_is_a_snapshot(trained, tiny_lm, tmp_path, monkeypatch):
    """Parameters, moments, counters and random numbers that change right after the call, before a byte is written."""
    CheckpointManager(tmp_path / "sync").save(
        "step_2", **state_of(trained, tiny_lm(), 2, loop_state={"step": 2, "list": [1]})
    )
    expected, random_numbers = (
        weights_in(tmp_path / "sync" / "checkpoints" / "step_2", tiny_lm()),
        torch.get_rng_state(),
    )
    go, counters = hold(monkeypatch), {"step": 2, "list": [1]}
    manager = CheckpointManager(tmp_path / "async", save_mode="async")
    manager.save("step_2", **state_of(trained, tiny_lm(), 2, loop_state=counters))
    folder = tmp_path / "async" / "checkpoints" / "step_2"
    assert not folder.exists(), "the call must return before the file is complete"
    mutate(trained, counters)
    go.set()
    manager.close()
    found = weights_in(folder, tiny_lm())
    assert found.keys() == expected.keys() and len(found) > 50
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read_loop_state(folder) == {"step": 2, "list": [1]}
    load_checkpoint(folder, model=trained.model)
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_a_copy_that_shares_memory_is_no_snapshot(trained, tiny_lm, tmp_path, monkeypatch):
    """The control of the test above: ``cpu()`` of a tensor in main memory is the tensor itself."""
    expected = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    go, counters = hold(monkeypatch), {"step": 2, "list": [1]}
    manager = CheckpointManager(tmp_path, save_mode="async")
    monkeypatch.setattr(
        manager._stager, "stage", lambda tensors: {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    )
    manager.save("step_2", **state_of(trained, tiny_lm(), 2, loop_state=counters))
    mutate(trained, counters)
    go.set()
    manager.close()
    found = weights_in(tmp_path / "checkpoints" / "step_2", tiny_lm())
    assert not any(torch.equal(found[f"weight {name}"], expected[name]) for name in expected)


def test_an_error_of_the_writing_is_raised_by_the_next_call(trained, tiny_lm, tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, save_mode="async")
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", _full)
        manager.save("step_2", **state_of(trained, tiny_lm(), 2))
        manager._thread.join()
    with pytest.raises(CheckpointError, match="Cannot write .*MiB free"):
        manager.save("step_3", **state_of(trained, tiny_lm(), 3))
    assert manager.names() == [] and list((tmp_path / "checkpoints").iterdir()) == []
    manager.save("step_4", **state_of(trained, tiny_lm(), 4))
    manager.close()
    assert manager.names() == ["step_4"]
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", _full)
        manager = CheckpointManager(tmp_path, save_mode="async")
        manager.save("step_5", **state_of(trained, tiny_lm(), 5))
        with pytest.raises(CheckpointError, match="Cannot write"):
            manager.close()


def _full(*_, **__):
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")


def test_the_newest_and_the_best_stay_with_what_was_exported_from_them(trained, tiny_lm, tmp_path):
    export = HFFolder(tiny_lm(), torch.float32)
    manager = RecipeCheckpoints(tmp_path, save_mode="async", max_keep=2, export=export, exports_all=True)
    scores = {}
    for step in (20, 40, 60, 80, 100):
        scores[f"step_{step}"] = {40: 0.9}.get(step, step / 1000)
        manager.wait()
        best = best_of(scores, {*manager.names(), f"step_{step}"})
        manager.save(f"step_{step}", **state_of(trained, tiny_lm(), step, best=best), is_last=step == 100)
    manager.close()
    assert sorted(manager.names()) == ["step_100", "step_40", "step_80"]
    assert sorted(path.name for path in (tmp_path / "safetensors").iterdir()) == ["final", "step_40", "step_80"]
    assert folders.resolve_checkpoint(tmp_path).name == "step_100", "by number, not by text"
    CheckpointManager(tmp_path / "all", max_keep=-1).save("step_1", **state_of(trained, tiny_lm(), 1))
    names = manager.names()
    assert best_of({"step_20": 1.0}, names) is None and best_of({"step_80": 0.5, "step_40": 0.5}, names) == "step_40"


def test_without_checkpoints_only_the_last_policy_is_written(trained, tiny_lm, tmp_path):
    manager = RecipeCheckpoints(tmp_path, keeps_any=False, export=HFFolder(tiny_lm(), torch.float32))
    manager.save("step_1", **state_of(trained, tiny_lm(), 1))
    assert list(tmp_path.iterdir()) == []
    manager.save("step_2", **state_of(trained, tiny_lm(), 2), is_last=True)
    manager.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_dir()] == [
        "safetensors", "safetensors/final",
    ]  # fmt: skip
    assert load_file(tmp_path / "safetensors" / "final" / "00000.safetensors").keys() > {"model.norm.weight"}


def test_a_run_is_resumed_from_the_newest_whole_checkpoint_of_all_timestamps(trained, tiny_lm, tmp_path, caplog):
    assert newest_checkpoint(tmp_path) is None and newest_checkpoint(tmp_path / "absent") is None
    for stamp, step in (
        ("20260101000000", 100),
        ("20260102000000", 20),
        ("20260102000000", 100),
        ("20260103000000", 40),
    ):
        CheckpointManager(tmp_path / stamp).save(f"step_{step}", **state_of(trained, tiny_lm(), step))
    (tmp_path / "20260104000000" / "checkpoints" / ".step_60.tmp").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "20260103000000" / "checkpoints" / "step_40"
    (tmp_path / "20260103000000" / "checkpoints" / "step_40" / "trainer_state" / "__0_0.distcp").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, "rlinf"):
        assert newest_checkpoint(tmp_path) == tmp_path / "20260102000000" / "checkpoints" / "step_100"
    assert "step_40 is skipped" in caplog.text and "__0_0.distcp" in caplog.text


def test_a_checkpoint_of_adapters_has_no_base_and_refuses_another(tiny_lm, tmp_path):
    lora = LoraConfig(rank=2)
    policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2, device_map="cpu", lora={"rank": 2})
    train(policy, 0, 2)
    manager = CheckpointManager(tmp_path, with_policy=False)
    manager.save("step_2", **state_of(policy, tiny_lm(), 2, lora))
    folder = tmp_path / "checkpoints" / "step_2"
    names = {name for name in read_entries(folder / "trainer_state") if name.startswith("model.")}
    assert names and all(".lora_" in name for name in names)
    straight = train(policy, 2, 2)
    resumed = HuggingFacePolicy(tiny_lm(), learning_rate=1e-2, device_map="cpu", lora={"rank": 2})
    present = state_of(resumed, tiny_lm(), 0, lora)["manifest"]
    check(Manifest.load(folder), present)
    load_checkpoint(folder, model=resumed.model, optimizer=resumed._optimizer)
    assert train(resumed, 2, 2) == straight
    with pytest.raises(ManifestMismatchError, match="lora.base_sha256"):
        other = HuggingFacePolicy(tiny_lm(seed=1), device_map="cpu", lora={"rank": 2})
        present = state_of(other, tiny_lm(seed=1), 0, lora)["manifest"]
        check(Manifest.load(folder), present)
    with pytest.raises(CheckpointError, match="were trained on base weights with digest"):
        HFFolder(tiny_lm(seed=1), torch.float32, lora=lora)(folder, tmp_path / "exported")


def run_on_ranks(arguments: tuple[str, str, int]) -> None:
    """Two steps from the newest checkpoint, if there is one, with a save after each of them; then a step whose loss is kept."""
    source, folder, first = arguments
    torch.set_num_threads(1)
    policy = HuggingFacePolicy(source, learning_rate=1e-2, device_map="cpu", sharding="fsdp2")
    manager = CheckpointManager(Path(folder), save_mode="async", max_keep=1)
    if first:
        load_checkpoint(Path(folder) / "checkpoints" / f"step_{first}", model=policy.model, optimizer=policy._optimizer)
    from rlinf.distributed.process_group import rank, world_size

    own = slice(rank() * 4 // world_size(), (rank() + 1) * 4 // world_size())
    losses = []
    for step in range(first, first + 3):
        rows = BatchedDataDict({name: tensor[own] for name, tensor in batch(step).items()})
        losses.append(policy.train(rows, NLLLossFn())["loss"])
        if step < first + 2:
            manager.save(f"step_{step + 1}", **state_of(policy, source, step + 1))
    manager.close()
    if rank() == 0:
        torch.save(losses, Path(folder) / f"losses_{first}.pt")


def test_two_one_and_four_ranks_go_on_alike(tiny_lm, tmp_path):
    source = tiny_lm()
    for first, ranks in ((0, 2), (2, 1), (4, 4)):
        launch(run_on_ranks, (source, str(tmp_path), first), ranks, "cpu", process_group=True)
    straight = train(HuggingFacePolicy(source, learning_rate=1e-2, device_map="cpu"), 0, 7)
    for first in (0, 2, 4):
        losses = torch.load(tmp_path / f"losses_{first}.pt")
        assert losses == pytest.approx(straight[first : first + 3], abs=1e-5), f"{first}: {losses}"
    fresh = train(HuggingFacePolicy(source, learning_rate=1e-2, device_map="cpu"), 4, 1)
    assert abs(fresh[0] - straight[4]) > 1e-3, "a control: without the checkpoint it differs"
