"""Checkpoints: a run continues bit for bit, on any number of ranks, and a damaged folder never passes for a good one."""

import json
import logging
import os
import pickle
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf.checkpoints import checkpoint as checkpoints
from rlinf.checkpoints.checkpoint import load_checkpoint, load_weights, save_checkpoint, verify_checkpoint
from rlinf.checkpoints.folders import read_loop_state, resolve_checkpoint
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, full_tensor
from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import CheckpointError
from rlinf.manifest import Manifest

MANIFEST = Manifest({}, {}, {}, {}, {}, {"state": "none"}, "fp32", {}, None, policy_version=1, seed=0)
CONFIG = {"seed": 0, "model": {"model_type": "tiny"}}


class Tiny(LlamaForCausalLM):
    """A causal language model with a second head, sharded by layers."""

    fsdp_wrap_modules = ("LlamaDecoderLayer",)

    def __init__(self, config):
        super().__init__(config)
        self.value_head = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()


def build(seed: int = 0, hidden_size: int = 16) -> tuple[Tiny, torch.optim.AdamW]:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Tiny(LlamaConfig(hidden_size=hidden_size, **sizes))
    return model, optimizer_of(model)


def optimizer_of(model) -> torch.optim.AdamW:
    head = [p for name, p in model.named_parameters() if "value_head" in name]
    body = [p for name, p in model.named_parameters() if "value_head" not in name]
    return torch.optim.AdamW([{"params": body}, {"params": head, "weight_decay": 0.0}], lr=1e-2)


def steps(number: int, model, optimizer) -> None:
    for _ in range(number):
        step(model, optimizer)


