"""A token policy on two processes takes the step of one."""

from dataclasses import asdict

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.algorithms import DPOLossFn, GRPOLossFn, NLLLossFn
from rlinf.distributed import BatchedDataDict
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import Replicated, Sharded, full_tensor
from rlinf.distributed.process_group import rank
from rlinf.errors import ConfigError
from rlinf.llm import logprobs
from rlinf.models import HuggingFacePolicy

LOSSES = {"nll": NLLLossFn(), "dpo": DPOLossFn(), "grpo": GRPOLossFn(loss_level="sequence", kl_coef=0.1)}
SHARES = {"nll": [(0, 3), (3, 4)], "dpo": [(0, 2), (2, 4)], "grpo": [(0, 1), (1, 4)]}


def step(policy, rows, loss_fn):
    """Metrics of a step, and its gradients, which the optimiser sees before they are gone."""
    gradients = {}
    take, names = policy._optimizer.step, {id(p): name for name, p in policy.model.named_parameters()}

    def record():
        gradients.update({names[id(p)]: full_tensor(p.grad).clone() for p in policy._optimizer.parameters})
        take()

    policy._optimizer.step = record
    metrics = policy.train(rows, loss_fn)
    return {name: value for name, value in metrics.items() if not name.startswith("memory/")}, gradients


def train_one_rank(arguments) -> None:
    folder, batch, output, sharding = arguments
    number = rank()
    for name, loss_fn in LOSSES.items():
        # Two passes of one rank, and one of the other.
        sizes = {"max_new_tokens": 8, "micro_batch_size": 2}
        policy = HuggingFacePolicy(folder, learning_rate=1e-3, eos_token_id=[], sharding=sharding, **sizes)
        assert isinstance(policy.parallel, Sharded if sharding == "fsdp2" else Replicated)
        rows = batch.slice(*SHARES[name][number])
        with deadline("update"):
            metrics, gradients = step(policy, rows, loss_fn)
        state = {key: full_tensor(tensor) for key, tensor in policy.model.state_dict().items()}
        torch.save((metrics, gradients, state), f"{output}/{name}_{number}.pt")
    torch.save(policy.generate(batch)["output_ids"], f"{output}/responses_{number}.pt")
    policy.save_pretrained(f"{output}/saved")
    again = HuggingFacePolicy(f"{output}/saved", **sizes)  # equal passes, because rounding depends on their rows
    assert again.get_logprobs(batch)["logprobs"].equal(policy.get_logprobs(batch)["logprobs"])
    with pytest.raises(ConfigError, match="not a TokenLoss.*2 ranks"):
        policy.train(rows, lambda model, data: model(input_ids=data["input_ids"]).logits.sum())
    check_refusals(folder, batch, second=number == 1, sharding=sharding)


def check_refusals(folder, batch, second, sharding) -> None:
    """Rows of the second rank are rejected while they are counted and dealt, and by the loss after it."""
    policy = HuggingFacePolicy(folder, learning_rate=1e-3, sharding=sharding)
    before = policy.get_logprobs(batch)["logprobs"]
    long = BatchedDataDict({key: torch.ones(1, 65, dtype=torch.long) for key in ("input_ids", "attention_mask")})
    bare = BatchedDataDict({key: value for key, value in batch.items() if key != "advantages"})
    cases = [(long, NLLLossFn(), "A row has 65 tokens"), (bare, GRPOLossFn(), "needs data..advantages")]
    for bad, loss_fn, words in cases:
        with pytest.raises(ConfigError, match=words if second else r"1 other rank\(s\) rejected"):
            policy.train(bad if second else batch, loss_fn)
    assert policy.get_logprobs(batch)["logprobs"].equal(before)
    policy.train(batch, NLLLossFn())
    assert not policy.get_logprobs(batch)["logprobs"].equal(before), "the ranks still work together"


@pytest.mark.parametrize("sharding", ["auto", "fsdp2"])
def test_two_uneven_ranks_are_one_batch_and_refuse_together(tiny_lm, prompts, tmp_path, sharding):
    prompts["advantages"] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    prompts["reference_logprobs"] = 0.99 * HuggingFacePolicy(tiny_lm()).get_logprobs(prompts)["logprobs"]
    deadlines = asdict(DeadlinesConfig(update=60))
    launch(train_one_rank, (tiny_lm(), prompts, str(tmp_path), sharding), 2, "cpu", deadlines=deadlines)
    for name, loss_fn in LOSSES.items():
        policy = HuggingFacePolicy(tiny_lm(), learning_rate=1e-3)
        metrics, expected = step(policy, prompts, loss_fn)
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
        states = []
        for number in range(2):
            rank_metrics, gradients, state = torch.load(tmp_path / f"{name}_{number}.pt")
            assert rank_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-6)
            assert torch.cat([(gradients[key] - expected[key]).flatten() for key in expected]).norm() < 1e-6 * norm
            states.append(state)
        assert all(states[0][key].equal(states[1][key]) for key in states[0]), "ranks stay bit for bit alike"
    responses = [torch.load(tmp_path / f"responses_{rank}.pt")[:, :8] for rank in range(2)]
    assert not responses[0].equal(responses[1]), "the same prompts get other random numbers on another rank"


