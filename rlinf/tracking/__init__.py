"""Track the metrics and progress of a run."""

from rlinf.tracking.metrics import METRICS, Metric, register_metric
from rlinf.tracking.progress import Progress
from rlinf.tracking.tracker import Tracker, TrackingConfig, read_metrics

__all__ = ["METRICS", "Metric", "Progress", "Tracker", "TrackingConfig", "read_metrics", "register_metric"]
