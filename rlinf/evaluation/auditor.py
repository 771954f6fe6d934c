"""Does a policy read, look and react, or does it remember? The same episodes again, with one thing changed at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlinf.envs.success_override import overrides_success
from rlinf.errors import ConfigError, RejectedInputError, RejectedRequestError
from rlinf.evaluation.audit_checkpoint import AuditCheckpoint
from rlinf.evaluation.compare import EPISODES, compare
from rlinf.evaluation.disturbed_env import (
    DisturbedEnv,
    EpisodeRecord,
    Motion,
    NoPolicy,
    Sight,
    both,
    fixed,
    images_of,
    push_of,
    pushed,
    random_actions,
    replace_instruction,
    states_of,
    through,
)
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import EvaluationResult, actions_clipped, clipping_warning, far_warning
from rlinf.evaluation.verdicts import UNCLEAR, ConditionRow, Verdict, judged_verdict, verdicts
from rlinf.number_formats import format_interval, format_points
from rlinf.types import EpisodeSpec

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel
    from rlinf.types import SupportsAct

SHIFT = 1 / 16
"""Part of an image's width by which it is shifted."""
BRIGHTNESS = 1.3
"""Factor of all pixels of a brighter image."""
VISIBLE = 32
"""Grey levels (of 255) by which a number of an image differs visibly."""
MOVED_WORLDS = {"objects": "objects moved by a few centimetres", "cameras": "cameras moved by a few centimetres"}


@dataclass
class Audit:
    """What an audit has found.

    Attributes:
        rows: Success in each condition, ``clean`` first.
        verdicts: Answers, in the order of the page.
        actions_clipped_fraction, actions_max_abs: See ``EvaluationResult``; of the clean episodes.
    """

    rows: list[ConditionRow]
    verdicts: list[Verdict]
    num_episodes: int
    warnings: list[str] = field(default_factory=list)
    actions_clipped_fraction: float | None = None
    actions_max_abs: float | None = None

    @property
    def faults(self) -> list[Verdict]:
        """Answers that speak against the policy or its success rate."""
        return [one for one in self.verdicts if one.is_fault]

    def summary(self) -> str:
        """Return three sentences: what speaks against the policy, which small changes stop it, and what it does only in part."""
        cheats = "; ".join(f"{one.question} {one.answer}" for one in self.faults) or "nothing found"
        breaks = "; ".join(each for one in self.verdicts for each in one.breaks) or "nothing found"
        partly = "; ".join(f"{one.question} {one.shown}" for one in self.verdicts if one.is_partial) or "nothing found"
        open_ones = [one.question for one in self.verdicts if one.answer == UNCLEAR]
        rest = f" Open: {' '.join(open_ones)}" if open_ones else ""
        return f"Cheats: {cheats}. Breaks when: {breaks}. Partly: {partly}.{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "num_episodes": self.num_episodes,
            "actions_clipped_fraction": self.actions_clipped_fraction,
            "actions_max_abs": self.actions_max_abs,
            "summary": self.summary(),
            "verdicts": [vars(one) for one in self.verdicts],
            "rows": [row.as_dict() for row in self.rows],
            "warnings": self.warnings,
        }

    def table(self) -> str:
        """Return rows and answers as text."""
        width = max(len(row.title) for row in self.rows)
        head = f"{'condition'.ljust(width)}  success      k/n  change  95 % interval"
        return "\n".join([head, *(row_text(row, width) for row in self.rows), "", self.answers()])

    def answers(self) -> str:
        """Return the answers as text."""
        return "\n".join(
            [*(f"{one.question} {one.shown.upper()}: {one.reason}." for one in self.verdicts), self.summary()]
        )


def row_text(row: ConditionRow, width: int) -> str:
    """Return a line of the table, with a title of ``width`` letters."""
    name = row.title.ljust(width)
    if row.success is None:
        return f"{name}  not possible here: {row.note}"
    line = f"{name}  {row.success.success_rate:7.1%}  {row.success.count:>7}"
    if row.pairs is not None:
        line += f"  {format_points(row.pairs.difference):>6}  {format_points(*row.pairs.interval)}"
    elif row.key == "clean":
        line += f"          {format_interval(*row.success.interval, ' - ')}"
    return line + (f"  ({row.note})" if row.note else "")


