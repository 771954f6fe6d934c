"""Audit a policy: rerun the same episodes with one disturbance at a time to determine which inputs its success depends on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlinf.audits.checkpoint import AuditCheckpoint
from rlinf.audits.verdicts import UNCLEAR, ConditionRow, Verdict, success_label_verdict, verdicts
from rlinf.errors import ConfigError, RejectedInputError, RejectedRequestError
from rlinf.evaluation.compare import EPISODES, compare
from rlinf.evaluation.disturbed_env import (
    DisturbedEnv,
    EpisodeRecord,
    Motion,
    NoPolicy,
    Sight,
    compose,
    draw_push,
    fixed,
    map_images,
    pushed,
    random_actions,
    replace_instruction,
    still_images,
    still_states,
    successors,
    swapped,
)
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import EvaluationResult, actions_clipped, clipping_warning, far_warning
from rlinf.files import Json
from rlinf.number_formats import format_interval, format_points
from rlinf.types import EpisodeSpec

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel
    from rlinf.types import SupportsAct

SHIFT = 1 / 16
"""How far images are shifted, as a fraction of their width."""
BRIGHTNESS = 1.3
"""Factor by which all pixel values are multiplied to brighten an image."""
VISIBLE = 32
"""Smallest difference between pixel values (0 to 255) that is considered visible."""
MOVED_WORLDS = {"objects": "objects moved by a few centimetres", "cameras": "cameras moved by a few centimetres"}


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        actions_clipped_fraction, actions_max_abs: As in ``EvaluationResult``, for the clean episodes.
    """

    rows: list[ConditionRow]
    verdicts: list[Verdict]
    num_episodes: int
    warnings: list[str] = field(default_factory=list)
    actions_clipped_fraction: float | None = None
    actions_max_abs: float | None = None

    @property
    def faults(self) -> list[Verdict]:
        """Verdicts against the policy or its success rate."""
        return [verdict for verdict in self.verdicts if verdict.is_fault]

    def summary(self) -> str:
        """Return one line with the faults, the small disturbances that make the policy fail, partial effects and open questions."""
        cheats = "; ".join(f"{verdict.question} {verdict.outcome}" for verdict in self.faults) or "nothing found"
        breaks = "; ".join(change for verdict in self.verdicts for change in verdict.breaks) or "nothing found"
        partial = [f"{verdict.question} {verdict.shown}" for verdict in self.verdicts if verdict.is_partial]
        unclear = [verdict.question for verdict in self.verdicts if verdict.outcome == UNCLEAR]
        rest = f" Open: {' '.join(unclear)}" if unclear else ""
        return f"Cheats: {cheats}. Breaks when: {breaks}. Partly: {'; '.join(partial) or 'nothing found'}.{rest}"

    def as_dict(self) -> Json:
        """Return everything as JSON values."""
        return {
            "num_episodes": self.num_episodes,
            "actions_clipped_fraction": self.actions_clipped_fraction,
            "actions_max_abs": self.actions_max_abs,
            "summary": self.summary(),
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "rows": [row.as_dict() for row in self.rows],
            "warnings": self.warnings,
        }

    def table(self) -> str:
        """Return the rows and verdicts as text."""
        width = max(len(row.title) for row in self.rows)
        head = f"{'condition'.ljust(width)}  success      k/n  change  95 % interval"
        return "\n".join([head, *(row_text(row, width) for row in self.rows), "", self.conclusions()])

    def conclusions(self) -> str:
        """Return the verdicts and the summary as text."""
        lines = [f"{verdict.question} {verdict.shown.upper()}: {verdict.reason}." for verdict in self.verdicts]
        return "\n".join([*lines, self.summary()])