def step(model, optimizer, head_only: bool = False) -> None:
    """One step on random tokens, the same on every rank."""
    tokens = torch.randint(0, 32, (4, 6))
    output = model(tokens, labels=tokens, output_hidden_states=True)
    values = output.hidden_states[-1].detach() @ full_tensor(model.value_head.weight).T if head_only else None
    loss = ((values - 1) ** 2).mean() if head_only else output.loss + (output.logits**2).mean()
    (loss / world_size()).backward()  # the ranks add theirs
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: full_tensor(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save(folder: Path, model, optimizer, step: int = 2, max_keep: int = -1, best: str | None = None) -> Path:
    return save_checkpoint(
        folder, model=model, optimizer=optimizer, loop_state={"step": step, "nested": {"env_steps": 7}},
        run_config=CONFIG, manifest=MANIFEST, max_keep=max_keep, best=best,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint after two steps; tests that damage it copy it."""
    model, optimizer = build()
    steps(2, model, optimizer)
    return save(tmp_path_factory.mktemp("run") / "checkpoints" / "rl_000002", model, optimizer)


def test_saving_changes_nothing(tmp_path):
    results = []
    for saves in (False, True):
        model, optimizer = build()
        for number in range(3):  # the first save finds an optimiser without any state
            if saves:
                save(tmp_path / f"rl_{number:06d}", model, optimizer)
            step(model, optimizer)
        results.append(weights_of(model))
    assert equal(*results)


def test_parameters_that_were_never_stepped_have_no_state_after_loading(tmp_path):
    """As during the critic's warm-up, when only the value head has been stepped."""
    model, optimizer = build()
    step(model, optimizer, head_only=True)
    folder = save(tmp_path / "rl_000001", model, optimizer)
    step(model, optimizer)
    resumed, resumed_optimizer = build(seed=1)
    step(resumed, resumed_optimizer)  # the state that this makes must go
    load_checkpoint(folder, model=resumed, optimizer=resumed_optimizer)
    assert [len(resumed_optimizer.state), len(list(resumed.value_head.parameters()))] == [1, 2]
    step(resumed, resumed_optimizer)
    assert equal(weights_of(resumed), weights_of(model))


def test_random_numbers_go_on_where_they_were(tmp_path):
    model, optimizer = build()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    np.random.standard_normal(), random.gauss(0, 1)  # both keep a second number for the next call
    folder = save(tmp_path / "rl_000000", model, optimizer)

    def draw():
        own = [random.random(), random.gauss(0, 1)]
        return [*own, np.random.standard_normal(), np.random.rand(), torch.rand(2).tolist()]

    expected = draw()
    assert draw() != expected
    load_checkpoint(folder, model=model, optimizer=optimizer)
    assert draw() == expected


def test_checkpoint_is_a_copy(tmp_path):
    model, optimizer = build()
    step(model, optimizer)
    before = weights_of(model)
    loop_state = {"list": [1]}
    folder = save_checkpoint(
        tmp_path / "rl_000001", model=model, optimizer=optimizer, loop_state=loop_state, run_config=CONFIG, manifest=MANIFEST
    )  # fmt: skip
    loop_state["list"].append(2)
    step(model, optimizer)
    assert not equal(weights_of(model), before)
    load_weights(folder, model)
    assert equal(weights_of(model), before)
    assert read_loop_state(folder) == {"list": [1]}
    assert MANIFEST.files == {}, "the caller's manifest must stay as it was"


def test_folder_has_all_parts_and_loads_with_from_pretrained(saved):
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    parts = {"state.json", "config.yaml", "manifest.json", "rng/rank_0.pt", "trainer_state/.metadata"}
    assert parts | {"model/config.json", "model/model.safetensors"} <= names
    manifest = Manifest.load(saved)
    assert set(manifest.files) == names - {"manifest.json"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in manifest.files.values())
    model, _ = build(seed=9)
    load_weights(saved, model)
    assert equal(weights_of(Tiny.from_pretrained(saved / "model")), weights_of(model))
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "no temporary folder may stay"


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "trainer_state/__0_0.distcp", "state.json", "rng/rank_0.pt"]
)
@pytest.mark.parametrize("damage", ["flip", "flip behind its time and size", "remove"])
def test_damage_is_noticed(saved, tmp_path, name, damage):
    folder = copied(saved, tmp_path / "rl_000002")
    verify_checkpoint(folder)
    path = folder / name
    before, data = path.stat(), bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    if "behind" in damage:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        verify_checkpoint(folder)
    model, optimizer = build()
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_checkpoint(folder, model=model, optimizer=optimizer)


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_another_architecture_is_refused_by_name(saved):
    model, optimizer = build(hidden_size=32)
    with pytest.raises(
        CheckpointError, match=r"a different model: '.*' has shape \[.*16.*\] there and \[.*32.*\] here"
    ):
        load_checkpoint(saved, model=model, optimizer=optimizer)
    plain = LlamaForCausalLM(build()[0].config)
    with pytest.raises(CheckpointError, match="contains 2 additional tensors .value_head"):
        load_checkpoint(saved, model=plain)


def edited(folder: Path, **state) -> Path:
    """Change ``state.json`` of a checkpoint, and the manifest with it."""
    found = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(found | state))
    return rehashed(folder)


def test_run_folder_means_its_newest_checkpoint(saved, tmp_path, caplog):
    """The last phase and step; the clock, which may have been set back, decides between equals only."""
    run = tmp_path / "run"
    times = {"sft_000900": 50.0, "rl_000100": 40.0, "rl_000001": 30.0, "rl_000002": 20.0, "rl_000099": 10.0}
    for name, saved_at in times.items():
        edited(copied(saved, run / "checkpoints" / name), saved_at=saved_at)
    newest = run / "checkpoints" / "rl_000100"
    (run / "checkpoints" / ".rl_000103.tmp").mkdir()
    assert resolve_checkpoint(run) == resolve_checkpoint(run / "checkpoints") == resolve_checkpoint(newest) == newest
    assert caplog.text == ""
    (newest / "model" / "model.safetensors").write_bytes(b"short")
    with caplog.at_level(logging.WARNING, "rlinf"):
        assert resolve_checkpoint(run) == run / "checkpoints" / "rl_000099"
    assert len(caplog.records) == 1 and "rl_000100 is skipped" in caplog.text
    assert resolve_checkpoint(newest) == newest, "a folder that is named itself is not replaced by another"


