"""Floor 3: the only importer of deepspeed and torch.distributed.

DeepSpeed picks its accelerator while it is imported. Left to itself it probes for several kinds, and warns on a CPU
that it found none of them; the environment variable settles it beforehand.
"""

import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