def row_text(row: ConditionRow, width: int) -> str:
    """Return a line of the table, with its title padded to ``width`` characters."""
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
    """Evaluates a policy under each condition in turn.

    Args:
        specs: Episodes for all conditions except ``seen``. Conditions that borrow something from a different episode only run the
            episodes for which a suitable one exists.
        checkpoint: Saves each finished condition and returns an interrupted audit's. If None, conditions are not saved.
    """

    def __init__(
        self,
        model: ActionModel | SupportsAct,
        env: VectorEnv,
        specs: Sequence[EpisodeSpec],
        *,
        on_row: Callable[[ConditionRow], None] = lambda row: None,
        checkpoint: AuditCheckpoint | None = None,
        **sampling: Any,
    ) -> None:
        self.model, self.env, self.specs, self.options = model, env, list(specs), sampling
        self.on_row, self.checkpoint = on_row, checkpoint
        self.rows: dict[str, ConditionRow] = {}
        self.results: dict[str, EvaluationResult] = {}
        self.records: dict[EpisodeSpec, EpisodeRecord] = {}
        self.warnings: list[str] = []

    def run(self, seen: Sequence[EpisodeSpec], seen_note: str, moved: Callable[[str], VectorEnv | None]) -> Audit:
        """Run all conditions.

        Args:
            seen: Episodes with initial states from training; empty if these are unknown.
            seen_note: Where these initial states come from.
            moved: Builds the same env with moved ``objects`` or ``cameras``, or returns None if unsupported; ``run`` closes the env.
        """
        self.run_condition("clean", "as evaluated")
        self._baselines()
        self._instructions()
        self._images()
        self._state()
        self._pushes()
        self._replayed_actions()
        for what, title in MOVED_WORLDS.items():
            self._moved(what, title, moved)
        if seen:
            self.run_condition("seen", "initial states of training", specs=list(seen), note=seen_note)
        else:
            self.skip("seen", "initial states of training", seen_note)
        better = max(("idle", "random"), key=lambda key: self.rows[key].success.success_rate)
        matched = {"baseline": compare(self.results[better], self.results["clean"]).total}
        if "pushed" in self.results:
            matched["pushed"] = compare(self.results["pushed_replay"], self.results["pushed"]).total
        reset_successes = sum(result.success and result.num_env_steps <= 1 for result in self.results["idle"].results)
        conclusions = verdicts(self.rows, reset_successes, matched)
        clean, warnings = self.results["clean"], list(dict.fromkeys(self.warnings))
        if clean.true_success is not None:
            conclusions.append(success_label_verdict(clean, self.results["idle"].total))
        actions = clean.actions_clipped_fraction, clean.actions_max_abs
        return Audit(list(self.rows.values()), conclusions, len(self.specs), warnings, *actions)

    def run_condition(
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
        """Run one condition and store its row; ``clean`` also fills the records. If the policy rejects its input, add a note to the row."""
        is_clean, episodes = key == "clean", self.specs if specs is None else specs
        disturbed_env = DisturbedEnv(
            self.env if env is None else env, sight, motion, self.records if is_clean else None
        )
        try:
            result = None if self.checkpoint is None else self.checkpoint.result(key, episodes)
            if result is not None and is_clean:
                self.records |= self.checkpoint.records(episodes)
            if result is None:
                result = evaluate_policy(
                    self.model if model is None else model, cast("VectorEnv", disturbed_env), episodes, **self.options
                )
                if self.checkpoint is not None:
                    # Save the records first: a resumed audit that finds the result of `clean` also needs its records.
                    if is_clean:
                        self.checkpoint.add_records(self.records, self.specs)
                    self.checkpoint.add(key, result)
        except (RejectedInputError, RejectedRequestError) as error:
            if is_clean:
                raise
            # If the policy now also fails in the undisturbed env, it is broken: raise instead of noting a rejected condition.
            if env is None:
                evaluate_policy(self.model, self.env, self.specs[:1], **self.options)
            self.skip(key, title, str(error))
            return
        if is_clean and not result.total.is_reported:
            raise ConfigError(
                f"None of the {len(self.specs)} episodes reports success, only returns; expected an env that reports success, "
                "because an audit counts successes. Set env.success_return=<return of a successful episode> (env=gymnasium)"
            )
        # Warnings from a disturbed condition concern the disturbance; warnings from `clean` concern the policy.
        disturbed = (
            []
            if is_clean
            else clipping_warning(*actions_clipped(result.results))
            + far_warning(result.states_far_fraction)
            + result.success_label_warning()
        )
        self.warnings += [] if specs is not None else [text for text in result.warnings if text not in disturbed]
        self.results[key] = result
        pairs = None if key in ("clean", "seen") else compare(self.results["clean"], result, [EPISODES]).total
        self._add(ConditionRow(key, title, result.total, pairs, note))

    def skip(self, key: str, title: str, why: str) -> None:
        """Add a row for a condition that is not possible."""
        self._add(ConditionRow(key, title, note=why))

    def _add(self, row: ConditionRow) -> None:
        self.rows[row.key] = row
        self.on_row(row)

    def _without_policy(self, key: str, title: str, motion: Motion, specs: list[EpisodeSpec] | None = None) -> None:
        self.run_condition(key, title, motion=motion, model=NoPolicy(self.env.action_dim), specs=specs)

    def _baselines(self) -> None:
        env, horizon = self.env, self.env.max_episode_steps
        nothing = np.zeros((0, env.action_dim), dtype=np.float32)
        drawn = {spec: random_actions(spec, env.action_low, env.action_high, horizon) for spec in self.specs}
        self._without_policy("idle", "no policy: zeros", fixed(dict.fromkeys(self.specs, nothing)))
        self._without_policy("random", "no policy: random actions", fixed(drawn))

    def _instructions(self) -> None:
        by_task: dict[str, list[str]] = {}
        for spec, record in self.records.items():
            by_task.setdefault(self.env.task_names[spec.task_id], []).append(record.instruction)
        replacements = swapped(by_task)
        instructions = [record.instruction for record in self.records.values()]
        if replacements:
            self.run_condition("swapped", "a different instruction", sight=replace_instruction(replacements))
        else:
            self.skip("swapped", "a different instruction", "all episodes have the same instruction")
        self.run_condition("blank", "no instruction", sight=replace_instruction(dict.fromkeys(instructions, "")))
        paraphrases = replace_instruction(paraphrased(instructions))
        self.run_condition("paraphrased", "the instruction paraphrased", sight=paraphrases)

    def _images(self) -> None:
        cameras = list(next(iter(self.records.values())).images)
        titles = {"other_images": "first image of a different episode", "black": "all cameras black"}
        if not cameras:
            for key, title in titles.items():
                self.skip(key, title, "the env shows no images")
            return
        swapped_images = {
            spec: self.records[partner].images
            for spec, partner in successors(self.specs).items()
            if differ(self.records[spec].images, self.records[partner].images)
        }
        if 2 * len(swapped_images) > len(self.specs):
            sight = still_images(swapped_images)
            self.run_condition("other_images", titles["other_images"], sight=sight, specs=list(swapped_images))
        else:
            self.skip("other_images", titles["other_images"], "the episodes of a task start with the same image")
        self.run_condition("black", titles["black"], sight=map_images(cameras, np.zeros_like))
        for name in cameras:
            if len(cameras) > 1:
                self.run_condition(f"black_{name}", f"camera {name} black", sight=map_images([name], np.zeros_like))
            self.run_condition(
                f"shifted_{name}", f"camera {name} shifted by {SHIFT:.0%}", sight=map_images([name], shift)
            )
            self.run_condition(
                f"brighter_{name}", f"camera {name} {BRIGHTNESS - 1:.0%} brighter", sight=map_images([name], brighten)
            )

    def _state(self) -> None:
        images = still_images({spec: record.images for spec, record in self.records.items()})
        first = {spec: record.state for spec, record in self.records.items() if record.state is not None}
        pairs = successors(self.specs).items() if first else ()
        swapped_states = {
            spec: first[partner] for spec, partner in pairs if not np.allclose(first[spec], first[partner], atol=1e-3)
        }
        reason = "the episodes of a task start with the same state" if first else "the env shows no state"
        for key, title, states in (
            ("other_state", "first state of a different episode", swapped_states),
            ("frozen_state", "state frozen at the start", first),
        ):
            if 2 * len(states) > len(self.specs):
                self.run_condition(key, title, sight=still_states(states), specs=list(states))
            else:
                self.skip(key, title, reason)
        frozen = compose(images, still_states(first))
        self.run_condition("frozen", "images and state frozen at the start", sight=frozen)

    def _pushes(self) -> None:
        env = self.env
        actions = {spec: as_array(record, env.action_dim) for spec, record in self.records.items()}
        pushes = {spec: draw_push(spec, env.action_low, env.action_high, len(actions[spec])) for spec in self.specs}
        self.run_condition("pushed", "pushed during the episode", motion=pushed(pushes))
        self._without_policy("pushed_replay", "pushed, its actions replayed", pushed(pushes, fixed(actions)))

    def _replayed_actions(self) -> None:
        succeeded = {result.spec for result in self.results["clean"].results if result.success}
        texts = {spec: record.instruction for spec, record in self.records.items()}
        # Prefer an episode with the same instruction, because it is the stronger test.
        same = successors(self.specs, lambda spec, partner: partner in succeeded and texts[spec] == texts[partner])
        partners = successors(self.specs, lambda spec, partner: partner in succeeded) | same
        title = "its actions from a different episode replayed"
        if not succeeded:
            self.skip("other_actions", title, "no episode succeeded")
            return
        if 2 * len(partners) <= len(self.specs):
            self.skip("other_actions", title, "for most episodes, no other episode of the task succeeded")
            return
        actions = {spec: as_array(self.records[partner], self.env.action_dim) for spec, partner in partners.items()}
        self._without_policy("other_actions", title, fixed(actions), list(partners))

    def _moved(self, what: str, title: str, moved: Callable[[str], VectorEnv | None]) -> None:
        env = moved(what)
        if env is None:
            self.skip(f"moved_{what}", title, f"{type(self.env).__name__} cannot move {what}")
            return
        try:
            self.run_condition(f"moved_{what}", title, env=env)
        finally:
            env.close()


def as_array(record: EpisodeRecord, action_dim: int) -> np.ndarray:
    """Return an episode's actions, float32 ``[steps, D]``."""
    return np.stack(record.actions) if record.actions else np.zeros((0, action_dim), dtype=np.float32)


def differ(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Return whether, for any camera, more than 1 in 200 values of the image ``[H, W, 3]`` differ by more than ``VISIBLE``."""
    gaps = [np.abs(first[name].astype(np.int16) - second[name]) > VISIBLE for name in first]
    return any(gap.mean() > 1 / 200 for gap in gaps)


def shift(images: np.ndarray) -> np.ndarray:
    """Shift images ``[B, H, W, 3]`` to the right by a fraction ``SHIFT`` of their width, repeating the left edge."""
    pixels = max(1, round(images.shape[2] * SHIFT))
    edge = np.repeat(images[:, :, :1], pixels, axis=2)
    return np.concatenate([edge, images[:, :, :-pixels]], axis=2)


def brighten(images: np.ndarray) -> np.ndarray:
    """Multiply the pixel values of images by ``BRIGHTNESS`` and clip them at 255."""
    return np.minimum(images.astype(np.float32) * BRIGHTNESS, 255).astype(np.uint8)


def check_episodes(specs: Sequence[EpisodeSpec]) -> None:
    """Raise ConfigError if the list is too short for an audit."""
    if len(specs) < 2:
        raise ConfigError(f"An audit has {len(specs)} episodes; expected at least 2. Set evaluation.num_episodes=100")


def check_held_out(split: str) -> None:
    """Raise ConfigError for the training split, because a policy may have memorised its episodes."""
    if split == "train":
        raise ConfigError(
            "evaluation.split=train would make the audit compare training episodes with themselves; expected held-out episodes. "
            "Set evaluation.split=eval"
        )


SYNONYMS = {
    "block": "cube", "zone": "area", "reach": "move to", "go to": "drive to", "touch": "tap", "push": "shove", "pick up": "grab",
    "put": "place", "place": "put", "open": "pull open", "close": "shut", "turn on": "switch on", "turn off": "switch off",
    "stack": "pile up", "bowl": "dish", "plate": "platter", "cabinet": "cupboard", "mug": "cup",
}  # fmt: skip
"""Synonyms for the verbs and nouns in instructions; colours, sides and product names are not replaced."""


def paraphrased(instructions: Sequence[str]) -> dict[str, str]:
    """Map each instruction to a paraphrase with synonyms, wrapped in "please ... now"."""
    phrases = sorted(SYNONYMS, key=len, reverse=True)  # longest first: "turn on" before any part of it
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, phrases))})\b")
    return {text: f"please {pattern.sub(lambda match: SYNONYMS[match[0]], text)} now" for text in instructions}
