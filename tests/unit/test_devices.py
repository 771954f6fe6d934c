"""Which GPU each rank, simulator and engine of a made-up machine takes; no GPU is needed to tell."""

import ast
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_environments
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlinf.distributed import launch, process_group
from rlinf.distributed.devices import engine_gpus, rank_environment, rank_index, visible_gpus
from rlinf.distributed.parallel import StateBytes
from rlinf.engines import vllm_engine
from rlinf.engines.vllm_engine import EngineSpec, VllmEngine
from rlinf.engines.vllm_weights import TensorNames
from rlinf.engines.weight_handle import WeightBuffer
from rlinf.envs.graphics import backend as graphics
from rlinf.errors import ConfigError
from rlinf.llm import causal_lm, hf_policy
from rlinf.llm.hf_model import model_shapes

pytestmark = pytest.mark.new_processes
ROOT = Path(__file__).parents[2]
EIGHT = [str(number) for number in range(8)]
UUIDS = [f"GPU-{number:x}0000000-0000" for number in range(8)]


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [
        (None, 8, EIGHT),
        (None, 0, []),
        ("5,2,7", 3, ["5", "2", "7"]),
        (" 5 , 2", 2, ["5", "2"]),
        ("", 0, []),
        ("-1", 0, []),
        ("3,-1,4", 1, ["3"]),
        (",".join(UUIDS[:2]), 2, UUIDS[:2]),
        ("MIG-1a/1/0,MIG-1a/2/0", 1, ["MIG-1a/1/0"]),  # CUDA shows a process one part of a GPU
    ],
)
def test_the_gpus_of_a_machine_are_named_as_cuda_orders_them(variable, count, expected):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, count) == expected


