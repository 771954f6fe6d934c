"""Our sides of the benchmark next to TRL train what they are told, and their comparisons of losses can fail. TRL itself is not needed."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import against_trl  # noqa: E402
from trl_side import Side  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    against_trl.make_model(path, SIZES, seed=0)
    return path


def logprobs_of(folder, tokens):
    """Of each token after the first, from all logits of the row alone."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


def test_the_side_of_sft_trains_the_answers_of_the_rows_it_gets(folder):
    rows = [list(row.values()) for row in against_trl.make_rows(5, 64, 2, 9, seed=1)]
    settings = {"method": "sft", "model": folder, "micro_batch": 1, "length": 32, "learning_rate": 1e-2, "threads": 1}
    answer = against_trl.make_answer(settings)
    control = answer(rows_of_step=rows, all_tokens=True)["loss"]
    first, second = (answer(rows_of_step=rows) for _ in range(2))
    scored = [(logprobs_of(folder, ids), torch.tensor(mask[1:]).bool()) for ids, mask in rows]
    expected = -torch.cat([values[mask] for values, mask in scored]).mean()
    assert first["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert control == pytest.approx(-float(torch.cat([values for values, _ in scored]).mean()), abs=1e-5)
    assert second["loss"] < first["loss"] - 1e-3, "it learns"
    assert first["tokens"] == sum(len(ids) for ids, _ in rows) and first["peak_mb"] >= first["start_mb"]


def test_first_steps_that_differ_are_refused():
    same = {"loss": 2.0, "norm": 1.0}
    against_trl.check_first(same, same, control=2.1)
    for ours, control in (({"loss": 2.0001, "norm": 1.0}, 2.1), ({"loss": 2.0, "norm": 1.001}, 2.1), (same, 2.0)):
        with pytest.raises(SystemExit):
            against_trl.check_first(ours, same, control)


def test_the_side_of_grpo_takes_iterations_and_scores_given_answers(folder):
    settings = {
        "method": "grpo", "model": folder, "prompts": ["w5 w6 w7", "w8", "w9 w10"], "batch_size": 4, "group_size": 2, "micro_batch": 2,
        "answer_tokens": 6, "temperature": 0.9, "beta": 0.5, "updates": 2, "epsilon": 0.2, "learning_rate": 1e-3,
        "threads": 1, "seed": 0,
    }  # fmt: skip
    answer = against_trl.make_answer(settings)
    given = {"prompts": [[5, 6], [7]], "answers": [[8, 9, 10], [11]], "advantages": [1.0, -2.0]}
    logprobs = answer(given=given)["logprobs"]
    shifted = [[value - 0.5 for value in row] for row in logprobs]
    found = answer(given=given | {"old_logprobs": shifted, "reference_logprobs": logprobs})
    ratio = 2.718281828**0.5
    assert found["loss"] == pytest.approx((-1.2 * 1.0 * 3 + ratio * 2.0) / 4, abs=1e-5), "clipped where that is less"
    for row in range(2):
        tokens, start = given["prompts"][row] + given["answers"][row], len(given["prompts"][row])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, :-1] / 0.9
        expected = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]][start - 1 :]
        torch.testing.assert_close(torch.tensor(logprobs[row]), expected, atol=1e-5, rtol=0)
    step = answer()
    assert 1 <= step["answer_tokens"] <= 6 and 0 < step["reward"] <= 1


def test_sides_whose_losses_of_given_answers_differ_are_refused():
    class Told:
        def __init__(self, *answers):
            self.answers = list(answers)

        def ask(self, given):
            return self.answers.pop(0)

    arguments = type("Arguments", (), {"seed": 0, "micro_batch": 2, "vocab_size": 64})

    def compare(ours, control, theirs):
        rows = {"logprobs": [[-1.0] * 40] * 2}
        return against_trl.compare_losses(Told(rows, ours, control), Told(theirs), arguments)

    same, other = {"loss": 1.0, "norm": 1.0}, {"loss": 1.1, "norm": 1.0}
    assert compare(same, other, same) == {"ours": 1.0, "peer": 1.0, "control": 1.1}
    for told in ((other, same, same), ({"loss": 1.0, "norm": 1.1}, other, same), (same, same, same)):
        with pytest.raises(SystemExit):
            compare(*told)


def test_a_side_that_fails_says_why(tmp_path):
    script = tmp_path / "side.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nfrom trl_side import serve\n"
        "def answer(number):\n    print('not an answer')\n    return {'half': number / 2}\n"
        "serve(lambda settings: answer)\n"
    )
    side = Side("the other side", sys.executable, script, {"threads": 1})
    assert side.ask(number=3) == {"half": 1.5}
    with pytest.raises(SystemExit, match="the other side ended:(.|\n)*unsupported operand"):
        side.ask(number=None)