def test_of_two_checkpoints_of_one_step_the_later_is_taken_and_other_names_go_by_their_state(saved, tmp_path):
    first = edited(copied(saved, tmp_path / "a"), saved_at=10.0, loop_state={"phase": "rl", "step": 4})
    edited(copied(saved, tmp_path / "b"), saved_at=9.0, loop_state={"phase": "rl", "step": 4})
    edited(copied(saved, tmp_path / "c"), saved_at=99.0, loop_state={"phase": "sft", "sft_step": 800, "step": 0})
    assert resolve_checkpoint(tmp_path) == first
    assert resolve_checkpoint(copied(saved, tmp_path / "rl_000005").parent).name == "rl_000005"


def test_pruning_goes_by_steps_when_the_clock_is_set_back(tmp_path, monkeypatch):
    model, optimizer = build()
    times = iter([500.0, 400.0, 300.0, 200.0])
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(time=lambda: next(times)))
    for number in (1, 2, 3, 4):
        save(tmp_path / f"rl_{number:06d}", model, optimizer, max_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl_000003", "rl_000004"]


def test_the_best_checkpoint_is_kept_next_to_the_newest(tmp_path):
    model, optimizer = build()
    for number in range(1, 6):
        save(tmp_path / f"rl_{number:06d}", model, optimizer, max_keep=2, best="rl_000002" if number > 1 else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl_000002", "rl_000004", "rl_000005"]
    assert json.loads((tmp_path / "rl_000005" / "state.json").read_text())["best_checkpoint"] == "rl_000002"
    save(tmp_path / "rl_000006", model, optimizer, max_keep=2, best="rl_000005")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl_000005", "rl_000006"]


def test_going_back_moves_what_came_later_out_of_the_way(saved, tmp_path, caplog):
    for name in ("sft_000003", "rl_000002", "rl_000004", "rl_000006"):
        copied(saved, tmp_path / name)
    checkpoints.set_aside_later(tmp_path / "rl_000006")
    assert caplog.text == "" and len(list(tmp_path.iterdir())) == 4, "a control: nothing comes after the newest"
    checkpoints.set_aside_later(tmp_path / "rl_000002")
    assert sorted(path.name for path in (tmp_path / "superseded_1").iterdir()) == ["rl_000004", "rl_000006"]
    assert resolve_checkpoint(tmp_path) == tmp_path / "rl_000002" and "rl_000004, rl_000006" in caplog.text
    copied(saved, tmp_path / "rl_000004")
    checkpoints.set_aside_later(tmp_path / "rl_000002")
    assert (tmp_path / "superseded_2" / "rl_000004").is_dir(), "nothing that was moved before is overwritten"
    shutil.rmtree(tmp_path / "superseded_1")  # by the user, who needs the space
    copied(saved, tmp_path / "rl_000004")
    checkpoints.set_aside_later(tmp_path / "rl_000002")
    assert (tmp_path / "superseded_3" / "rl_000004").is_dir()


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="There is no folder .*absent"):
        resolve_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no state.json in .*Specify a checkpoint folder or a run folder"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no manifest.json"):
        load_checkpoint(tmp_path, model=build()[0])


