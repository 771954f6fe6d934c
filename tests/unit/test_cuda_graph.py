"""The kernels of OpenVLA, OpenVLA-OFT and pi0 as CUDA graphs, as far as a machine without a GPU can show it.

``Tape`` does on the CPU what a CUDA graph does: it keeps the operations that a function ran and the tensors that they read and
wrote, and runs these again without any Python of the function. On the device "meta", which holds no numbers, an operation that
reads one in Python, or moves one between devices, is seen.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError
from rlinf.models import build_policy, cuda_graph, get_model, precision
from rlinf.models.cuda_graph import CudaGraphs
from rlinf.preflight.validation import validate
from tests.unit import test_openvla_oft as oft
from tests.unit import test_pi0_model as pi0
from tests.unit.test_openvla_model import build
from tests.unit.test_openvla_model import observe as four_rows

READS_A_NUMBER = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    """Records operations and the tensors of them; ``launch`` runs them again on the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS_A_NUMBER:
            raise RuntimeError(f"{function} reads a number while a graph is recorded")
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, made))
        return made

    @torch.autocast("cpu", enabled=False)  # the casts are among the operations
    def launch(self):
        for function, args, kwargs, made in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_of(made), tensors_of(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


def tensors_of(made):
    return [each for each in (made if isinstance(made, tuple | list) else [made]) if isinstance(each, torch.Tensor)]


def observe(kind):
    """Eight rows: a recording has as many, so that its matrix products have the shapes of the policy's own."""
    return four_rows(kind).select([0, 1, 2, 3, 3, 2, 1, 0])


@pytest.fixture
def tapes(monkeypatch):
    """Use tapes for graphs; returns the list of those recorded."""
    recorded = []

    def capture(run, pool):
        tape = Tape()
        with tape:
            outputs = run()
        recorded.append(tape)
        return tape.launch, outputs

    monkeypatch.setattr(cuda_graph, "_capture", capture)
    monkeypatch.setattr(cuda_graph, "_new_pool", lambda device: "pool")
    monkeypatch.setattr(cuda_graph, "_wait_for_present", lambda: lambda: None)
    return recorded


def act(model, observation, seed=0, **settings):
    uniforms = torch.rand(len(observation), model.num_uniforms, generator=torch.Generator().manual_seed(seed))
    return model.predict_action_batch(**model.preprocess(observation), uniforms=uniforms, **settings)


def assert_equal(found, expected, atol=0.0):
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["autoregressive", "fused_towers"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_graph_acts_as_the_policy_does(tapes, kind, attention):
    plain, model = (
        build(kind, attn_implementation=attention),
        build(kind, attn_implementation=attention, cuda_graph=True),
    )
    observation = observe(kind)
    first = act(plain, observation)
    assert_equal(act(model, observation), first)
    assert len(tapes) == 1
    for seed in (1, 2):  # another draw, then other images and instructions of the same shapes
        rows = observation.select([3, 1, 0, 2, 0, 0, 1, 2] if seed == 2 else list(range(8)))
        found = act(model, rows, seed)
        assert_equal(found, act(plain, rows, seed))
        assert not torch.equal(found.sequences, first.sequences), "control: it is another draw"
    assert len(tapes) == 1, "nothing is recorded again"
    assert_equal(act(model, observation, do_sample=False), act(plain, observation, do_sample=False))
    assert_equal(act(model, observation, temperature=0.5), act(plain, observation, temperature=0.5))
    assert len(tapes) == 3, "greedy and another temperature each have a graph of their own"
    few = observation.select([1, 2, 3])
    assert_equal(act(model, few), act(plain, few), atol=1e-5)
    assert_equal(act(model, observation), first)
    assert len(tapes) == 3, "the first one still serves, fewer rows too"


@pytest.mark.parametrize("padded, num_recordings", [(None, 4), (lambda rows: rows, 64)])
def test_a_rollout_that_shrinks_from_64_rows_to_1_has_four_recordings(tapes, monkeypatch, padded, num_recordings):
    """With a recording for each number of rows (the control) it has 64."""
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 64)
    if padded is not None:
        monkeypatch.setattr(cuda_graph, "padded_rows", padded)
    graphs, weight = CudaGraphs(), torch.full((3,), 2.0)

    def scaled(x, ids):
        return x * weight, ids + 1

    for rows in range(64, 0, -1):
        x, ids = torch.rand(rows, 3), torch.arange(rows)
        found = graphs.run(scaled, [x, ids], weights=lambda: [weight])
        for ours, theirs in zip(found, scaled(x, ids), strict=True):
            assert torch.equal(ours, theirs)
    assert len(tapes) == num_recordings


def test_a_launch_waits_for_the_one_before_it_on_any_stream(tapes, monkeypatch):
    """Streams of different threads share the memory of a recording."""
    events, numbers = [], iter(range(3))

    def mark():
        number = next(numbers)
        events.append(f"end of {number}")
        return lambda: events.append(f"wait for {number}")

    monkeypatch.setattr(cuda_graph, "_wait_for_present", mark)
    graphs, weight = CudaGraphs(), torch.ones(1)
    for _ in range(3):
        graphs.run(lambda x: (x * weight,), [torch.ones(8)], weights=lambda: [weight])
    assert events == ["end of 0", "wait for 0", "end of 1", "wait for 1", "end of 2"]


@pytest.mark.parametrize("kind", ["parallel", "oft", "oft l1", "pi0", "pi0.5", "pi0.5 joint"])
def test_policies_that_do_not_decode_token_by_token_act_by_a_graph_too(tapes, kind):
    if kind == "parallel":
        plain, model, rows = build(kind), build(kind, cuda_graph=True), observe(kind)
    elif kind.startswith("oft"):
        head = "l1" if "l1" in kind else "everything"
        plain, model = oft.build(head), oft.build(head, cuda_graph=True)
        rows = oft.observe([0, 1, 2, 3, 3, 2, 1, 0])
    else:
        settings = {"pi05": "0.5" in kind, "joint_logprob": "joint" in kind}
        plain, model, rows = pi0.make(**settings), pi0.make(**settings), pi0.observe(8)
        model.check_cuda_graph(model.config, "sdpa")
        model.use_cuda_graph()
    atol = 1e-5 if kind.startswith("pi0") else 0.0  # whose prompts are filled up
    first = act(plain, rows)
    assert_equal(act(model, rows), first, atol)
    assert_equal(act(model, rows, 1), act(plain, rows, 1), atol)
    assert len(tapes) == 1
    if kind != "oft l1":
        assert (act(model, rows, 1).actions - first.actions).abs().max() > 0.01, "control: it is another draw"
    few = rows.select([5, 2, 1])
    assert_equal(act(model, few), act(plain, few), atol=1e-5)
    assert_equal(act(model, few, do_sample=False), act(plain, few, do_sample=False), atol=1e-5)
    before = len(tapes)
    with torch.no_grad():
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.mul_(1.25)
    after = act(model, rows)
    assert_equal(after, act(plain, rows), 100 * atol)
    assert len(tapes) == before, "it reads the new weights in place"
    assert (after.logits - first.logits).abs().max() > 0.01


@pytest.mark.parametrize("block, num_recordings", [(64, 1), (1, 2)])
def test_prompts_of_several_lengths_share_a_recording_of_pi0(tapes, monkeypatch, block, num_recordings):
    """Unless each length has its own (the control)."""
    monkeypatch.setattr("rlinf.models.embodiment.pi0.policy.PROMPT_BLOCK", block)
    plain, model, rows = pi0.make(True), pi0.make(True), pi0.observe(8)
    model.use_cuda_graph()
    for sentence in ("push it", "push it to the red block"):
        rows.instruction = [sentence] * 8
        assert_equal(act(model, rows), act(plain, rows), atol=1e-5)
    assert len(tapes) == num_recordings


def test_an_update_in_place_needs_no_new_graph_and_moved_weights_do(tapes):
    plain, model = build("autoregressive"), build("autoregressive", cuda_graph=True)
    observation = observe("autoregressive")
    before = act(model, observation)
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            moved = one + 0.1 * torch.randn_like(one)
            one.copy_(moved), other.copy_(moved)
    after = act(model, observation)
    assert_equal(after, act(plain, observation))
    assert len(tapes) == 1 and not torch.equal(after.logits, before.logits)
    for parameter in (*plain.parameters(), *model.parameters()):
        parameter.data = parameter.data * 0.9
    assert_equal(act(model, observation), act(plain, observation))
    assert len(tapes) == 2


def test_outputs_are_not_those_of_the_next_launch(tapes):
    model, observation = build("autoregressive", cuda_graph=True), observe("autoregressive")
    first = act(model, observation, 0)
    kept = copy.deepcopy(first)
    act(model, observation, 1)
    assert_equal(first, kept)


def test_a_copy_has_no_graphs_and_threads_take_turns(tapes):
    plain, model, observation = (
        build("autoregressive"),
        build("autoregressive", cuda_graph=True),
        observe("autoregressive"),
    )
    act(model, observation)
    twin = copy.deepcopy(model)
    assert twin._graphs is not model._graphs and not twin._graphs._recordings
    found = {}

    def play(number):
        for seed in range(3):
            found[number, seed] = act(model, observation, 10 * number + seed)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(3)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    for (number, seed), prediction in found.items():
        assert_equal(prediction, act(plain, observation, 10 * number + seed))
    assert len(found) == 9 and len(tapes) == 1


def test_the_graphs_least_recently_used_go_first(tapes, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    graphs, weight = CudaGraphs(), torch.ones(1)

    def doubled(length):
        return graphs.run(lambda x: (2 * x,), [torch.arange(length)[None]], weights=lambda: [weight])[0].tolist()

    for length in (1, 2, 1, 3):
        assert doubled(length) == [[2 * n for n in range(length)]]
    assert len(tapes) == 3
    doubled(1)
    assert len(tapes) == 3, "1 was used after 2"
    doubled(2)
    assert len(tapes) == 4


def test_autocast_is_part_of_what_is_recorded(tapes, monkeypatch):
    monkeypatch.setattr(
        cuda_graph, "_autocast_dtype", lambda: torch.bfloat16 if torch.is_autocast_enabled("cpu") else None
    )
    plain, model, observation = (
        build("autoregressive"),
        build("autoregressive", cuda_graph=True),
        observe("autoregressive"),
    )
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model.predict_values(**model.preprocess(observation))  # autocast now holds casts of the weights
            assert_equal(act(model, observation), act(plain, observation))
            with torch.no_grad():
                for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                    one.mul_(1.5), other.mul_(1.5)
            torch.clear_autocast_cache()
            assert_equal(act(model, observation), act(plain, observation))
    assert len(tapes) == 1, "the casts are part of the graph, so it reads the new weights"
    assert_equal(act(model, observation), act(plain, observation))
    assert len(tapes) == 2


def test_a_function_that_reads_a_number_is_not_recorded(tapes):
    """The control of the tests above."""
    graphs, weight = CudaGraphs(), torch.ones(1)
    with pytest.raises(RuntimeError, match="reads a number"):
        graphs.run(lambda x: (x * int(x.sum()),), [torch.ones(3)], weights=lambda: [weight])


class OneDevice(TorchDispatchMode):
    """Raises where an operation makes a tensor that is not on the device "meta", which holds no numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        elsewhere = {each.device.type for each in tensors_of(made)} - {"meta"}
        if elsewhere:
            raise RuntimeError(f"{function} makes a tensor on {elsewhere.pop()}")
        return made


@pytest.mark.parametrize("pi05", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_denoising_reads_no_number_and_stays_on_its_device(monkeypatch, pi05, joint):
    for module in ("pi0.network", "modules.value_head"):  # autocast knows no device "meta"
        monkeypatch.setattr(f"rlinf.models.embodiment.{module}.without_autocast", lambda _: nullcontext())
    model = pi0.make(pi05, joint_logprob=joint)
    inputs = model.preprocess(pi0.observe())
    names, inputs = tuple(inputs), [tensor.to("meta") for tensor in inputs.values()]
    model.to("meta")
    noise = torch.empty(4, 1 + (4 if joint else 1), 3, 5, device="meta")
    step = torch.empty(4, dtype=torch.int64, device="meta")
    with torch.no_grad(), OneDevice():
        chain, moments, values = model._run_chain(noise[:, 0], noise[:, 1:], step, *inputs, names, joint, 1.0)
    assert chain.shape == (4, 5 * 3 * 5) and moments.shape == (4, 4, 3, 5, 2) and values.shape == (4,)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_decoding_reads_no_number_and_stays_on_its_device(monkeypatch, padded, lora):
    monkeypatch.setattr(precision, "without_autocast", lambda tensor: nullcontext())  # autocast knows no device "meta"
    model = build("autoregressive", is_lora=lora).to("meta")
    embeddings = torch.empty(4, 9, 32, device="meta")
    mask = torch.ones(4, 9, dtype=torch.bool, device="meta") if padded else None
    uniforms = torch.empty(4, 6, device="meta")
    with torch.no_grad(), OneDevice():
        bins, logits, _ = model._decode_tokens(embeddings, mask, uniforms, True, 1.0)
        assert bins.shape == (4, 6) and logits.shape == (4, 6, 21) and bins.device.type == "meta"
        with pytest.raises(RuntimeError, match="makes a tensor on cpu"):  # controls
            torch.zeros(3)
        with pytest.raises(RuntimeError, match="meta"):
            bool(bins.sum() > 0)


def test_without_a_gpu_the_option_is_refused_by_name():
    words = ["env=tabletop", "model.cuda_graph=true", "cluster.device=cpu"]
    for command in ("train", "evaluate"):
        with pytest.raises(ConfigError, match="model.cuda_graph=true on the device 'cpu'.*Set model.cuda_graph=false"):
            validate(build_config(compose_config(["model=openvla_tiny", *words])), command)
    model = build("autoregressive", cuda_graph=True)
    with pytest.raises(ConfigError, match="need an NVIDIA GPU, but the weights are on 'cpu'. Pass cuda_graph=False"):
        act(model, observe("autoregressive"))


@pytest.mark.parametrize(
    "model, message",
    [
        ("model=mlp", "but not by MLPForRLActionPrediction"),
    ],
)
def test_policies_without_a_part_that_is_recorded_are_refused(monkeypatch, model, message):
    monkeypatch.setattr("rlinf.preflight.compatibility.resolve_device", lambda *_: "cuda")
    state = "env.state=full" if model == "model=mlp" else "env.state=proprio"
    config = build_config(compose_config([model, "env=tabletop", state, "model.cuda_graph=true"]))
    with pytest.raises(ConfigError, match=f"{message}. Set model.cuda_graph=false"):
        validate(config)
    if model == "model=mlp":
        section = {"model_type": "mlp", "init_config": {"state_dim": 3}, "cuda_graph": True}
        with pytest.raises(ConfigError, match=message):
            get_model(section)


def test_rows_beyond_64_are_padded_to_multiples_and_flash_attention_is_refused_with_a_graph():
    assert [cuda_graph.padded_rows(rows) for rows in (64, 65, 129)] == [64, 128, 192]
    config = build_config(compose_config(["model=openvla_tiny", "model.init_config.action_decoding=autoregressive"]))
    section = {"model_type": "openvla", "attn_implementation": "sdpa", "cuda_graph": True}
    policy = build_policy(
        {"model": section | {"init_config": config.model.init_config | {"learned_placeholders": False}}}
    )
    with pytest.raises(ConfigError, match="model.attn_implementation=flash_attention_2, which needs the lengths"):
        policy.check_cuda_graph(policy.config, "flash_attention_2")
