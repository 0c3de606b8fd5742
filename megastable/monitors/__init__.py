"""Floor 2: what watches a run. Monitors observe records and answer with events; none of them touches the engine."""

from megastable.monitors.registry import MONITORS, Monitors
from megastable.monitors.training_status import TrainingStatus, training_status

__all__ = ["MONITORS", "Monitors", "TrainingStatus", "training_status"]