def test_oldest_checkpoints_of_a_phase_are_deleted(tmp_path):
    model, optimizer = build()
    (tmp_path / "notes").mkdir()
    for name in ("sft_000100", "sft_000200", "rl_000001", "rl_000002", "rl_000003", "rl_000004"):
        save(tmp_path / name, model, optimizer, max_keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["notes", "rl_000003", "rl_000004", "sft_000100", "sft_000200"]
    save(tmp_path / "rl_000002", model, optimizer, max_keep=1)  # a run that went back keeps what it wrote last
    assert sorted(path.name for path in tmp_path.glob("rl_*")) == ["rl_000002"]


def test_a_failed_save_leaves_the_former_checkpoint_and_the_next_one_replaces_it(tmp_path, monkeypatch):
    model, optimizer = build()
    (tmp_path / ".rl_000007.tmp" / "rng").mkdir(parents=True)  # by a process that was killed
    folder = save(tmp_path / "rl_000001", model, optimizer, step=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_model_files", full)
        with pytest.raises(CheckpointError, match="No space left on device.*output_dir"):
            save(folder, model, optimizer, step=2)
    for number in (1, 3):
        assert read_loop_state(resolve_checkpoint(tmp_path))["step"] == number
        assert [path.name for path in tmp_path.iterdir()] == ["rl_000001"]
        save(folder, model, optimizer, step=3)


class Exploit:
    def __reduce__(self):
        return (print, ("code from a file was run",))


@pytest.mark.parametrize("name", ["trainer_state/.metadata", "rng/rank_0.pt"])
def test_code_in_a_file_is_not_run(saved, tmp_path, name, capsys):
    folder = copied(saved, tmp_path / "rl_000002")
    if name.endswith(".pt"):
        torch.save(Exploit(), folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Exploit()))
    rehashed(folder)
    model, optimizer = build()
    with pytest.raises(CheckpointError, match=re.escape(name.split("/")[0])):
        load_checkpoint(folder, model=model, optimizer=optimizer)
    assert "was run" not in capsys.readouterr().out
    pickle.loads(pickle.dumps(Exploit()))
    assert "was run" in capsys.readouterr().out, "a control: an unrestricted pickle runs it"


def rehashed(folder: Path) -> Path:
    replace(Manifest.load(folder), files=checkpoints.hash_files(folder)).save(folder)
    return folder


def change_metadata(folder: Path, change) -> Path:
    """Edit DCP's index with an ordinary pickle, and the manifest with it."""
    path = folder / "trainer_state" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return rehashed(folder)


def as_bytes(prefix: str):
    def change(metadata):
        name = next(name for name in metadata.state_dict_metadata if name.startswith(prefix))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()

    return change


def outside(path: str):
    def change(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = replace(place, relative_path=path)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (as_bytes("model."), "as BytesStorageMetadata, but only tensors are allowed"),
        (as_bytes("optimizer."), "as BytesStorageMetadata, but only tensors are allowed"),
        (outside("../../elsewhere.distcp"), "refers to the file '../../elsewhere.distcp'"),
        (outside("/elsewhere/__0_0.distcp"), "which is not a data file of the folder"),
        (lambda metadata: metadata.__dict__.update(state_dict_metadata=[1]), "cannot be read"),
        (lambda metadata: metadata.__dict__.update(storage_data=None), "cannot be read"),
    ],
)
def test_an_index_with_anything_but_tensors_of_the_folder_is_refused(saved, tmp_path, change, words):
    folder = copied(saved, tmp_path / "rl_000002")
    model, optimizer = build()
    load_checkpoint(change_metadata(folder, lambda metadata: None), model=model, optimizer=optimizer)  # a control
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_checkpoint(change_metadata(folder, change), model=model, optimizer=optimizer)


@pytest.mark.parametrize("content", [Exploit(), [1, 2], {"python": {}}, {"python": 1, "numpy": 2}])
def test_a_damaged_random_state_is_one_sentence_without_dangerous_advice(saved, tmp_path, content):
    folder = copied(saved, tmp_path / "rl_000002")
    torch.save(content, folder / "rng" / "rank_0.pt")
    with pytest.raises(
        CheckpointError, match="rank_0.pt contains no random states .* Use a different checkpoint"
    ) as error:
        load_checkpoint(rehashed(folder), model=build()[0])
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [({}, "lists no files"), ([], "'files' is a list, not a mapping"), ("x", "is a str"), (None, "is a NoneType"),
     ({"../x": "0"}, "'files' lists '../x'"), ({"state.json": 1}, "with its SHA-256")],
)  # fmt: skip
def test_a_manifest_whose_files_vouch_for_nothing_is_refused(saved, tmp_path, files, words, caplog):
    folder = copied(saved, tmp_path / "rl_000002")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_checkpoint(folder, model=build()[0])
    with pytest.raises(CheckpointError, match="all damaged"):
        resolve_checkpoint(tmp_path)


