"""Mutation testing of the code behind every published result: does a test fail if one of its lines is wrong?

Each mutant makes one change to a file: an operator, a comparison, a constant, a condition, a reduction, or a deleted statement.
Three kinds leave the loss unchanged but break learning: a term without its gradient, an optimiser without one of its parameters,
and a value from one rank instead of all. The file's tests then run in a fork of this process, which has already imported the slow
packages. A mutant survives if all tests pass. Mutants in ``tests/mutation/equivalent.txt`` are skipped; the file gives reasons why
they do not affect results.

    python scripts/mutate.py                                   all files (about an hour)
    python scripts/mutate.py --file rlinf/algorithms/losses.py
    python scripts/mutate.py --file rlinf/rollout/collector.py --lines 300-330
    python scripts/mutate.py --sample 100 --seed 1             a random sample of 100 from all files
    python scripts/mutate.py --kind gradient                   mutants of one kind
    python scripts/mutate.py --list                            print the mutants without running tests

The last line is a JSON object with the score of each file. The exit status is 1 if the total score is below ``--minimum``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.util
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.txt"
SLOW_PACKAGES = (
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "gymnasium",
    "hydra",
    "transformers",
    "safetensors.torch",
    "mujoco",
    "pytest",
    "hypothesis",
)


TOKEN_TEST = "tests/numerics/test_cloning_losses.py::test_the_token_and_the_policy_learn_side_by_side"
TWO_RANKS = ["tests/integration/test_recipe_ranks.py::test_two_ranks_are_one"]
BLOCKS = [
    "tests/integration/test_env_groups.py::test_advantages_and_minibatches_of_one_rollout_have_the_same_bits_on_any_number_of_ranks",
    "tests/integration/test_env_groups.py::test_all_ranks_refuse_the_worst_sample_of_all_and_metrics_of_their_own",
]
TWO_PLAY = [
    "tests/integration/test_offpolicy_loops.py::test_two_ranks_learn_what_one_process_does_bit_for_bit_and_either_goes_on",
    "tests/integration/test_offpolicy_loops.py::test_ranks_whose_heads_differ_end_the_run",
]
CLIPPED = "tests/integration/test_parallel.py::test_gradients_are_cut_by_the_norm_of_all_shards[shards on 2]"


def _cloning(*policies: str) -> list[str]:
    """Return the gradient tests of some policies."""
    tests = (
        "test_a_policy_clones_along_the_derivative_of_its_loss",
        "test_log_probabilities_and_entropies_have_the_gradients_of_their_derivatives",
    )
    found = [f"tests/numerics/test_cloning_losses.py::{test}[{policy}]" for policy in policies for test in tests]
    with_token = {"openvla": ["openvla"], "openvla_oft": ["openvla_oft", "openvla_oft, l1"]}
    return found + [f"{TOKEN_TEST}[{case}]" for policy in policies for case in with_token.get(policy, ())]


TESTS = {
    "rlinf/algorithms/losses.py": [
        "tests/numerics/test_loss_gradients.py",
        "tests/numerics/test_losses.py",
        "tests/numerics/test_decoupled_loss.py",
        "tests/numerics/test_token_losses.py",
    ],
    "rlinf/algorithms/base.py": [
        "tests/unit/test_algorithm_base.py",
        "tests/numerics/test_loss_gradients.py",
        "tests/numerics/test_loss_of_algorithms.py",
        "tests/numerics/test_decoupled_loss.py",
        "tests/numerics/test_losses.py",
        *BLOCKS,
    ],
    "rlinf/algorithms/ppo.py": [
        "tests/numerics/test_loss_gradients.py",
        "tests/numerics/test_loss_of_algorithms.py",
        "tests/numerics/test_losses.py",
    ],
    "rlinf/algorithms/groups.py": ["tests/numerics/test_groups.py", "tests/numerics/test_losses.py"],
    "rlinf/algorithms/reinforce_pp.py": ["tests/numerics/test_groups.py", "tests/numerics/test_losses.py"],
    "rlinf/distributed/process_group.py": ["tests/unit/test_sums.py", "tests/unit/test_process_group.py"],
    "rlinf/algorithms/advantages.py": [
        "tests/numerics/test_statistics.py",
        "tests/numerics/test_advantages.py",
        *BLOCKS,
    ],
    "rlinf/llm/losses.py": ["tests/numerics/test_loss_gradients.py", "tests/numerics/test_token_losses.py"],
    "rlinf/llm/token_policy.py": [
        "tests/unit/test_train_worker.py",
        *TWO_RANKS,
        "tests/integration/test_policy_ranks.py",
    ],
    "rlinf/llm/hf_policy.py": [*TWO_RANKS, "tests/integration/test_policy_ranks.py"],
    "rlinf/offpolicy/learner.py": ["tests/numerics/test_offpolicy_losses.py"],
    "rlinf/offpolicy/algorithms.py": ["tests/numerics/test_offpolicy_losses.py"],
    "rlinf/models/actors/base.py": ["tests/numerics/test_offpolicy_losses.py"],
    "rlinf/models/actors/kinds.py": ["tests/numerics/test_offpolicy_losses.py"],
    "rlinf/optim/master_adamw.py": ["tests/unit/test_train_step.py"],
    "rlinf/optim/train_step.py": ["tests/unit/test_train_step.py", CLIPPED],
    "rlinf/distributed/parallel.py": [
        CLIPPED,
        "tests/integration/test_uneven_ranks.py::test_all_ranks_begin_with_the_weights_of_rank_0",
    ],
    "rlinf/training/train_worker.py": [
        "tests/unit/test_train_worker.py",
        "tests/unit/test_minibatches.py",
        "tests/integration/test_uneven_ranks.py",
        *BLOCKS,
    ],
    "rlinf/training/rollout_queue.py": ["tests/integration/test_async_training.py", "tests/unit/test_deadlines.py"],
    "rlinf/training/rl_trainer.py": [
        "tests/unit/test_rl_trainer.py",
        "tests/integration/test_uneven_ranks.py::test_a_group_of_one_rank_is_played_again_and_counted_on_all",
        *BLOCKS,
    ],
    "rlinf/training/cloning_trainer.py": [
        "tests/integration/test_uneven_ranks.py::test_ranks_clone_until_the_time_of_all_is_over",
        "tests/integration/test_training.py::test_a_rank_that_is_done_with_its_demonstrations_stops_with_one_that_heard_the_signal",
    ],
    "rlinf/offpolicy/trainer.py": TWO_PLAY,
    "rlinf/offpolicy/transitions.py": TWO_PLAY,
    "rlinf/offpolicy/episodes.py": TWO_PLAY,
    "rlinf/models/embodiment/mlp_action_model.py": _cloning("mlp"),
    "rlinf/models/embodiment/token_action_model.py": _cloning("openvla"),
    "rlinf/models/embodiment/openvla/policy.py": _cloning("openvla"),
    "rlinf/models/embodiment/openvla/vision_tower.py": ["tests/numerics/test_vision_tower_gradients.py"],
    "rlinf/models/embodiment/openvla/llama_layer.py": ["tests/unit/test_llama_layer.py"],
    "rlinf/models/embodiment/openvla_oft/policy.py": _cloning("openvla_oft"),
    "rlinf/models/embodiment/cnn_action_model.py": _cloning("cnn"),
    "rlinf/models/embodiment/hf_vla/policy.py": _cloning("hf_vla"),
    "rlinf/models/embodiment/pi0/policy.py": _cloning("pi0", "pi0, learned noise"),
    "rlinf/models/embodiment/modules/flow.py": ["tests/unit/test_flow.py", *_cloning("pi0", "pi0, learned noise")],
    "rlinf/optim/schedule.py": ["tests/unit/test_recipe_schedule.py"],
    "rlinf/recipes/plan.py": ["tests/unit/test_recipe_schedule.py"],
    "rlinf/recipes/samples.py": ["tests/unit/test_samples.py"],
    "rlinf/recipes/rewards.py": ["tests/unit/test_rewards.py"],
    "rlinf/recipes/packers.py": ["tests/unit/test_packers.py"],
    "rlinf/recipes/sft.py": ["tests/unit/test_recipe_sft.py", *TWO_RANKS],
    "rlinf/recipes/grpo.py": ["tests/unit/test_recipe_grpo.py", *TWO_RANKS],
    "rlinf/recipes/dpo.py": ["tests/unit/test_recipe_dpo.py", *TWO_RANKS],
    "rlinf/recipes/completions.py": TWO_RANKS,
    "rlinf/recipes/token_trainer.py": ["tests/unit/test_recipe_loop.py"],
    "rlinf/training/loop.py": ["tests/unit/test_recipe_loop.py"],
    "rlinf/rollout/collector.py": ["tests/unit/test_rollout_alignment.py", "tests/unit/test_collector.py"],
    "rlinf/rollout/parity.py": ["tests/unit/test_parity.py", *BLOCKS],
    "rlinf/rollout/weight_push.py": [
        "tests/unit/test_weight_copy.py",
        "tests/integration/test_weight_push_ranks.py",
        "tests/integration/test_weight_sync.py",
    ],
    "rlinf/engines/weight_handle.py": ["tests/unit/test_weight_handle.py", "tests/unit/test_weight_transfer.py"],
    "rlinf/engines/weight_transfer.py": ["tests/unit/test_weight_transfer.py", "tests/unit/test_weight_copy.py"],
    "rlinf/models/embodiment/modules/normalizer.py": [
        "tests/numerics/test_normalizer.py",
        "tests/unit/test_model_parts.py",
    ],
    "rlinf/data/statistics.py": ["tests/unit/test_dataset_statistics.py"],
    "rlinf/manifest.py": [
        "tests/unit/test_manifest.py",
        "tests/unit/test_startup.py::test_another_project_of_the_name_is_noticed",
        "tests/unit/test_startup.py::test_this_project_is_taken_for_itself_in_any_version",
    ],
}
"""Maps each file to the tests of its results, fastest first, because a mutant is killed by the first failing test."""

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {
    "sum": "mean", "mean": "sum", "min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum",
    "maximum": "minimum", "any": "all", "all": "any", "argmax": "argmin", "argmin": "argmax", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "clamp_min": "clamp_max",
    "clamp_max": "clamp_min", "floor": "ceil", "ceil": "floor",
}  # fmt: skip
MERGED = (
    "sum_over_ranks",
    "sum_counts",
    "sum_env_groups",
    "gather_env_groups",
    "maximum",
    "any_rank",
    "gather_objects",
    "full_tensor",
    "over_ranks",
    "_sum_values",
    "sum_values",
)
"""Functions that combine values from all ranks, or shards into a full tensor."""
FUSED_SUMS = ("addcmul", "baddbmm")
OPTIMIZERS = ("MasterAdamW", "AdamW", "Adam", "_adam")
KINDS = {"gradient": "detached", "parameters": "without its", "ranks": "of one rank"}
"""Text in the descriptions of the kinds of mutants that do not change a loss's value."""
DROPPED_METHODS = ("detach", "clamp", "abs", "exp", "sqrt", "square", "cumsum", "copy", "clone", "contiguous")