VOCABULARY = LOGITS_AT_ONCE = 3000


def step_in_chunks(folder, rows, output, **options):
    """A step with the head applied to one token at a time; the head is not part of the model's output, which FSDP2 watches."""
    policy = HuggingFacePolicy(folder, learning_rate=1e-3, **options)
    before, chunks = policy.get_logprobs(rows)["logprobs"], [0]
    score = logprobs.token_logprobs

    def counted(logits, *arguments):
        chunks[0] += 1
        assert logits.numel() <= LOGITS_AT_ONCE
        return score(logits, *arguments)

    logprobs.CHUNK_LOGITS, logprobs.token_logprobs = LOGITS_AT_ONCE, counted
    metrics, gradients = step(policy, rows, NLLLossFn())
    assert chunks[0] > int(rows["attention_mask"][:, 1:].sum()), "one for each token, and again in the backward pass"
    chunked = policy.get_logprobs(rows)["logprobs"]
    torch.save((metrics, gradients, before, chunked), output)


def chunk_on_rank(arguments):
    folder, batch, output = arguments
    number = rank()
    rows = batch.slice(*SHARES["dpo"][number])
    step_in_chunks(folder, rows, f"{output}/{number}.pt", sharding="fsdp2")


def test_a_large_vocabulary_in_chunks_on_two_shards_takes_the_step_of_one_process(tiny_lm, prompts, tmp_path):
    folder = tiny_lm(vocab_size=VOCABULARY, tie_word_embeddings=False)
    launch(chunk_on_rank, (folder, prompts, str(tmp_path)), 2, "cpu")
    policy = HuggingFacePolicy(folder, learning_rate=1e-3)
    before = policy.get_logprobs(prompts)["logprobs"]
    metrics, expected = step(policy, prompts, NLLLossFn())  # all logits at once
    after = policy.get_logprobs(prompts)["logprobs"]
    for number in range(2):
        found, gradients, start, end = torch.load(tmp_path / f"{number}.pt")
        own = slice(*SHARES["dpo"][number])
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert gradients.keys() == expected.keys() and expected["lm_head.weight"].norm() > 0
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(start, before[own], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(end, after[own], rtol=1e-4, atol=1e-4)


class Collectives(TorchDispatchMode):
    """Records what FSDP2 asks of the process group: the name of each call and the sizes of its tensors, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sizes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
            self.calls.append((str(function), sizes))
        return function(*args, **(kwargs or {}))


def uneven_rows(number):
    """Two rows of 8 tokens; rank 0 learns 5 of 16, so it has the head applied to these, rank 1 learns 14."""
    ids = torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(number))
    mask = torch.zeros_like(ids)
    mask[:, 1:] = 1
    if number == 0:
        mask[0, 1:] = 0
        mask[1, :3] = 0
    return BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_mask": mask})


def double_logits(config, logits):
    """In place of ``_head_logits``: as if the model halved its logits in a way that is not known here."""
    return 2 * logits


WAYS = [(does_more, lora) for does_more in (False, True) for lora in (None, {"rank": 2})]


def step_with_uneven_shares(arguments):
    folder, output = arguments
    plain = logprobs._head_logits
    for number, (does_more, lora) in enumerate(WAYS):
        logprobs._head_logits = double_logits if does_more else plain
        policy = HuggingFacePolicy(folder, learning_rate=1e-3, sharding="fsdp2", lora=lora)
        assert all(isinstance(p, DTensor) for p in policy.model.parameters()), (
            "trying the head leaves no weights behind"
        )
        assert logprobs.has_separable_head(policy.model) is not does_more
        for attempt in range(2):
            rows = uneven_rows((rank() + attempt) % 2)  # each rank has few tokens once
            with Collectives() as collectives:
                metrics, gradients = step(policy, rows, NLLLossFn())
            torch.save((metrics, gradients, collectives.calls), f"{output}/{number}_{attempt}_{rank()}.pt")


def test_ranks_with_other_shares_of_trained_tokens_take_one_step(tiny_lm, tmp_path):
    folder = tiny_lm(tie_word_embeddings=False)
    launch(step_with_uneven_shares, (folder, str(tmp_path)), 2, "cpu")
    rows = BatchedDataDict({key: torch.cat([uneven_rows(0)[key], uneven_rows(1)[key]]) for key in uneven_rows(0)})
    for number, (_, lora) in enumerate(WAYS):
        policy = HuggingFacePolicy(folder, learning_rate=1e-3, lora=lora)
        for attempt in range(2):
            metrics, expected = step(policy, rows, NLLLossFn())
            ranks = [torch.load(tmp_path / f"{number}_{attempt}_{index}.pt") for index in range(2)]
            for found, gradients, _ in ranks:
                assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
            assert ranks[0][2] == ranks[1][2] and any("reduce_scatter" in name for name, _ in ranks[0][2])
