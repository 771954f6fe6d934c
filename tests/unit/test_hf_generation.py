"""Generation with transformers: right-padded rows as if each were alone, and every setting honoured."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from rlinf.distributed import BatchedDataDict
from rlinf.errors import ConfigError, MissingDependencyError
from rlinf.llm.batch_checks import response_mask
from rlinf.llm.batched_data_dict import tokens_and_mask
from rlinf.llm.hf_generation import SamplingConfig, _Sampler
from rlinf.llm.logprobs import sequence_scores
from rlinf.models.generation import HuggingFaceGeneration, verify_right_padding


def response(output, row: int) -> list[int]:
    end = int(output["unpadded_sequence_lengths"][row])
    return output["output_ids"][row, end - int(output["generation_lengths"][row]) : end].tolist()


def alone(prompts, row: int) -> BatchedDataDict:
    length = int(prompts["attention_mask"][row].sum())
    return BatchedDataDict({key: prompts[key][row : row + 1, :length] for key in ("input_ids", "attention_mask")})


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_unequal_prompts_equal_single_ones_and_greedy_generate(tiny_lm, prompts, family):
    folder = tiny_lm(family)
    engine = HuggingFaceGeneration(folder, max_new_tokens=9)
    output = engine.generate(prompts, greedy=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for row in range(4):
        single = alone(prompts, row)
        whole = plain.generate(**single, max_new_tokens=9, do_sample=False)[0].tolist()
        expected = whole[single["input_ids"].shape[1] :]
        assert response(output, row) == expected == response(engine.generate(single, greedy=True), 0)
    # The control: with the padding where it was, a short row is continued differently.
    padded = plain.generate(**prompts, max_new_tokens=9, do_sample=False)[3, 6:].tolist()
    assert padded != response(output, 3)


def test_output_has_the_keys_dtypes_and_lengths_of_the_spec(tiny_lm, prompts):
    data = BatchedDataDict({**prompts, "name": ["a", "b", "c", "d"], "task": 3})
    output = HuggingFaceGeneration(tiny_lm(), max_new_tokens=5, eos_token_id=[]).generate(data, greedy=False)
    assert set(output) == {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "name", "task"}
    assert output["name"] == ["a", "b", "c", "d"] and output["task"] == 3
    assert output["output_ids"].dtype == torch.int64 and output["logprobs"].dtype == torch.float32
    assert output["output_ids"].shape == output["logprobs"].shape == (4, 11)
    assert output["generation_lengths"].tolist() == [5] * 4
    assert output["unpadded_sequence_lengths"].tolist() == [11, 9, 10, 7]
    assert verify_right_padding(output, pad_token_id=0)
    for row in range(4):
        length = int(prompts["attention_mask"][row].sum())
        assert output["output_ids"][row, :length].equal(prompts["input_ids"][row, :length])
    generated = response_mask(output)
    assert generated.sum(-1).tolist() == [5] * 4 and not generated[3, :2].any() and not generated[3, 7:].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampled_tokens(tiny_lm, prompts, temperature):
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=6, temperature=temperature, eos_token_id=[])
    output = engine.generate(prompts, greedy=False)
    scored = sequence_scores(engine.model, *tokens_and_mask(output), temperature=temperature).logprobs.detach()
    generated = response_mask(output)
    assert (scored - output["logprobs"])[generated].abs().max() < 1e-4
    other = sequence_scores(engine.model, *tokens_and_mask(output), temperature=1.3 * temperature).logprobs.detach()
    assert (other - output["logprobs"])[generated].abs().max() > 0.1


def test_seeds_of_rows_make_answers_independent_of_other_rows_and_calls(tiny_lm, prompts):
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=6, eos_token_id=[])
    prompts["sampling_seeds"] = torch.tensor([5, 6, 7, 8])

    def answers(rows):
        output = engine.generate(prompts.select_indices(rows))
        assert "sampling_seeds" not in output
        ends = output["unpadded_sequence_lengths"]
        return [row[end - 6 : end].tolist() for row, end in zip(output["output_ids"], ends, strict=True)]

    whole = answers([0, 1, 2, 3])
    assert answers([2, 0]) == [whole[2], whole[0]]
    prompts["sampling_seeds"] = torch.tensor([5, 6, 9, 8])
    assert [one == two for one, two in zip(answers([0, 1, 2, 3]), whole, strict=True)] == [True, True, False, True]


def test_sampling_is_seeded_and_moves_on(tiny_lm, prompts):
    def two_calls(seed):
        engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=6, seed=seed)
        return [engine.generate(prompts, greedy=False)["output_ids"].tolist() for _ in range(2)]

    assert two_calls(1) == two_calls(1)
    assert two_calls(1) != two_calls(2) and two_calls(1)[0] != two_calls(1)[1]


def test_draws_follow_the_softmax(tiny_lm):
    """The fraction of each first token over many rows, against the model's own probabilities."""
    rows = 4000
    prompt = BatchedDataDict({"input_ids": torch.full((rows, 1), 5), "attention_mask": torch.ones(rows, 1)})
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=1, temperature=1.5)
    drawn = engine.generate(prompt, greedy=False)["output_ids"][:, 1]
    with torch.no_grad():
        expected = (engine.model(torch.tensor([[5]])).logits[0, -1] / 1.5).softmax(-1)
    assert (drawn.bincount(minlength=48) / rows - expected).abs().max() < 4 * 0.5 / rows**0.5