@dataclass(frozen=True)
class Mutant:
    """One change: its location, its description, and the file's syntax tree with the change applied."""

    path: str
    line: int
    source: str
    change: str
    tree: ast.Module
    term: tuple[int, ...] | None = None  # location of the detached term

    @property
    def key(self) -> str:
        """Identifies the mutant without its line number, which changes with other edits."""
        return f"{self.path} | {self.source} | {self.change}"


def _parsed(text: str, *parts: ast.expr) -> ast.expr:
    return ast.parse(text % tuple(ast.unparse(part) for part in parts), mode="eval").body


def _detached(term: ast.expr) -> ast.expr:
    """Return a term without its gradient. Values that are not tensors are unchanged."""
    return _parsed("(lambda term: getattr(term, 'detach', lambda: term)())(%s)", term)


def _without(parameters: ast.expr, which: str) -> ast.expr:
    """Return an optimiser's parameters, or parameter groups, without the first or last parameter."""
    return _parsed(
        "(lambda given: (lambda every: (lambda kept: [each | {'params': [p for p in each['params'] if p in kept]} for each in given] "
        f"if every is not given else list(kept))(dict.fromkeys(every[{which}])))(given if not isinstance(given[0], dict) else "
        "[p for each in given for p in each['params']]))(list(%s))",
        parameters,
    )