def test_a_full_disk_is_one_sentence_with_the_file_and_the_free_space(tmp_path, monkeypatch):
    model, optimizer = build()
    write = torch.save

    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    def torch_full(value, place, *more, **settings):
        if "rank_0" not in str(place):
            return write(value, place, *more, **settings)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    for place, name, fails, file in (
        (torch, "save", torch_full, "rank_0.pt"),
        (checkpoints.Path, "write_bytes", full, "state.json"),
        (checkpoints.Manifest, "save", full, "rl_000001"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            with pytest.raises(CheckpointError) as error:
                save(tmp_path / "rl_000001", model, optimizer)
        said = str(error.value)
        assert file in said and "inline_container" not in said and "\n" not in said
        assert re.search(r"\(([\d,.]+) MiB free\)", said) or place is checkpoints.Manifest, said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "rejection"),
    [(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
      (CheckpointError, r"MiB free\): '.*__0_0.distcp'. Check disk space")),
     (KeyboardInterrupt("a second Ctrl-C"), (KeyboardInterrupt, ""))],
)  # fmt: skip
def test_an_error_within_the_shards_names_the_file_unless_it_is_ctrl_c(tmp_path, monkeypatch, error, rejection):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", fail)
    with pytest.raises(rejection[0], match=rejection[1]):
        save(tmp_path / "rl_000001", *build())
    assert list(tmp_path.iterdir()) == []


def train_on_two_ranks(folder: str) -> None:
    """Two steps, save, two steps; then from the checkpoint the last two again."""
    torch.set_num_threads(1)
    run = Path(folder)
    model, _ = build()
    Sharded(model, "cpu")
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    steps(2, model, optimizer)
    torch.manual_seed(10)
    random.seed(rank())
    saved = save(run / "rl_000002", model, optimizer)
    expected_random = random.random()
    steps(2, model, optimizer)
    straight = weights_of(model)
    resumed, _ = build(seed=4)
    Sharded(resumed, "cpu")
    resumed_optimizer = optimizer_of(resumed)
    load_checkpoint(saved, model=resumed, optimizer=resumed_optimizer)
    assert random.random() == expected_random
    steps(2, resumed, resumed_optimizer)
    assert equal(weights_of(resumed), straight)
    if rank() == 0:
        torch.save(straight, run / "straight.pt")


def test_two_sharded_ranks_save_what_one_process_resumes(tmp_path, caplog):
    launch(train_on_two_ranks, str(tmp_path), 2, "cpu")
    folder = tmp_path / "rl_000002"
    assert {path.name for path in (folder / "rng").iterdir()} == {"rank_0.pt", "rank_1.pt"}
    assert json.loads((folder / "model" / "config.json").read_text())["architectures"] == ["Tiny"]
    model, optimizer = build(seed=7)
    with caplog.at_level(logging.WARNING, "rlinf"):
        load_checkpoint(folder, model=model, optimizer=optimizer)
    assert "saved by 2 ranks and is loaded by 1" in caplog.text
    assert equal(weights_of(model), {n: t for n, t in load_file(folder / "model" / "model.safetensors").items()})
    torch.manual_seed(10)
    steps(2, model, optimizer)
    straight = torch.load(tmp_path / "straight.pt", weights_only=True)
    difference = max(float((weights_of(model)[name] - straight[name]).abs().max()) for name in straight)
    assert difference < 1e-5, f"one rank must continue as two would: {difference}"


def load_on_two_ranks(folder: str) -> None:
    model, _ = build(seed=3)
    Sharded(model, "cpu")
    optimizer = optimizer_of(model)
    load_checkpoint(folder, model=model, optimizer=optimizer)
    expected = load_file(Path(folder) / "model" / "model.safetensors")
    assert equal(weights_of(model), expected)
    moments = [full_tensor(state["exp_avg"]).abs().sum() for state in optimizer.state.values()]
    assert len(moments) > 10 and all(float(moment) > 0 for moment in moments)
    missing = Path(folder).parent / "missing"
    try:
        load_checkpoint(missing, model=model)
        raise AssertionError("both ranks must raise")
    except CheckpointError as error:
        assert "no manifest.json" in str(error)


def test_one_process_saves_what_two_sharded_ranks_load(saved):
    launch(load_on_two_ranks, str(saved), 2, "cpu")