def first_tokens(folder, num_rows=200, **settings):
    prompt = BatchedDataDict({"input_ids": torch.full((num_rows, 2), 5), "attention_mask": torch.ones(num_rows, 2)})
    output = HuggingFaceGeneration(folder, max_new_tokens=1, **settings).generate(prompt, greedy=False)
    return set(output["output_ids"][:, 2].tolist())


def ranked(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([[5, 5]])).logits[0, -1].softmax(-1).sort(descending=True)


def test_top_k_and_top_p_restrict_what_is_drawn(tiny_lm):
    folder = tiny_lm()
    probabilities, order = ranked(folder)
    for greedy in ({"top_k": 1}, {"temperature": 1e-3}, {"do_sample": False}):
        assert first_tokens(folder, **greedy) == {int(order[0])}
    assert first_tokens(folder, top_k=3, temperature=3.0) == set(order[:3].tolist())
    kept = int((probabilities.cumsum(0) < 0.6).sum()) + 1
    assert first_tokens(folder, top_p=0.6) <= set(order[:kept].tolist())
    assert len(first_tokens(folder, top_k=None, top_p=1, temperature=3.0)) > 10, "no restriction draws many"


ALLOWED = [40, 3, 17, 3]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_only_allowed_tokens_are_drawn_at_their_own_logprobs(tiny_lm, prompts, family):
    engine = HuggingFaceGeneration(tiny_lm(family), max_new_tokens=6, temperature=0.8, allowed_token_ids=ALLOWED)
    allowed = torch.tensor(sorted(set(ALLOWED)))
    for greedy in (True, False):
        output = engine.generate(prompts, greedy=greedy)
        free = HuggingFaceGeneration(tiny_lm(family), max_new_tokens=6).generate(prompts, greedy=greedy)
        assert not set(response(free, 0)) <= set(ALLOWED), "control: without the restriction others are drawn"
        for row in range(4):
            drawn = response(output, row)
            end = int(output["unpadded_sequence_lengths"][row])
            with torch.no_grad():
                logits = engine.model(output["output_ids"][row : row + 1, :end]).logits[0, end - 7 : end - 1, allowed]
            scores = (logits / 0.8).log_softmax(-1)
            indices = torch.searchsorted(allowed, torch.tensor(drawn))
            assert allowed[indices].tolist() == drawn
            assert not greedy or torch.equal(logits.argmax(-1), indices)
            expected = scores.gather(1, indices[:, None]).squeeze(1)
            torch.testing.assert_close(output["logprobs"][row, end - 6 : end], expected, atol=1e-5, rtol=0)


def test_other_columns_of_the_head_and_earlier_positions_of_the_last_mlp_are_not_computed(tiny_lm, prompts):
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=3, allowed_token_ids=ALLOWED, eos_token_id=[])
    model, calls = engine.model, []
    expected = engine.generate(prompts, greedy=True)
    positions = []
    model.model.layers[-1].mlp.down_proj.register_forward_hook(lambda _, args, __: positions.append(args[0].shape[1]))
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, args, __: calls.append(args[0].shape[1]))
    with torch.no_grad():  # NaN would spread to whatever reads it
        model.lm_head.weight[[token for token in range(48) if token not in ALLOWED]] = torch.nan
    output = engine.generate(prompts, greedy=True)
    assert output["output_ids"].equal(expected["output_ids"]) and output["logprobs"].isfinite().all()
    assert positions == [1, 1, 1] and calls == [6, 1, 1]
    assert model(prompts["input_ids"]).logits.isnan().any(), "afterwards the head is whole again"
    assert positions[-1] == 6


