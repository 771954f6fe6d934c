"""Ranks that read only their rows of the weights hold those of one process, bit for bit, and read a fraction of the bytes."""

import copy
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rlinf.algorithms import NLLLossFn
from rlinf.commands.export import random_observation
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.distributed.deferred import FileTensor, deferred_parameters, is_deferred, open_tensors
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Sharded, local_part, make_parallel
from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import CheckpointError
from rlinf.models import HFModel, HuggingFacePolicy, build_policy
from rlinf.models.config import TokenizerConfig
from rlinf.models.embodiment.modules.normalizer import unit_range_stats
from rlinf.models.weights_in_files import check_read, how_read

SIZES = {
    "openvla": [
        "model=openvla_tiny", "model.hidden_size=16", "model.init_config.text_config.hidden_size=16",
        "model.init_config.text_config.intermediate_size=32", "model.init_config.text_config.num_hidden_layers=2",
        "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]",
    ],
    "oft": [
        "model=openvla_oft_tiny", "model.hidden_size=16", "model.init_config.text_config.hidden_size=16",
        "model.init_config.text_config.intermediate_size=32", "model.init_config.text_config.num_hidden_layers=2",
        "model.init_config.mlp_stem_dim=16",
        "model.init_config.vision_overrides=[{embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 2}]",
    ],
    "pi0": ["model=pi0_tiny"],
    "cnn": ["model=cnn"],
}  # fmt: skip
LORA = ["model.is_lora=true", "model.lora.rank=2"]


def config_of(family, *overrides):
    size = 64 if family in ("pi0", "cnn") else 32
    base = ["env=tabletop", "env.state=proprio", f"env.image_size={size}", "cluster.device=cpu"]
    return build_config(compose_config([*base, *SIZES[family], *overrides]))


def saved(family, folder, *, value_head=True):
    """Write a policy with random weights, in several files."""
    torch.manual_seed(1)
    head = [] if value_head else ["model.value_head=false"]
    policy = build_policy(config_of(family, *head), {"norm_stats": unit_range_stats(2, 4)})
    with torch.no_grad():
        for parameter in policy.parameters():  # nothing is zero or one, as new biases and norms are
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save_pretrained(folder, max_shard_size="20KB")
    if family != "cnn":  # a plain policy is small, so it has one file
        assert len(list(Path(folder).glob("model*.safetensors"))) > 1
    return str(folder)


def from_folder(family, folder, *overrides):
    config = config_of(family, *overrides)
    return replace(
        config, model=replace(config.model, model_path=str(folder), init_config={}), tokenizer=TokenizerConfig()
    )


def built(config, *, deferred):
    torch.manual_seed(0)
    return build_policy(config, deferred=deferred)


@contextmanager
def counted():
    """Yield a list to which the bytes of rows that are read inside are added."""
    rows, sizes = FileTensor.rows, []

    def count(self, *place):
        found = rows(self, *place)
        sizes.append(found.numel() * found.element_size())
        return found

    FileTensor.rows = count
    try:
        yield sizes
    finally:
        FileTensor.rows = rows


