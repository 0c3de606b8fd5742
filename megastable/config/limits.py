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
# Ten years.
MOST_SECONDS: Final = 10 * 365 * 24 * 3600
# Every increment of a ramp, and every entry of a list of steps, is a phase that is planned by itself; BLOOM had 116.
MOST_INCREMENTS: Final = 1_000
LONGEST_LIST: Final = 1_000
# Batches of a ramp x stages^2: the time in which "auto" chooses the split of every batch grows with it, to about half a
# second here.
MOST_TRIED_BY_AUTO: Final = 50_000

# Documents of one source; the words of one of them are in memory together.
MOST_DOCUMENTS: Final = 10**9
MOST_WORDS: Final = 1_000_000

# Seconds after which a run without progress is ended. A busy machine may stand still for some; nobody waits for days.
SHORTEST_HANG_SECONDS: Final = 10
LONGEST_HANG_SECONDS: Final = 86_400

# What multiplies, adds to or caps values of a model: learning rate, std, weights of losses, caps, clip norm. No such
# number that trains is near it, and its square is still finite in every format but fp16.
LARGEST_FACTOR: Final = 1e6
# DeepSpeed hands the loss scale to torch as an integer, which holds 2^62 and not 2^63.
LARGEST_SCALE_POWER: Final = 62
# Elements of a buffer of ZeRO.
MOST_ELEMENTS: Final = 10**12

# Characters, and signs of repetition, of a pattern after ``type:``. With r of them Python's engine tries about
# n^(r + 1) ways to match a name of n characters, and the longest class name has 19.
LONGEST_PATTERN: Final = 100
MOST_REPETITIONS: Final = 3

# What Linux takes of a path (with its end) and of one name in it, in bytes.
LONGEST_PATH: Final = 4_000
LONGEST_PATH_PART: Final = 255

# Brackets within brackets. A legal run file has 6, and Python's parser, copies and printing stop somewhere below 1,000.
DEEPEST_NESTING: Final = 32
