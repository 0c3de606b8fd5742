"""Whether a run has time for another step: its limit, and how long steps and saves have taken so far."""

from __future__ import annotations

ASSUMED_BYTES_PER_SECOND = 100e6
"""What a first save is assumed to write at, on every process: a slow disk, or a shared one that all use at once."""
LEAST_SAVE_SECONDS = 1.0
"""What is left for the end of the process, however small its model."""


class TimeLimit:
    """Weighs what is left of a run's time against what another step and the save after it may need.

    Args:
        seconds: when the processes have to have ended, counted from their start.
        saved_bytes: what this process writes at a save.
    """

    def __init__(self, seconds: float, saved_bytes: int) -> None:
        self.seconds = seconds
        self._assumed_save_seconds = saved_bytes / ASSUMED_BYTES_PER_SECOND
        self._longest_save_seconds: float | None = None
        self._longest_round_seconds = 0.0

    def count_round(self, seconds: float) -> None:
        """Remember how long one step took, with all that belonged to it."""
        self._longest_round_seconds = max(self._longest_round_seconds, seconds)

    def count_save(self, seconds: float) -> None:
        """Remember how long a save took; the first one takes the place of what was assumed."""
        self._longest_save_seconds = max(self._longest_save_seconds or 0.0, seconds)

    def is_near(self, elapsed_seconds: float) -> bool:
        """Tell whether the step that begins now, ``elapsed_seconds`` after the start, has to be the last one.

        It need not be where the next one and a save would still fit. The round after the next may be longer than any so
        far, since batches grow, and a save, since disks are shared.
        """
        longest_save = self._longest_save_seconds
        if longest_save is None:
            longest_save = self._assumed_save_seconds
        save_seconds = max(longest_save, LEAST_SAVE_SECONDS)
        needed = 3 * self._longest_round_seconds + 2 * save_seconds
        return elapsed_seconds + needed > self.seconds
