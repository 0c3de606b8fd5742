"""Floor 3: the only importer of deepspeed and torch.distributed.

DeepSpeed picks its accelerator while it is imported, and probes for several on the way; it is told beforehand.
"""

import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
