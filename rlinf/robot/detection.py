"""Measure the quality of a success classifier: threshold, error rates with intervals, and calibration."""

import numpy as np

from rlinf.evaluation.intervals import wilson_interval
from rlinf.files import Json

NUM_BINS = 10


def choose_threshold(scores: np.ndarray, labels: np.ndarray, false_positives: float) -> float:
    """Return the smallest threshold with a false positive rate of at most ``false_positives``.

    ``scores`` are float32 ``[N]``. ``labels`` are bool ``[N]``, true for successes.
    """
    failures = np.sort(scores[~labels])[::-1]
    # Add 1e-9 because 100 * 0.29 is 28.999999999999996, which would allow one false positive too few.
    allowed = int(len(failures) * false_positives + 1e-9)
    return float(np.nextafter(failures[allowed], np.float32(np.inf)))


def errors(detected: np.ndarray, labels: np.ndarray, episodes: np.ndarray) -> Json:
    """Return the error rates of ``detected``, bool ``[N]``, as counts, fractions and 95 % Wilson intervals.

    ``false_positives`` is a fraction of the failures, ``false_negatives`` a fraction of the successes, and ``false_positive_episodes`` a
    fraction of the episodes with failures. The intervals assume independent frames.
    """
    wrong, failed, rates = detected & ~labels, np.unique(episodes[~labels]), {}
    kinds = ("false_positives", wrong[~labels]), ("false_negatives", ~detected[labels])
    for name, is_error in (*kinds, ("false_positive_episodes", np.isin(failed, episodes[wrong]))):
        k, n = int(is_error.sum()), len(is_error)
        rates[name] = {"count": k, "of": n, "fraction": k / n, "interval": list(wilson_interval(k, n))}
    return {"errors": rates}


def calibration(logits: np.ndarray, labels: np.ndarray) -> Json:
    """Return the ``reliability`` in ``NUM_BINS`` bins of equal width, omitting empty bins, and the ``calibration_error``.

    ``ECE = sum_b n_b / N |success rate in b - mean probability in b|`` (Guo et al. 2017, equation 3).
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    numbers = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    table = []
    for inside in (numbers == number for number in np.unique(numbers)):
        mean, rate = float(probabilities[inside].mean()), float(labels[inside].mean())
        table.append({"probability": mean, "success": rate, "frames": int(inside.sum())})
    error = sum(row["frames"] * abs(row["success"] - row["probability"]) for row in table) / len(labels)
    return {"reliability": table, "calibration_error": error}
