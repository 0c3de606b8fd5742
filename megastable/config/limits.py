"""The largest numbers that a run file may hold, each far above any run that is trained today.

Without them a slipped digit asks for a list of a thousand million layers, or for an integer that no float holds. Within
them every count that is made of a run file stays within 64 bits or is one of Python's own integers, and ``check`` and
``plan`` answer within seconds.
"""

from __future__ import annotations

from typing import Final

# The model. DeepNet (Wang et al., arXiv 2203.00555) has 1,000 blocks; the widest published models about 20,000 columns.
MOST_LAYERS: Final = 1_000
LARGEST_WIDTH: Final = 2**20
LARGEST_INNER_WIDTH: Final = 2**23
LONGEST_SEQUENCE: Final = 2**20
LARGEST_VOCABULARY: Final = 2**24

# The layout. What is simulated of a pipeline grows with the square of its stages, for each of a ramp's batches.
MOST_STAGES: Final = 128
MOST_TENSOR_RANKS: Final = 1_024
MOST_PROCESSES: Final = 1_000_000

# Lengths. The longest run has 10^12 samples of 2^20 tokens, about 10^18 tokens, which a signed 64-bit integer holds.
LARGEST_BATCH: Final = 2**20
MOST_SAMPLES: Final = 10**12
MOST_TOKENS: Final = 10**18
MOST_STEPS: Final = 10**9
MOST_INCREMENTS: Final = 1_000
"""Of a ramp; every increment is a phase that is planned by itself."""
MOST_TRIED_BY_AUTO: Final = 50_000
"""Batches of a ramp x stages^2, to which the time grows in which "auto" tries every split of every batch."""
LONGEST_LIST: Final = 1_000
"""Entries of a list of steps."""

# Numbers of the optimizer and of the number formats.
LARGEST_SCALE_POWER: Final = 62
"""DeepSpeed hands the loss scale to torch as an integer, which holds 2^62 and not 2^63."""
LARGEST_FACTOR: Final = 1e6
"""Of what multiplies, adds to or caps values of a model: learning rate, std, weights of losses, caps, clip norm."""
MOST_ELEMENTS: Final = 10**12
"""Of a buffer of ZeRO."""

LONGEST_PATTERN: Final = 100
MOST_REPETITIONS: Final = 3
"""Of a pattern after ``type:``, in characters and in signs of repetition."""

LONGEST_PATH: Final = 4_000
LONGEST_PATH_PART: Final = 255
"""What Linux takes of a path (with its end) and of one name in it, in bytes."""

DEEPEST_NESTING: Final = 32
"""Brackets within brackets; a legal run file has 6."""
