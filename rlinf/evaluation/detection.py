"""How well scores tell success from failure: threshold, error rates with intervals, calibration."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf.evaluation.intervals import wilson_interval

NUM_BINS = 10


def choose_threshold(scores: np.ndarray, labels: np.ndarray, false_positives: float) -> float:
    """Return the smallest threshold that at most the fraction ``false_positives`` of the failures reach.

    ``scores`` are float32 ``[N]``; ``labels``, bool ``[N]``, are true for successes. Of ``n`` failures, at most
    ``floor(n * false_positives)`` have a score of at least the threshold.
    """
    failures = np.sort(scores[~labels])[::-1]
    allowed = int(len(failures) * false_positives + 1e-9)
    return float(np.nextafter(failures[allowed], np.float32(np.inf)))


def errors(seen: np.ndarray, labels: np.ndarray, episodes: np.ndarray) -> dict[str, Any]:
    """Return ``errors`` of ``seen``, bool ``[N]``, with counts, shares and 95 % Wilson intervals.

    ``false_positives``: failures that are seen as success, of the failures. ``false_negatives``: successes that are not seen, of the
    successes. ``false_positive_episodes``: episodes with a false positive, of those with failures. The intervals of frames take frames
    as independent.
    """
    wrong, failed, found = seen & ~labels, np.unique(episodes[~labels]), {}
    kinds = ("false_positives", wrong[~labels]), ("false_negatives", ~seen[labels])
    for name, each in (*kinds, ("false_positive_episodes", np.isin(failed, episodes[wrong]))):
        k, n = int(each.sum()), len(each)
        found[name] = {"count": k, "of": n, "share": k / n, "interval": list(wilson_interval(k, n))}
    return {"errors": found}


def calibration(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the ``reliability`` in ``NUM_BINS`` bins of equal width, without empty ones, and the ``calibration_error``.

    ``ECE = sum_b n_b / N |share of successes in b - mean probability in b|`` (Guo et al. 2017, equation 3, of the probability of success).
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    numbers = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    table = []
    for inside in (numbers == number for number in np.unique(numbers)):
        mean, share = float(probabilities[inside].mean()), float(labels[inside].mean())
        table.append({"probability": mean, "success": share, "frames": int(inside.sum())})
    error = sum(one["frames"] * abs(one["success"] - one["probability"]) for one in table) / len(labels)
    return {"reliability": table, "calibration_error": error}