class Auditor:
    """Plays a policy in one condition after the other.

    Args:
        specs: The episodes of all conditions but ``seen``; a condition that needs another episode plays those that have one.
        on_row: Called with each row as soon as it is known.
        kept: Keeps each finished condition, and knows the conditions of an interrupted audit; None: nothing is kept.
        sampling: ``greedy``, ``temperature`` and ``seed`` of ``evaluate_policy``.
    """

    def __init__(
        self,
        model: ActionModel | SupportsAct,
        env: VectorEnv,
        specs: Sequence[EpisodeSpec],
        *,
        on_row: Callable[[ConditionRow], None] = lambda row: None,
        kept: AuditCheckpoint | None = None,
        **sampling: Any,
    ) -> None:
        self.model, self.env, self.specs, self.options = model, env, list(specs), sampling
        self.on_row, self.kept = on_row, kept
        self.rows: dict[str, ConditionRow] = {}
        self.results: dict[str, EvaluationResult] = {}
        self.records: dict[EpisodeSpec, EpisodeRecord] = {}
        self.warnings: list[str] = []

    def run(self, seen: Sequence[EpisodeSpec], seen_note: str, moved: Callable[[str], VectorEnv | None]) -> Audit:
        """Play all conditions.

        Args:
            seen: Episodes from initial states of training; empty: unknown.
            seen_note: Where they come from.
            moved: Makes an env like the first one whose ``objects`` or ``cameras`` are elsewhere; None: it cannot. It is closed here.
        """
        self.play("clean", "as evaluated")
        self._baselines()
        self._instructions()
        self._images()
        self._state()
        self._pushes()
        self._actions_of_others()
        for what, title in MOVED_WORLDS.items():
            self._moved(what, title, moved)
        if seen:
            self.play("seen", "initial states of training", specs=list(seen), note=seen_note)
        else:
            self.skip("seen", "initial states of training", seen_note)
        better = max(("idle", "random"), key=lambda key: self.rows[key].success.success_rate)
        matched = {"baseline": compare(self.results[better], self.results["clean"]).total}
        if "pushed" in self.results:
            matched["pushed"] = compare(self.results["pushed_replay"], self.results["pushed"]).total
        at_once = sum(one.success and one.num_env_steps <= 1 for one in self.results["idle"].results)
        answers = verdicts(self.rows, at_once, matched)
        clean, told = self.results["clean"], list(dict.fromkeys(self.warnings))
        if overrides_success(self.env.config):
            answers.append(judged_verdict(clean, self.results["idle"].total))
        actions = clean.actions_clipped_fraction, clean.actions_max_abs
        return Audit(list(self.rows.values()), answers, len(self.specs), told, *actions)

    def play(
        self,
        key: str,
        title: str,
        *,
        sight: Sight | None = None,
        motion: Motion | None = None,
        model: Any = None,
        env: VectorEnv | None = None,
        specs: list[EpisodeSpec] | None = None,
        note: str = "",
    ) -> None:
        """Play one condition and keep its row, ``clean`` with its records. A rejection of the policy becomes the row's note; other errors are raised."""
        is_clean, episodes = key == "clean", self.specs if specs is None else specs
        played = DisturbedEnv(self.env if env is None else env, sight, motion, self.records if is_clean else None)
        try:
            result = None if self.kept is None else self.kept.result(key, episodes)
            if result is not None and is_clean:
                self.records |= self.kept.records(episodes)
            if result is None:
                result = evaluate_policy(
                    self.model if model is None else model, cast("VectorEnv", played), episodes, **self.options
                )
                if self.kept is not None:
                    if is_clean:
                        self.kept.add_records(self.records, self.specs)
                    self.kept.add(key, result)
        except (RejectedInputError, RejectedRequestError) as error:
            if is_clean:
                raise
            if env is None:  # the unchanged env tells a rejected condition from a policy that has failed
                evaluate_policy(self.model, self.env, self.specs[:1], **self.options)
            self.skip(key, title, str(error))
            return
        if is_clean and not result.total.is_reported:
            raise ConfigError(
                f"An audit counts successes, and none of {len(self.specs)} episodes has told success, only returns; required: an "
                "env that tells it. Set env.success_return=<sum of rewards that is a success> (env=gymnasium)"
            )
        disturbed = (
            []
            if is_clean
            else clipping_warning(*actions_clipped(result.results))
            + far_warning(result.states_far_fraction)
            + result.judged_warning()
        )
        self.warnings += [] if specs is not None else [one for one in result.warnings if one not in disturbed]
        self.results[key] = result
        pairs = None if key in ("clean", "seen") else compare(self.results["clean"], result, [EPISODES]).total
        self._keep(ConditionRow(key, title, result.total, pairs, note))

    def skip(self, key: str, title: str, why: str) -> None:
        """Keep the row of a condition that is not possible."""
        self._keep(ConditionRow(key, title, note=why))

    def _keep(self, row: ConditionRow) -> None:
        self.rows[row.key] = row
        self.on_row(row)

    def _without_policy(self, key: str, title: str, motion: Motion, specs: list[EpisodeSpec] | None = None) -> None:
        self.play(key, title, motion=motion, model=NoPolicy(self.env.action_dim), specs=specs)

    def _baselines(self) -> None:
        env, horizon = self.env, self.env.max_episode_steps
        nothing = np.zeros((0, env.action_dim), dtype=np.float32)
        drawn = {spec: random_actions(spec, env.action_low, env.action_high, horizon) for spec in self.specs}
        self._without_policy("idle", "no policy: zeros", fixed(dict.fromkeys(self.specs, nothing)))
        self._without_policy("random", "no policy: random actions", fixed(drawn))

    def _instructions(self) -> None:
        sentences: dict[str, list[str]] = {}
        for spec, record in self.records.items():
            sentences.setdefault(self.env.task_names[spec.task_id], []).append(record.instruction)
        others = swapped(sentences)
        everything = [record.instruction for record in self.records.values()]
        if others:
            self.play("swapped", "another instruction", sight=replace_instruction(others))
        else:
            self.skip("swapped", "another instruction", "all episodes have the same instruction")
        self.play("blank", "no instruction", sight=replace_instruction(dict.fromkeys(everything, "")))
        self.play("paraphrased", "the instruction in other words", sight=replace_instruction(paraphrased(everything)))

    def _images(self) -> None:
        cameras = list(next(iter(self.records.values())).images)
        titles = {"other_images": "first image of another episode", "black": "all cameras black"}
        if not cameras:
            for key, title in titles.items():
                self.skip(key, title, "the env shows no images")
            return
        others = {
            spec: self.records[other].images
            for spec, other in self._others(lambda spec, other: True).items()
            if differ(self.records[spec].images, self.records[other].images)
        }
        if 2 * len(others) > len(self.specs):
            self.play("other_images", titles["other_images"], sight=images_of(others), specs=list(others))
        else:
            self.skip("other_images", titles["other_images"], "the episodes of a task start with the same image")
        self.play("black", titles["black"], sight=through(cameras, np.zeros_like))
        for name in cameras:
            if len(cameras) > 1:
                self.play(f"black_{name}", f"camera {name} black", sight=through([name], np.zeros_like))
            self.play(f"shifted_{name}", f"camera {name} shifted by {SHIFT:.0%}", sight=through([name], shift))
            self.play(
                f"brighter_{name}", f"camera {name} {BRIGHTNESS - 1:.0%} brighter", sight=through([name], brighten)
            )

    def _state(self) -> None:
        images = images_of({spec: record.images for spec, record in self.records.items()})
        own = {spec: record.state for spec, record in self.records.items() if record.state is not None}
        pairs = self._others(lambda spec, other: True).items() if own else ()
        others = {spec: own[other] for spec, other in pairs if not np.allclose(own[spec], own[other], atol=1e-3)}
        why = "the episodes of a task start with the same state" if own else "the env shows no state"
        for key, title, states in (
            ("other_state", "first state of another episode", others),
            ("frozen_state", "state of the start throughout", own),
        ):
            if 2 * len(states) > len(self.specs):
                self.play(key, title, sight=states_of(states), specs=list(states))
            else:
                self.skip(key, title, why)
        self.play("frozen", "images and state of the start throughout", sight=both(images, states_of(own)))

    def _pushes(self) -> None:
        env = self.env
        own = {spec: as_array(record, env.action_dim) for spec, record in self.records.items()}
        pushes = {spec: push_of(spec, env.action_low, env.action_high, len(own[spec])) for spec in self.specs}
        self.play("pushed", "pushed on the way", motion=pushed(pushes))
        self._without_policy("pushed_replay", "pushed on the way, its own actions replayed", pushed(pushes, fixed(own)))

    def _actions_of_others(self) -> None:
        succeeded = {one.spec for one in self.results["clean"].results if one.success}
        said = {spec: record.instruction for spec, record in self.records.items()}
        same = self._others(lambda spec, other: other in succeeded and said[spec] == said[other])
        any_sentence = self._others(lambda spec, other: other in succeeded)
        found = any_sentence | same
        title = "its actions of another episode replayed"
        if not succeeded:
            self.skip("other_actions", title, "no episode succeeded")
            return
        if 2 * len(found) <= len(self.specs):
            self.skip("other_actions", title, "most episodes have no other one of their task that succeeded")
            return
        actions = {spec: as_array(self.records[other], self.env.action_dim) for spec, other in found.items()}
        self._without_policy("other_actions", title, fixed(actions), list(found))

    def _moved(self, what: str, title: str, moved: Callable[[str], VectorEnv | None]) -> None:
        env = moved(what)
        if env is None:
            self.skip(f"moved_{what}", title, f"{type(self.env).__name__} cannot move {what}")
            return
        try:
            self.play(f"moved_{what}", title, env=env)
        finally:
            env.close()

    def _others(self, fits: Callable[[EpisodeSpec, EpisodeSpec], bool]) -> dict[EpisodeSpec, EpisodeSpec]:
        """Return for each episode the next one of its task in the list that fits, if there is one."""
        found = {}
        for place, spec in enumerate(self.specs):
            following = self.specs[place + 1 :] + self.specs[:place]
            other = next((one for one in following if one.task_id == spec.task_id and fits(spec, one)), None)
            if other is not None:
                found[spec] = other
        return found


