"""Reading a run file as an experienced reviewer would, before anything is built. Needs neither torch nor a GPU."""

from megastable.training.preflight.finding import LEVELS, Finding
from megastable.training.preflight.preflight import preflight

__all__ = ["LEVELS", "Finding", "preflight"]