def _local(tensor: ast.expr) -> ast.expr:
    """Return this rank's shard of a tensor."""
    return _parsed("(lambda tensor: getattr(tensor, 'to_local', lambda: tensor)())(%s)", tensor)


def _of_one_rank(call: ast.Call, name: str) -> ast.expr:
    """Return the result that a call would have on a single rank. All ranks still make the call, so that none hangs."""
    own = copy.deepcopy(_on_a_single_rank(call, name))
    return ast.Subscript(ast.Tuple([call, own], ast.Load()), ast.Constant(1), ast.Load())


def _on_a_single_rank(call: ast.Call, name: str) -> ast.expr:
    if name in ("sum_counts", "maximum"):
        return ast.Tuple(call.args, ast.Load())
    if name == "gather_objects":
        return ast.List(call.args[:1], ast.Load())
    if name == "full_tensor":
        return _local(call.args[0])
    if name == "sum_env_groups":
        return _parsed("(%s).sum(0)", call.args[0])
    return call.func.value if name == "over_ranks" else call.args[0]


def _with_detached_argument(call: ast.Call, number: int) -> ast.Call:
    call.args[number] = _detached(call.args[number])
    return call


def hidden_changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the changes of ``KINDS``, which leave a loss unchanged but affect learning. See ``changes_of`` for the format."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            for side in ("left", "right"):
                if not isinstance(getattr(node, side), ast.Constant):
                    yield (
                        f"{side} term detached",
                        lambda one, side=side: setattr(one, side, _detached(getattr(one, side))) or one,
                    )
        case ast.Call(func=ast.Attribute(attr=name), args=[*terms]) if name in FUSED_SUMS:
            for number in range(len(terms)):
                yield f"argument {number} detached", lambda one, number=number: _with_detached_argument(one, number)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[given, *_]) if name in OPTIMIZERS:
            for word, which in (("first", "1:"), ("last", ":-1")):
                yield (
                    f"without its {word} parameter",
                    lambda one, which=which: setattr(one, "args", [_without(given, which), *one.args[1:]]) or one,
                )
        case ast.ListComp(elt=ast.Attribute(attr="grad")):
            yield "gradients of one rank", lambda one: setattr(one, "elt", _local(one.elt)) or one
        case ast.Call(func=ast.Name(id=name), args=[_, *_]) | ast.Call(func=ast.Attribute(attr=name)) if name in MERGED:
            is_method = isinstance(node.func, ast.Attribute)
            if is_method == (name in ("over_ranks", "_sum_values")):
                yield f"{name} of one rank", lambda one: _of_one_rank(one, name)


def changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the possible mutations of a node, each as a description and a function that returns a changed copy of the node."""
    yield from hidden_changes_of(node)

    def swapped(attribute: str, value: Any) -> Any:
        def apply(one: Any) -> Any:
            setattr(one, attribute, value)
            return one

        return apply

    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            other = OPERATORS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", swapped("op", other())
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            other = COMPARISONS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", swapped("ops", [other()])
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} -> {other.__name__}", swapped("op", other())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield f"{type(node.op).__name__} dropped", lambda one: one.operand
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", swapped("value", not value)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield f"{value} -> {value + 1}", swapped("value", value + 1)
        case ast.Constant(value=float(value)):
            yield f"{value} -> {value * 2 + 1}", swapped("value", value * 2 + 1)
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            other = NAMES[name]
            yield f"{name} -> {other}", lambda one: setattr(one.func, "attr", other) or one
        case ast.Call(func=ast.Attribute(attr=name)) if name in DROPPED_METHODS:
            yield f".{name}() dropped", lambda one: one.func.value
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, _, _]):
            yield (
                "branches of where swapped",
                lambda one: setattr(one, "args", [one.args[0], one.args[2], one.args[1]]) or one,
            )
        case ast.IfExp():
            yield "condition negated", lambda one: setattr(one, "test", ast.UnaryOp(ast.Not(), one.test)) or one
        case ast.If():
            yield "condition negated", lambda one: setattr(one, "test", ast.UnaryOp(ast.Not(), one.test)) or one
        case ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue():
            yield "statement dropped", lambda one: ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield "statement dropped", lambda one: ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "statement dropped", lambda one: ast.Pass()


def children(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield child nodes where a change can matter, excluding annotations, messages, decorators and docstrings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc", "msg") or isinstance(node, ast.JoinedStr):
            continue
        if isinstance(value, ast.AST):
            yield node, name, None, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield node, name, index, item


def mutants_of(path: str) -> list[Mutant]:
    """Return every mutant of a file in line order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    found = []

    def visit(node: ast.AST, way: list[tuple[str, int | None]]) -> None:
        for _, name, index, child in children(node):
            here = [*way, (name, index)]
            in_function = any(step[0] == "body" for step in here[:-1])
            for change, apply in changes_of(child) if in_function or isinstance(child, ast.expr) else ():
                whole = copy.deepcopy(tree)
                parent: Any = whole
                for step, place in here[:-1]:
                    parent = getattr(parent, step) if place is None else getattr(parent, step)[place]
                old = getattr(parent, name) if index is None else getattr(parent, name)[index]
                new = ast.copy_location(apply(old), child)
                if index is None:
                    setattr(parent, name, new)
                else:
                    getattr(parent, name)[index] = new
                ast.fix_missing_locations(whole)
                place = None
                match change.split():
                    case [side, "term", "detached"]:
                        place = _place(getattr(child, side))
                    case ["argument", number, "detached"]:
                        place = _place(child.args[int(number)])
                found.append(Mutant(path, child.lineno, lines[child.lineno - 1].strip(), change, whole, place))
            visit(child, here)

    visit(tree, [])
    seen: Counter[str] = Counter()
    for place, mutant in enumerate(found):  # number identical changes on one line
        seen[mutant.key] += 1
        if seen[mutant.key] > 1:
            found[place] = replace(mutant, change=f"{mutant.change} (#{seen[mutant.key]})")
    return sorted(found, key=lambda mutant: (mutant.line, mutant.change))


