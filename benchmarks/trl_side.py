"""Two alternating processes, ours and TRL's, for ``against_trl.py``; as a script, this file is TRL's side.

``Side(python, script, settings)`` starts a process. The script reads the settings, and answers messages until there are none, with
``serve``. Each side has a separate Python: TRL's has no rlinf, and ours no TRL, so TRL is imported where it is used. Its trainer
runs in a thread and waits between steps, so that the two sides take turns.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Side:
    """A process that answers messages.

    Args:
        name: In messages about it.
        python: Its interpreter.
        script: File that calls ``serve``.
        settings: JSON values that its ``answer`` is made from.
    """

    def __init__(self, name: str, python: str, script: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()
        threads = {key: str(settings["threads"]) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [python, str(script), "--side"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | threads | quiet,
        )  # fmt: skip
        self._send(settings)

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message, and return the answer."""
        try:
            self._send(message)
            line = self._process.stdout.readline()
            while line and not line.startswith("{"):  # what the imports of a package print
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended:\n{self._log.read().decode(errors='replace')[-4000:]}")
        return json.loads(line)

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(make_answer: Callable[[dict[str, Any]], Callable[..., dict[str, Any]]]) -> None:
    """Answer messages until the other end closes. What else is printed goes to stderr.

    Args:
        make_answer: Takes the settings; returns a function of the fields of a message.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = make_answer(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line))) + "\n")
        answers.flush()


def distinct_words(text: str) -> float:
    """Return the fraction of the words of a text that differ: a reward."""
    words = text.split()
    return len(set(words)) / max(1, len(words))


class Stopwatch:
    """Times what runs inside, in seconds of the clock and of this process's processor time."""

    times: dict[str, float]

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        clock, processor = self._start
        self.times = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}


def memory_mb(key: str) -> float:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process in 1e6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


class Turns(TrainerCallback):
    """Lets a trainer take one step at a time."""

    def __init__(self) -> None:
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[dict[str, float] | BaseException] = queue.Queue()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._go.get()

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self._done.put(logs)  # the last thing of a step

    def start(self, trainer: Any) -> None:
        """Train in a thread."""

        def train() -> None:
            try:
                trainer.train()
                raise RuntimeError("The trainer has taken all of its steps.")
            except BaseException as error:  # noqa: BLE001 - the asking thread raises it
                self._done.put(error)

        threading.Thread(target=train, daemon=True).start()

    def step(self) -> dict[str, Any]:
        """Let the trainer take a step; return what it logs, and the times of ``Stopwatch``."""
        with Stopwatch() as watch:
            self._go.put(None)
            logged = self._done.get()
        if isinstance(logged, BaseException):
            raise logged
        return logged | watch.times


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what both trainers are told: the optimiser of ours, no checkpoints, no reports."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "learning_rate": settings["learning_rate"], "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "adam_epsilon": 1e-8,
        "max_steps": 100_000, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": settings["micro_batch"], "gradient_accumulation_steps": settings["accumulation"],
        "seed": settings["seed"],
    }  # fmt: skip


def sft(settings: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that takes a step; it returns loss, gradient norm, and the rows as tokens and which are learned."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Recorded(SFTTrainer):
        """Keeps the rows that it trains on."""

        rows: list[list[list[int]]]

        def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            packed = torch.stack([inputs["input_ids"][0], (inputs["labels"][0] != -100).long()])
            starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
            for start, stop in zip(starts, [*starts[1:], packed.shape[1]], strict=True):
                self.rows.append(packed[:, start:stop].tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    columns = {name: [row[name] for row in settings["rows"]] for name in ("input_ids", "completion_mask")}
    config = SFTConfig(**common(settings), packing=True, max_length=settings["length"], completion_only_loss=True)
    turns = Turns()
    trainer = Recorded(
        model, args=config, train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]), callbacks=[turns],
    )  # fmt: skip
    before, trainer.rows = memory_mb("VmRSS"), []
    turns.start(trainer)

    def step() -> dict[str, Any]:
        trainer.rows.clear()
        logged = turns.step()
        return {
            "loss": logged["loss"], "norm": logged["grad_norm"], "rows": trainer.rows, "peak_mb": memory_mb("VmHWM"),
            "start_mb": before, **{key: logged[key] for key in ("seconds", "cpu_seconds")},
        }  # fmt: skip

    return step


def grpo(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that takes an iteration, or gives loss and gradient norm of ``given`` answers."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **common(settings), num_generations=settings["group_size"], max_completion_length=settings["answer_tokens"],
        temperature=settings["temperature"], beta=settings["beta"], num_iterations=settings["updates"],
        epsilon=settings["epsilon"], loss_type="dapo", scale_rewards="group",
        use_bias_correction_kl=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    turns = Turns()
    trainer = GRPOTrainer(
        settings["model"], args=config, train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
        reward_funcs=lambda completions, **_: [distinct_words(each) for each in completions],
        processing_class=AutoTokenizer.from_pretrained(settings["model"]), callbacks=[turns],
    )  # fmt: skip
    before, is_training = memory_mb("VmRSS"), False

    def loss_of(given: dict[str, list]) -> dict[str, float]:
        inputs = {name: torch.tensor(values) for name, values in given.items()}
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
        trainer.current_gradient_accumulation_steps = config.steps_per_generation  # all rows are one window
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
        trainer.model.zero_grad()
        return {"loss": float(loss), "norm": float(norm)}

    def answer(given: dict[str, list] | None = None) -> dict[str, Any]:
        nonlocal is_training
        if given is not None:
            return loss_of(given)
        if not is_training:
            turns.start(trainer)
            is_training = True
        steps = [turns.step() for _ in range(settings["updates"])]
        return {
            "answer_tokens": steps[0]["completions/mean_length"], "reward": steps[0]["reward"], "peak_mb": memory_mb("VmHWM"),
            "start_mb": before, **{key: sum(step[key] for step in steps) for key in ("seconds", "cpu_seconds")},
        }  # fmt: skip

    return answer


METHODS = {"sft": sft, "grpo": grpo}


def make_answer(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return the function that answers messages."""
    torch.set_num_threads(settings["threads"])
    return METHODS[settings["method"]](settings)


if __name__ == "__main__":
    serve(make_answer)
