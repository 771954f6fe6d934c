"""Two ranks of a recipe train what one does: SFT, GRPO and DPO, whole weights and adapters, replicas and shards."""

from pathlib import Path

import pytest
import torch

from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor
from rlinf.distributed.process_group import rank
from rlinf.llm.losses import DPOLossFn, GRPOLossFn
from rlinf.models import HuggingFacePolicy
from rlinf.recipes.completions import Completer, CompletionValidation
from rlinf.recipes.datasets import PackedRows, Rows
from rlinf.recipes.dpo import DPOTrainer
from rlinf.recipes.grpo import Groups, GRPOTrainer
from rlinf.recipes.rollouts import TorchGenerator
from rlinf.recipes.samples import Prompt, Sample
from rlinf.recipes.sft import SFTTrainer


class Letters:
    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(0xE000 + token) for token in tokens)


def even_fraction(text, prompt, **facts):
    """Reward even letters; answers to the one prompt of 8 tokens are rewarded alike."""
    values = [ord(letter) for letter in text]
    share = 0.5 if len(prompt.input_ids) == 8 else sum(value % 2 == 0 for value in values) / max(1, len(values))
    return share, {"even": share}


class Counted(TorchGenerator):
    """Counts its calls, in which ranks that share a rollout worker wait for each other."""

    calls = 0

    def generate(self, *arguments, **options):
        self.calls += 1
        return super().generate(*arguments, **options)


def rows_of(pack):
    random = torch.Generator().manual_seed(3)
    rows = [{"ids": torch.randint(3, 48, (4 + i % 5,), generator=random).tolist()} for i in range(8)]
    return PackedRows(Rows(rows), lambda row: pack(row["ids"]), seed=0)


def sample(ids, skip=2):
    return Sample(ids, [place >= skip for place in range(len(ids))])


def make(kind, folder, lora, sharding):
    options = {
        "learning_rate": 3e-3,
        "max_grad_norm": 0.1,  # far below the norms: gradients of shards are cut by that of all
        "max_new_tokens": 4,
        "micro_batch_size": 4,
        "device_map": None,
    }
    policy = HuggingFacePolicy(folder, lora=lora, sharding=sharding, **options)
    sizes = {"num_steps": 3, "batch_size": 4}
    if kind == "sft":
        return SFTTrainer(policy, rows_of(sample), validation_rows=rows_of(sample), **sizes)
    if kind == "dpo":
        pairs = rows_of(lambda ids: (sample(ids), sample([*ids[:2], *ids[:1:-1], 5])))
        return DPOTrainer(policy, pairs, loss=DPOLossFn(), validation_rows=pairs, **sizes)
    prompts = rows_of(lambda ids: Prompt(ids, reference="even"))
    completer = Completer(Counted(policy), Letters(), even_fraction, batch_size=8, max_new_tokens=4, end_tokens=[2])
    sizes["batch_size"] = 16
    answers = CompletionValidation(completer, [prompts[number] for number in range(5)])
    return GRPOTrainer(
        policy, prompts, groups=Groups(4, seed=0, num_updates=2, max_resamples=1), loss=GRPOLossFn(dual_clip=3.0, kl_coef=0.1),
        completer=completer, completion_validation=answers, **sizes,
    )  # fmt: skip


def train(kind, folder, lora, sharding):
    trainer = make(kind, folder, lora, sharding)
    steps = [trainer.step(step) for step in range(2)]
    numbers = {f"{name} {i}": value for i, each in enumerate(steps) for name, value in each.metrics.items()}
    numbers |= {f"tokens {i}": each.num_tokens for i, each in enumerate(steps)}
    validation = trainer.validate(2)
    numbers |= validation.metrics
    if kind == "grpo":
        numbers["calls"] = trainer.completer.generator.calls
    numbers = {name: value for name, value in numbers.items() if not name.startswith("memory/")}
    weights = {name: full_tensor(p.detach()) for name, p in trainer.policy.model.named_parameters() if p.requires_grad}
    return numbers, weights, validation.samples


def train_one_rank(arguments) -> None:
    folder, output, cases = arguments
    for kind, lora, sharding in cases:
        torch.save(
            train(kind, folder, lora, sharding), Path(output) / f"{kind}_{lora is not None}_{sharding}_{rank()}.pt"
        )


KINDS = ("sft", "grpo", "dpo")
LORAS = (None, {"rank": 2})
CASES = [(kind, None, sharding) for kind in KINDS for sharding in ("replicate", "fsdp2")]
CASES += [("sft", {"rank": 2}, "fsdp2"), ("grpo", {"rank": 2}, "replicate"), ("dpo", {"rank": 2}, "fsdp2")]


def test_two_ranks_are_one(tiny_lm, tmp_path):
    launch(train_one_rank, (tiny_lm(), str(tmp_path), CASES), 2, "cpu")
    expected = {(kind, lora is not None): train(kind, tiny_lm(), lora, "auto") for kind in KINDS for lora in LORAS}
    assert 1 in [expected["grpo", False][0][f"rollout/replaced_groups {step}"] for step in range(2)], "of one rank only"
    for kind, lora, sharding in CASES:
        numbers, weights, samples = expected[kind, lora is not None]
        found = [torch.load(tmp_path / f"{kind}_{lora is not None}_{sharding}_{index}.pt") for index in range(2)]
        for own_numbers, own_weights, _ in found:
            assert own_numbers == pytest.approx(numbers, rel=1e-5, abs=1e-5), (kind, lora, sharding)
            assert own_weights.keys() == weights.keys()
            for name, tensor in weights.items():
                assert torch.allclose(own_weights[name], tensor, rtol=1e-5, atol=1e-5), (kind, lora, sharding, name)
        assert all(one.equal(two) for one, two in zip(found[0][1].values(), found[1][1].values(), strict=True))
        assert found[0][2] == samples, "rank 0 has the answers of all"


def test_the_comparison_notices_other_rows(tiny_lm):
    one = make("sft", tiny_lm(), None, "auto")
    other = make("sft", tiny_lm(), None, "auto")
    other.rows.seed = 1
    assert one.step(0).loss != pytest.approx(other.step(0).loss, rel=1e-3)