def _place(node: ast.expr) -> tuple[int, ...]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class _Watched(ast.NodeTransformer):
    """Instruments terms so that they record in a file when they have a gradient."""

    def __init__(self, places: list[tuple[int, ...]], file: int) -> None:
        self.places, self.file = places, file

    def visit(self, node: ast.AST) -> ast.AST:
        is_one = isinstance(node, ast.expr) and _place(node) in self.places and not isinstance(node, ast.Starred)
        number = self.places.index(_place(node)) if is_one else 0
        node = self.generic_visit(node)
        if not is_one:
            return node
        text = f"__import__('os').write({self.file}, b'{number} ')"
        text = f"(lambda term: (getattr(term, 'requires_grad', False) and __import__('torch').is_grad_enabled() and {text}, term)[1])"
        return ast.copy_location(_parsed(text + "(%s)", node), node)


def with_gradient(mutants: list[Mutant], tests: list[str]) -> list[Mutant]:
    """Drop a file's mutants that detach terms without gradients in its tests, because they have no effect there."""
    places = sorted({mutant.term for mutant in mutants if mutant.term is not None})
    if not places:
        return mutants
    first = mutants[0]
    with tempfile.TemporaryFile() as file:
        tree = _Watched(places, file.fileno()).visit(ast.parse((ROOT / first.path).read_text(encoding="utf-8")))
        run_tests(tests, replace(first, tree=ast.fix_missing_locations(tree)), 3600)
        file.seek(0)
        seen = {places[int(number)] for number in set(file.read().split())}
    return [mutant for mutant in mutants if mutant.term is None or mutant.term in seen]


class _Mutated(SourceFileLoader):
    """Loads one module from a mutated syntax tree."""

    tree: ast.Module

    def get_code(self, fullname: str) -> Any:
        return compile(self.tree, self.path, "exec")


class _Finder:
    """Finds the mutated module before Python's own finders do."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Mutated(name, str(self.path))
        loader.tree = self.tree
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def fork_server(_path: str, arguments: Sequence[Any], _files: Sequence[int]) -> int:
    """Fork the fork server of the tests' ranks instead of starting a new interpreter, so that ranks also run the mutant."""
    child = os.fork()
    if child == 0:
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(0)
    return child