OWN_STATE = {
    "recurrent_gemma": {"head_dim": 8, "lru_width": 32, "attention_window_size": 4,
                        "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
    "minimax": {"head_dim": 8, "num_local_experts": 2, "block_size": 4},
    "mamba": {"state_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("family", OWN_STATE)
def test_models_with_a_state_or_cache_of_their_own_continue_each_row_as_if_alone(tiny_lm, prompts, family, monkeypatch):
    """Recurrent layers of the first two take padding on the left for tokens, so rows of equal length share a call."""
    engine = HuggingFaceGeneration(tiny_lm(family, **OWN_STATE[family]), max_new_tokens=6, eos_token_id=[])
    output = engine.generate(prompts, greedy=True)
    for row in range(4):
        tokens = alone(prompts, row)["input_ids"][0].tolist()
        for _ in range(6):
            with torch.no_grad():
                logits = engine.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert response(output, row) == tokens[-6:]
    assert engine.model.ignores_left_padding == (family in ("minimax", "mamba"))
    scored = sequence_scores(engine.model, *tokens_and_mask(output)).logprobs.detach()
    assert (scored - output["logprobs"])[response_mask(output)].abs().max() < 1e-4
    if not engine.model.ignores_left_padding:
        monkeypatch.setattr(engine.model, "ignores_left_padding", True)
        padded = engine.generate(prompts, greedy=True)
        scored = sequence_scores(engine.model, *tokens_and_mask(padded)).logprobs.detach()
        assert (scored - padded["logprobs"])[response_mask(padded)].abs().max() > 1e-2, "control"


@pytest.mark.parametrize("penalty", [1.0, 4.0])
def test_repetition_penalty_by_hand(tiny_lm, penalty):
    prompt = BatchedDataDict({"input_ids": torch.tensor([[5, 9, 9]]), "attention_mask": torch.ones(1, 3)})
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=16, repetition_penalty=penalty, eos_token_id=[])
    tokens, changed = [5, 9, 9], 0
    for _ in range(16):
        with torch.no_grad():
            logits = engine.model(torch.tensor([tokens])).logits[0, -1]
        best = int(logits.argmax())
        for seen in set(tokens):
            logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
        tokens.append(int(logits.argmax()))
        changed += tokens[-1] != best
    assert engine.generate(prompt, greedy=True)["output_ids"][0].tolist() == tokens
    assert (changed > 0) == (penalty > 1), "the penalty has an effect here"


def test_padding_that_stands_there_for_a_neighbour_is_not_penalised(tiny_lm, prompts):
    settings = {"max_new_tokens": 4, "repetition_penalty": 50.0, "eos_token_id": []}
    alone_output = HuggingFaceGeneration(tiny_lm(), **settings).generate(alone(prompts, 3), greedy=True)
    wanted = response(alone_output, 0)[0]
    together = HuggingFaceGeneration(tiny_lm(), pad_token_id=wanted, **settings).generate(prompts, greedy=True)
    assert response(together, 3) == response(alone_output, 0)


def test_rows_stop_at_eos_and_are_filled_with_the_pad_token(tiny_lm, prompts):
    free = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, eos_token_id=[]).generate(prompts, greedy=True)
    eos = response(free, 1)[3]
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, eos_token_id=eos, pad_token_id=33)
    output = engine.generate(prompts, greedy=True)
    assert response(output, 1) == response(free, 1)[: response(free, 1).index(eos) + 1]
    assert verify_right_padding(output, pad_token_id=33)
    assert not output["logprobs"][1, output["unpadded_sequence_lengths"][1] :].any()


@pytest.mark.parametrize("pad", [-1, 48])
def test_a_padding_token_without_an_embedding_is_refused_or_passed_over(tiny_lm, tmp_path, prompts, pad):
    words = rf"pad_token_id contains \[{pad}\]; expected ids from 0 to 47. Pass pad_token_id="
    with pytest.raises(ConfigError, match=words):
        HuggingFaceGeneration(tiny_lm(), max_new_tokens=4, pad_token_id=pad).generate(prompts, greedy=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    model.save_pretrained(tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(settings.read_text().replace('"pad_token_id": 0', f'"pad_token_id": {pad}'))
    expected = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, pad_token_id=2).generate(prompts, greedy=True)
    output = HuggingFaceGeneration(str(tmp_path), max_new_tokens=8).generate(prompts, greedy=True)
    assert output["output_ids"].equal(expected["output_ids"]), "the end token fills, which is 2"


def test_sampling_settings_of_the_checkpoint_are_not_used_but_its_end_tokens_are(tiny_lm, tmp_path, prompts):
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    free = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, eos_token_id=[]).generate(prompts, greedy=True)
    end = response(free, 0)[2]
    model.generation_config.update(repetition_penalty=5.0, eos_token_id=[2, end])
    model.save_pretrained(tmp_path)
    output = HuggingFaceGeneration(str(tmp_path), max_new_tokens=8).generate(prompts, greedy=True)
    assert response(output, 0) == response(free, 0)[: response(free, 0).index(end) + 1]


def test_an_end_token_of_the_tokenizer_stops_a_row_and_is_saved(tiny_lm, tmp_path, prompts):
    free = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, eos_token_id=[]).generate(prompts, greedy=True)
    end = response(free, 0)[2]
    tokenizer = SimpleNamespace(eos_token_id=end, decode=str)
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=8, tokenizer=tokenizer)
    output = engine.generate(prompts, greedy=True)
    assert response(output, 0) == response(free, 0)[: response(free, 0).index(end) + 1]
    engine.model.save_pretrained(tmp_path)
    assert HuggingFaceGeneration(str(tmp_path)).model.generation_config.eos_token_id == [2, end]