def as_array(record: EpisodeRecord, action_dim: int) -> np.ndarray:
    """Return the actions of an episode, float32 ``[steps, D]``."""
    return np.stack(record.actions) if record.actions else np.zeros((0, action_dim), dtype=np.float32)


def differ(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether any camera ``[H, W, 3]`` shows something else: more than 1 in 200 numbers differ by more than ``VISIBLE``."""
    gaps = [np.abs(one[name].astype(np.int16) - other[name]) > VISIBLE for name in one]
    return any(gap.mean() > 1 / 200 for gap in gaps)


def shift(images: np.ndarray) -> np.ndarray:
    """Shift images ``[B, H, W, 3]`` to the right by ``SHIFT`` of their width; the left edge is repeated."""
    pixels = max(1, round(images.shape[2] * SHIFT))
    edge = np.repeat(images[:, :, :1], pixels, axis=2)
    return np.concatenate([edge, images[:, :, :-pixels]], axis=2)


def brighten(images: np.ndarray) -> np.ndarray:
    """Make images brighter by the factor ``BRIGHTNESS``, up to 255."""
    return np.minimum(images.astype(np.float32) * BRIGHTNESS, 255).astype(np.uint8)


def check_episodes(specs: Sequence[EpisodeSpec]) -> None:
    """Raise ConfigError for a list that is too short to say anything."""
    if len(specs) < 2:
        raise ConfigError(
            f"An audit of {len(specs)} episodes says nothing; required: at least 2. Set evaluation.num_episodes=100"
        )


def check_held_out(split: str) -> None:
    """Raise ConfigError for the training split, whose episodes a policy may remember."""
    if split == "train":
        raise ConfigError(
            "evaluation.split=train in an audit compares episodes of training with themselves; required: held-out episodes. "
            "Set evaluation.split=eval"
        )


SYNONYMS = {
    "block": "cube", "zone": "area", "reach": "move to", "go to": "drive to", "touch": "tap", "push": "shove", "pick up": "grab",
    "put": "place", "place": "put", "open": "pull open", "close": "shut", "turn on": "switch on", "turn off": "switch off",
    "stack": "pile up", "bowl": "dish", "plate": "platter", "cabinet": "cupboard", "mug": "cup",
}  # fmt: skip
"""Phrases that may stand for each other. Colours, sides and names of goods have none."""


def paraphrased(sentences: Sequence[str]) -> dict[str, str]:
    """Return each sentence in other words: synonyms for the words that have one, and a polite frame."""
    words = sorted(SYNONYMS, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    return {one: f"please {pattern.sub(lambda match: SYNONYMS[match[0]], one)} now" for one in sentences}


def swapped(sentences_of_tasks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return for each sentence another one that asks for something else; empty if there is only one.

    Of a task with several sentences, it is another one of the same task: half of the sorted list further on, so that sentences with
    two objects differ in the first, too. Else it is the sentence of the next task.
    """
    tasks = {task: sorted(set(sentences)) for task, sentences in sentences_of_tasks.items()}
    everything = sorted({one for sentences in tasks.values() for one in sentences})
    found = {}
    for sentences in tasks.values():
        others = sentences if len(sentences) > 1 else everything
        for one in sentences:
            found[one] = others[(others.index(one) + max(1, len(others) // 2)) % len(others)]
    return {one: other for one, other in found.items() if one != other}