def run_tests(tests: list[str], mutant: Mutant | None, timeout_s: float) -> str:
    """Run tests in a fork with the mutant replacing its module; return ``passed``, ``failed`` or ``timeout``."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1), os.dup2(nowhere, 2)
            if mutant is not None:
                name = mutant.path.removesuffix(".py").replace("/", ".")
                sys.meta_path.insert(0, _Finder(name, ROOT / mutant.path, mutant.tree))
            # Start the server now, because a process that has used autograd cannot be forked.
            multiprocessing.util.spawnv_passfds, spawn = fork_server, multiprocessing.util.spawnv_passfds
            multiprocessing.forkserver.ensure_running()
            multiprocessing.util.spawnv_passfds = spawn
            import pytest

            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with suppress(ProcessLookupError):  # the fork server
                os.killpg(child, signal.SIGKILL)
            return "passed" if status == 0 else "failed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def equivalents() -> dict[str, str]:
    """Read the mutants that do not affect results: ``path | line of source | change | reason``."""
    found = {}
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.is_file() else ():
        if line.strip() and not line.startswith("#"):
            key, _, reason = line.rpartition(" | ")
            found[key] = reason
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", choices=sorted(TESTS), help="test only this file; may be repeated")
    parser.add_argument("--lines", help="mutate only these lines of the file, such as 40-60")
    parser.add_argument(
        "--kind", choices=sorted(KINDS), action="append", help="run only mutants of this kind; may be repeated"
    )
    parser.add_argument("--sample", type=int, help="run a random sample of this many mutants")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument("--minimum", type=float, default=0.95, help="required fraction of killed mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants without running tests")
    arguments = parser.parse_args()
    mutants = [mutant for path in arguments.file or TESTS for mutant in mutants_of(path)]
    if arguments.lines:
        first, last = (int(number) for number in arguments.lines.split("-"))
        mutants = [mutant for mutant in mutants if first <= mutant.line <= last]
    if arguments.kind:
        words = [KINDS[kind] for kind in arguments.kind]
        mutants = [mutant for mutant in mutants if any(word in mutant.change for word in words)]
    known = equivalents()
    mutants = [mutant for mutant in mutants if mutant.key not in known]
    if arguments.sample is not None:
        chosen = random.Random(arguments.seed).sample(range(len(mutants)), min(arguments.sample, len(mutants)))
        mutants = [mutants[index] for index in sorted(chosen)]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line}: {mutant.change}: {mutant.source}")
        return 0
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1",
                      PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # fmt: skip
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in SLOW_PACKAGES:
        importlib.import_module(name)
    gc.freeze()  # garbage collection in a fork would copy the memory of all imported packages
    scores: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for path in dict.fromkeys(mutant.path for mutant in mutants):
        start = time.monotonic()
        if run_tests(TESTS[path], None, 3600) != "passed":
            print(f"{path}: its tests fail without mutants: {' '.join(TESTS[path])}")
            return 2
        seconds[path] = time.monotonic() - start
        own = [mutant for mutant in mutants if mutant.path == path]
        kept = with_gradient(own, TESTS[path])
        print(f"{path}: {len(own)} mutants, of which {len(own) - len(kept)} detach terms without gradients", flush=True)
        mutants = [mutant for mutant in mutants if mutant.path != path or mutant in kept]
    for mutant in mutants:
        tests = TESTS[mutant.path]
        outcome = run_tests(tests, mutant, 10 * seconds[mutant.path] + 60)
        score = scores.setdefault(mutant.path, [0, 0])
        score[0] += outcome != "passed"
        score[1] += 1
        if outcome == "passed":
            print(f"survived {mutant.path}:{mutant.line}: {mutant.change}: {mutant.source}", flush=True)
    died, total = (sum(score[k] for score in scores.values()) for k in (0, 1))
    share = died / total if total else 1.0
    result = {path: f"{score[0]}/{score[1]}" for path, score in scores.items()}
    print(json.dumps({"name": "mutants", "died": died, "of": total, "share": round(share, 4), "files": result}))
    return 0 if share >= arguments.minimum else 1


if __name__ == "__main__":
    sys.exit(main())