def test_prompt_and_response_stay_within_the_length(tiny_lm, prompts):
    engine = HuggingFaceGeneration(tiny_lm("gpt2", n_positions=10), max_new_tokens=100, eos_token_id=[])
    output = engine.generate(prompts, greedy=True)
    assert output["unpadded_sequence_lengths"].tolist() == [10] * 4
    assert response(output, 3) == response(engine.generate(alone(prompts, 3), greedy=True), 0)
    short = HuggingFaceGeneration(tiny_lm(), max_new_tokens=100, max_model_len=8, eos_token_id=[])
    shorter = short.generate(prompts, False)
    assert shorter["unpadded_sequence_lengths"].tolist() == [8] * 4
    with pytest.raises(ConfigError, match="6 tokens.*max_model_len=6"):
        HuggingFaceGeneration(tiny_lm(), max_model_len=6).generate(prompts, greedy=True)
    with pytest.raises(ConfigError, match="max_model_len=65.*Pass max_model_len=64"):
        HuggingFaceGeneration(tiny_lm(), max_model_len=65).generate(prompts, greedy=True)


def test_prepare_and_finish_may_be_repeated_and_weights_stay(tiny_lm, prompts):
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=4)
    for _ in range(2):
        engine.prepare_for_generation()
    before = engine.generate(prompts, greedy=True)["output_ids"]
    for _ in range(2):
        engine.finish_generation()
    assert engine.generate(prompts, greedy=True)["output_ids"].equal(before)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"temprature": 1.0}, ConfigError, "temprature.*Did you mean 'temperature'"),
        ({"backend": "vllm"}, ConfigError, "backend is 'vllm'.*backend=hf"),
        ({"torch_dtype": "bf17"}, ConfigError, "torch_dtype='bf17'.*Pass torch_dtype='bfloat16'"),
        ({"load_in_8bit": True}, MissingDependencyError, "load_in_8bit=True.*pip install bitsandbytes"),
        ({"load_in_4bit": True, "load_in_8bit": True}, ConfigError, "Pass load_in_8bit=False"),
    ],
)
def test_bad_settings_name_the_value_and_what_to_type(tiny_lm, settings, error, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(error, match=words):
        HuggingFaceGeneration(tiny_lm(), **settings)


def test_padding_on_the_left_and_empty_rows_are_told(prompts):
    """How both engines reject them: ``test_vllm_settings``."""
    assert not verify_right_padding({key: value.flip(1) for key, value in prompts.items()})
    prompts["attention_mask"][2] = 0
    assert not verify_right_padding(prompts)
    with pytest.raises(ConfigError, match="Row 2 has no tokens"):
        verify_right_padding(prompts, raise_error=True)


def test_malformed_batches_are_refused(prompts):
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    rejections = (
        ("no 'attention_mask'.*input_ids", {"input_ids": ids}),
        (r"\[4, 6\].*\[4, 3\]", {"input_ids": ids, "attention_mask": torch.ones(4, 3)}),
        ("unpadded_sequence_lengths", {"output_ids": ids}),
        ("'input_ids' is a list; expected a torch.Tensor", {"input_ids": ids.tolist(), "attention_mask": mask}),
    )  # fmt: skip
    for words, batch in rejections:
        with pytest.raises(ConfigError, match=words):
            tokens_and_mask(batch)


class FromTheCpu(TorchDispatchMode):
    """Counts the operations that read a tensor which is not on the device "meta"."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.count += any(each.device.type != "meta" for each in given)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_a_step_reads_nothing_from_the_cpu(where):
    """Numbers that stay on the CPU (the control) would be sent to the GPU at each of the three tokens."""
    uniforms, banned = torch.full((2, 3), 0.5, device=where), torch.tensor([1, 5], device="meta")
    sampler = _Sampler(SamplingConfig(temperature=0.7), uniforms, None, banned)
    scores, ids = torch.empty(2, 16, device="meta"), torch.empty(2, 4, dtype=torch.int64, device="meta")
    with FromTheCpu() as mode:
        for _ in range(3):
            assert sampler(ids, scores).device.type == "meta"
    assert mode.count >= 3 if where == "cpu" else mode.count == 0


def test_ids_of_32_bits_are_read(tiny_lm, prompts):
    engine = HuggingFaceGeneration(tiny_lm(), max_new_tokens=2)
    short = engine.generate({key: value.int() for key, value in prompts.items()}, greedy=True)
    assert short["output_ids"].dtype == torch.int64
    assert short["output_ids"].equal(engine.generate(prompts, greedy=True)["output_ids"])