def tensors_of(model):
    """All numbers of a model with the buffers that no file holds."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def parts_of(model):
    """This rank's parts of ``tensors_of``, each with its place in the whole."""
    parts = {name: local_part(tensor) for name, tensor in tensors_of(model).items()}
    return {name: (part.clone(), where) for name, (part, where) in parts.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def assert_parts_of(expected, found):
    """Compare what ranks hold with whole tensors, of which each row is somewhere; trained 16-bit weights are float32 in shards."""
    for name, tensor in expected.items():
        rows = 0
        for part, where in (parts[name] for parts in found):
            assert torch.equal(part.to(tensor.dtype), tensor[where]), name
            rows += len(part) if where[0] is not ... else 0
        assert rows in (0, *tensor.shape[:1]), name
    assert all(parts.keys() == expected.keys() for parts in found)


def without_path(model):
    return {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}


def realigned(model):
    """A copy whose weights start where torch puts them.

    Weights of a file start where the file has them, and some processors add up in another order there: the last bit differs.
    """
    return copy.deepcopy(model)


def scores(model, config):
    """Log-probabilities and values of fixed actions."""
    inputs = model.preprocess(random_observation(config, model, 2))
    torch.manual_seed(3)
    with torch.no_grad():
        acted = model.eval().predict_action_batch(**inputs, do_sample=False)
        scored = model.evaluate_actions(inputs, acted.sequences, 1.0)
    return {"actions": torch.as_tensor(acted.actions), "logprobs": scored.logprobs, "values": scored.values}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("overrides", [[], ["model.precision=bf16"], LORA], ids=["fp32", "bf16", "lora"])
def test_a_deferred_build_is_the_ordinary_one_once_it_is_read(tmp_path, family, overrides):
    folder = saved(family, tmp_path, value_head=family in ("cnn", "pi0"))
    config = from_folder(family, folder, *overrides)
    expected, model = built(config, deferred=False), built(config, deferred=True)
    assert is_deferred(model) and not is_deferred(expected)
    drawn = torch.rand(1)
    model = make_parallel(model, "cpu", sharded=False).model
    assert_same(tensors_of(expected), tensors_of(model))
    assert expected.state_dict().keys() == model.state_dict().keys()
    assert [p.requires_grad for p in expected.parameters()] == [p.requires_grad for p in model.parameters()]
    assert without_path(expected) == without_path(model) and expected.training == model.training
    assert_same(scores(realigned(expected), config), scores(realigned(model), config))
    built(config, deferred=False)
    assert torch.equal(torch.rand(1), drawn), "the random numbers that follow are the same"


def test_what_nothing_says_is_refused_and_wrong_rows_are_seen(tmp_path, monkeypatch):
    """Controls: a buffer that was left empty, and rows that start one too late."""
    folder = saved("openvla", tmp_path)
    config = from_folder("openvla", folder)
    model = built(config, deferred=True)
    rotary = model.language_model.model.rotary_emb
    frequencies, rotary.inv_freq = rotary.inv_freq, rotary.inv_freq.to("meta")
    with pytest.raises(ValueError, match="inv_freq.* on the meta device without a file"):
        make_parallel(model, "cpu", sharded=False)
    rotary.inv_freq = torch.empty_like(frequencies)
    expected = tensors_of(built(config, deferred=False))
    with pytest.raises(AssertionError, match="inv_freq"):
        assert_same(expected, tensors_of(make_parallel(model, "cpu", sharded=False).model))
    rows = FileTensor.rows
    monkeypatch.setattr(FileTensor, "rows", lambda self, *place: rows(self, *place).roll(1, 0))
    model = built(config, deferred=True)
    with pytest.raises(AssertionError, match="placeholders"):
        assert_same(expected, tensors_of(make_parallel(model, "cpu", sharded=False).model))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    folder = saved("openvla", tmp_path)
    file = sorted(Path(folder).glob("model*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name][-1, -1] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    model = built(from_folder("openvla", folder), deferred=True)
    sources = deferred_parameters(model)
    with pytest.raises(CheckpointError, match="not finite: .*has nan"):
        check_read(make_parallel(model, "cpu", sharded=False).model, sources)


def test_a_tensor_in_a_file_is_divided_without_being_read(tmp_path):
    numbers = torch.arange(30.0).view(10, 3)
    save_file({"a": numbers, "b": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    found = open_tensors([tmp_path / "x.safetensors"])
    assert torch.equal(found["a"].rows(), numbers) and torch.equal(found["b"].rows(), torch.tensor(2.0))
    for part, expected in zip(found["a"].chunk(4), numbers.chunk(4), strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part.rows(), expected) and torch.equal(part.rows(1, 2), expected[1:2])
    assert found["a"].chunk(2)[1].chunk(2)[0].rows(0, 1).tolist() == [[15, 16, 17]]


def test_weights_that_are_drawn_converted_or_given_twice_are_read_whole_and_the_line_says_why(tmp_path, tiny_lm):
    policy = build_policy(config_of("openvla"), {"norm_stats": unit_range_stats(2, 4)}, deferred=True)
    assert how_read(policy).startswith("each rank first loads the complete model: its weights are random")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    experts = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
    HFModel.from_config(experts).save_pretrained(tmp_path / "experts")
    tied = shutil.copytree(tiny_lm(tie_word_embeddings=True), tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    for name, reason in (
        ("experts", "transformers converts its weights"),
        ("tied", "the names and shapes in its files"),
    ):
        model = HFModel.from_pretrained(tmp_path / name, deferred=True)
        assert not is_deferred(model)
        assert how_read(model.model).startswith(f"each rank first loads the complete model: {reason}")
        assert_same(tensors_of(HFModel.from_pretrained(tmp_path / name)), tensors_of(model))


def test_a_deferred_language_model_generates_by_the_settings_of_its_folder(tmp_path, tiny_lm):
    folder = shutil.copytree(tiny_lm(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7], "temperature": 0.5}')
    model = HFModel.from_pretrained(folder, deferred=True).model
    assert is_deferred(model) and model.generation_config.eos_token_id == [5, 7]
    expected = HFModel.from_pretrained(folder).model
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert without_path(model) == without_path(expected) and not model.training
    (folder / "generation_config.json").unlink()
    without = [
        HFModel.from_pretrained(folder, deferred=flag).model.generation_config.to_dict() for flag in (True, False)
    ]
    assert without[0] == without[1]


CASES = {
    "openvla": ("openvla", []),
    "oft in bf16": ("oft", ["model.precision=bf16"]),
    "pi0 with adapters": ("pi0", LORA),
}
TOKENS = {"tied": {}, "bf16": {"torch_dtype": "bfloat16"}, "adapters": {"lora": {"rank": 2}}}


def hold(arguments):
    """Hold every case in shards; keep its tensors, its outputs, and what each rank has read."""
    folders, prompts, output, cases, tokens = arguments
    torch.set_num_threads(1)
    results = {}
    for name in cases:
        family, overrides = CASES[name]
        config = from_folder(family, folders[family], *overrides)
        model = built(config, deferred=True)
        assert how_read(model) == "each rank reads its rows of the weights"
        sources = deferred_parameters(model)
        with counted() as sizes:
            model = Sharded(model, "cpu").model
        results[name] = (parts_of(model), scores(model, config), sum(sizes), shares(sources))
    for name in tokens:
        options = TOKENS[name]
        torch.manual_seed(0)
        policy = HuggingFacePolicy(folders["llama"], sharding="fsdp2", learning_rate=1e-2, **options)
        parts = parts_of(policy.model)
        logprobs = policy.get_logprobs(prompts)["logprobs"]
        if name == "bf16":
            policy.train(prompts, NLLLossFn())
            assert not policy.get_logprobs(prompts)["logprobs"].equal(logprobs)
            again = policy.get_reference_logprobs(prompts)["logprobs"]
            assert again.equal(logprobs), "the reference is read after a step"
        results[name] = (parts, logprobs)
    torch.save(results, f"{output}/{rank()}.pt")


def shares(sources):
    """Bytes of a rank that holds most rows of each tensor, and of all ranks."""
    size = {name: source.rows(0, 1).numel() * source.rows(0, 1).element_size() for name, source in sources.items()}
    most = sum(-(-source.shape[0] // world_size()) * size[name] for name, source in sources.items())
    return most, sum(source.shape[0] * size[name] for name, source in sources.items())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_lm):
    root = tmp_path_factory.mktemp("folders")
    names = {family for family, _ in CASES.values()}
    return {name: saved(name, root / name) for name in names} | {"llama": tiny_lm(tie_word_embeddings=True)}


@pytest.mark.parametrize(
    ("num_ranks", "cases", "tokens"), [(1, CASES, TOKENS), (2, CASES, TOKENS), (4, ["openvla"], ["tied"])]
)
def test_ranks_hold_the_weights_of_one_process_and_read_each_row_once(
    folders, prompts, tmp_path, num_ranks, cases, tokens
):
    arguments = (folders, prompts, str(tmp_path), list(cases), list(tokens))
    launch(hold, arguments, num_ranks, "cpu", process_group=True)
    found = [torch.load(tmp_path / f"{number}.pt", weights_only=False) for number in range(num_ranks)]
    for name in cases:
        family, overrides = CASES[name]
        config = from_folder(family, folders[family], *overrides)
        model = built(config, deferred=False)
        expected, outputs = tensors_of(model), scores(realigned(model), config)
        parts, own, read, bounds = zip(*(each[name] for each in found), strict=True)
        assert_parts_of(expected, parts)
        for each in own:
            assert_same(each, outputs)
        most, total = bounds[0]
        assert 0 < max(read) <= most and sum(read) == total
    for name in tokens:
        torch.manual_seed(0)
        policy = HuggingFacePolicy(folders["llama"], **TOKENS[name])
        expected, logprobs = tensors_of(policy.model), policy.get_logprobs(prompts)["logprobs"]
        parts, own = zip(*(each[name] for each in found), strict=True)
        assert_parts_of(expected, parts)
        assert all(each.equal(logprobs) for each in own)