# A machine: CUDA_VISIBLE_DEVICES of the launcher, CUDA's numbers of the EGL devices, and what each rank gets of both.
MACHINES = {
    "eight GPUs, EGL in another order": (None, 8, [None, 3, 1, 0, 2, 7, 6, 5, 4], EIGHT, ["3", "2", "4", "1", "8", "7", "6", "5"]),
    "a permuted choice": ("5,2", 2, [7, 5, 3, 2, 1, 0, 4, 6], ["5", "2"], ["1", "3"]),
    "UUIDs": (f"{UUIDS[6]},{UUIDS[1]}", 2, [1, 0, 2, 3, 4, 5, 6, 7], [UUIDS[6], UUIDS[1]], ["6", "0"]),
    "parts of GPUs, which do not render": ("MIG-a,MIG-b", 2, [0], ["MIG-a", "MIG-b"], [None, None]),
    "EGL without NVIDIA": ("0,1", 2, [None], ["0", "1"], [None, None]),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_rank_computes_and_renders_on_a_gpu_of_its_own(machine):
    variable, count, egl, own, rendering = machine
    launcher = {"HOME": "x"} if variable is None else {"CUDA_VISIBLE_DEVICES": variable, "HOME": "x"}
    chosen = graphics.egl_device(launcher, egl, UUIDS)
    if chosen is not None:  # as ``choose_backend`` leaves it in the launcher, for its own GPU
        launcher |= {"MUJOCO_EGL_DEVICE_ID": chosen, "RLINF_CHOSEN_EGL_DEVICE_ID": chosen}
    ranks = [rank_environment(launcher, visible_gpus(launcher, count), rank) for rank in range(count)]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == own
    assert [graphics.egl_device(rank, egl, UUIDS) for rank in ranks] == rendering
    assert all(rank["HOME"] == "x" for rank in ranks)
    with pytest.raises(ConfigError, match=rf"Rank {count} needs its own GPU.*{own[-1]}.*cluster.num_processes={count}"):
        rank_environment(launcher, visible_gpus(launcher, count), count)
    # A device that the user has chosen stays, for all ranks.
    users = {**launcher, "MUJOCO_EGL_DEVICE_ID": "7", "RLINF_CHOSEN_EGL_DEVICE_ID": "6"}
    assert rank_environment(users, own, 1)["MUJOCO_EGL_DEVICE_ID"] == "7"


def test_a_rank_and_its_processes_see_one_gpu_from_their_beginning(tmp_path, monkeypatch):
    """Two ranks on the CPU, told that CUDA shows two GPUs; the launcher has chosen an EGL device for its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")
    monkeypatch.setenv("RLINF_CHOSEN_EGL_DEVICE_ID", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "backend_of", lambda device: process_group.GLOO)
    start = launch.mp.start_processes

    def on_the_cpu(function, arguments, **options):
        moved = (each._replace(device="cpu") if isinstance(each, launch.Work) else each for each in arguments)
        return start(function, tuple(moved), **options)

    monkeypatch.setattr(launch.mp, "start_processes", on_the_cpu)
    launch.launch(rank_environments.tell_environment, str(tmp_path / "rank"), 2, "cuda")
    assert [(tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1)] == [["5", "None"], ["2", "None"]]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,2"
    with pytest.raises(ConfigError, match="Rank 2 needs its own GPU"):
        launch.launch(rank_environments.tell_environment, str(tmp_path / "rank"), 3, "cuda")


@pytest.mark.parametrize(
    ("environment", "count", "current", "has_ranks", "expected"),
    [
        ({}, 8, 0, False, 0),
        ({"LOCAL_RANK": "3"}, 1, 0, True, 0),  # isolated
        ({"LOCAL_RANK": "3"}, 8, 0, True, 3),  # torchrun shows all
        ({"LOCAL_RANK": "3"}, 8, 5, True, 5),  # the script has set another one
        ({"LOCAL_RANK": "3"}, 8, 0, False, 0),
    ],
)
def test_the_gpu_of_a_rank_is_its_own_with_and_without_isolation(environment, count, current, has_ranks, expected):
    assert rank_index(environment, count, current, has_ranks) == expected


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match="LOCAL_RANK=3 needs its own GPU, but torch sees 2"):
        rank_index({"LOCAL_RANK": "3"}, 2, 0, True)


def test_an_engine_has_the_gpus_from_its_owners_on():
    assert engine_gpus(["5", "2", "7"], 1, 2, "tp") == ["2", "7"]
    assert engine_gpus(["GPU-a"], 0, 1, "tp") == ["GPU-a"] and engine_gpus([], 0, 4, "tp") == []
    trainers = [rank_environment({}, EIGHT[:4], rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)]
    assert trainers == ["0", "1"] and engine_gpus(EIGHT[:4], 2, 2, "tp") == ["2", "3"]
    with pytest.raises(ConfigError, match="tp=3 needs 3 GPUs starting at '2', but this process sees 5, 2, 7. Set tp=2"):
        engine_gpus(["5", "2", "7"], 1, 3, "tp")


def test_an_engine_that_starts_again_in_another_thread_comes_back_on_its_gpus(monkeypatch):
    """A thread's current device is 0, whatever the main thread's is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4,1")
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    started = []
    start = lambda *_, env, **__: started.append(env["CUDA_VISIBLE_DEVICES"]) or 1 / 0  # noqa: E731
    monkeypatch.setattr(vllm_engine.subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    engine = VllmEngine(EngineSpec(model="x", engine_args={"tensor_parallel_size": 2}))
    for current in (1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        with pytest.raises(ZeroDivisionError):
            engine.start()
    assert started == ["4,1", "4,1"]
    with pytest.raises(ConfigError, match="vllm_cfg.tensor_parallel_size=4 needs 4 GPUs"):
        VllmEngine(EngineSpec(model="x", engine_args={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))


def test_what_a_tensor_parallel_engine_is_sent_does_not_grow_with_the_weights():
    """Each of its processes gets the call in a pickle."""
    buffer, required = WeightBuffer(), {f"layer.{k}": torch.zeros(100, 1000, device="meta") for k in range(20)}
    weights = {name: torch.randn(100, 1000) for name in required}
    handle, names = buffer.write(weights, 1), TensorNames(required)
    sent = pickle.dumps((handle, names))
    assert len(sent) < 20_000 < 8_000_000 < len(pickle.dumps(list(names.read(handle.open()).items())))  # a control
    handle, names = pickle.loads(sent)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in names.read(handle.open()).items())


def test_a_policy_of_a_rank_is_loaded_on_the_ranks_own_gpu(monkeypatch, tiny_lm):
    """Not spread over all GPUs, where it would meet the other ranks."""
    moved, spread, loaded = [], [], AutoModelForCausalLM.from_pretrained(tiny_lm())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(causal_lm, "take_own_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(causal_lm, "_load_spread", lambda name, device_map, **_: spread.append(device_map) or loaded)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: moved.append(device))
    config = causal_lm.CausalLMConfig()
    for has_ranks in (True, False):
        monkeypatch.setattr(causal_lm, "dist", SimpleNamespace(is_initialized=lambda has_ranks=has_ranks: has_ranks))
        causal_lm.load_causal_lm(tiny_lm(), config)
    assert moved == [torch.device("cuda", 3)] and spread == ["auto"]
    monkeypatch.setattr(causal_lm, "dist", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(causal_lm, "_quantization", lambda config: {"quantization_config": 8})
    causal_lm.load_causal_lm(tiny_lm(), config)
    assert spread[-1] == {"": torch.device("cuda", 3)}


def names_a_device(code: str) -> list[int]:
    """Lines that take a CUDA device which is not known to be this rank's: ``.cuda()``, ``to("cuda")``, ``current_device()``..."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
        bare = any(isinstance(value, ast.Constant) and value.value == "cuda" for value in given)
        named = any(keyword.arg == "device" for keyword in node.keywords) or called in ("to", "device")
        if called in ("cuda", "current_device", "set_device") or (bare and named):
            lines.append(node.lineno)
    return lines


def test_one_file_alone_chooses_cuda_devices():
    files = [path for path in (ROOT / "rlinf").rglob("*.py") if path.name != "devices.py"]
    codes = {str(path): path.read_text(encoding="utf-8") for path in files}
    asking = {path: code for path, code in codes.items() if re.search("cuda|current_device|set_device", code)}
    assert len(files) > 100 and len(asking) > 10
    assert {path: lines for path, code in asking.items() if (lines := names_a_device(code))} == {}
    for line in ("x.cuda()", "x.to('cuda')", "torch.zeros(3, device='cuda')", "torch.device('cuda', 1)",
                 "torch.cuda.set_device(0)", "torch.cuda.current_device()"):  # fmt: skip
        assert names_a_device(line) == [1], line
    assert names_a_device("backend_of('cuda'); x.to(own_device())") == []


def test_training_all_weights_of_a_model_that_cannot_fit_is_refused_before_they_are_read(monkeypatch, tiny_lm):
    """7.62 billion weights in bfloat16: 2 + 2 + 4 + 4 + 8 bytes each, 152 GB."""
    with torch.device("meta"):
        layer = torch.nn.Linear(762, 10_000_000, bias=False, dtype=torch.bfloat16)
    assert StateBytes.of(layer, None).total == 24 * 7_620_000_000 - 4 * 7_620_000_000 == 152_400_000_000
    assert StateBytes.of(layer, 8).total == 16 * 7_620_000_000 // 8
    assert StateBytes.of(torch.nn.Linear(10, 1, bias=False), None).total == 160
    loaded, memory = [], SimpleNamespace(total_memory=10**6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)
    monkeypatch.setattr(hf_policy, "own_device", lambda: torch.device("cuda", 1))

    class Loaded(Exception):
        pass

    def load(*_, **settings):
        loaded.append(True)
        raise Loaded

    monkeypatch.setattr(hf_policy, "load_causal_lm", load)
    options, large = {"torch_dtype": "bfloat16"}, tiny_lm(hidden_size=512, intermediate_size=5000)
    places = {"cuda:1": "its GPUs have 0.001 GB", "auto": "its GPUs have 0.002 GB"}
    for device_map, there in places.items():
        with pytest.raises(ConfigError, match=rf"needs 0\.3\d* GB.*{re.escape(there)}.*Pass lora=\{{\}}"):
            hf_policy.HuggingFacePolicy(large, device_map=device_map, **options)
    assert not loaded
    for device_map in (None, "cpu"):  # the memory of GPUs does not matter
        with pytest.raises(Loaded):
            hf_policy.HuggingFacePolicy(large, device_map=device_map, **options)
    loaded.clear()
    with pytest.raises(Loaded):
        hf_policy.HuggingFacePolicy(tiny_lm(), **options, lora={})
    memory.total_memory = 10**10
    with pytest.raises(Loaded):
        hf_policy.HuggingFacePolicy(tiny_lm(), **options)
    assert len(loaded) == 2


def small_llava():
    """No architectures: what the Auto classes choose, as for the loader."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 100, **sizes}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    return AutoConfig.for_model("llava", text_config=text, vision_config=vision)


def num_weights(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_weights_of_a_vision_language_model_are_counted(tmp_path):
    config = small_llava()
    config.save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_config(config)
    assert num_weights(model_shapes(tmp_path)) == num_weights(model) > 10_000
