"""The number formats of weights, by the names of a run file, as torch and `transformers` call them."""

from __future__ import annotations

import torch

NUMBER_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in NUMBER_FORMATS.items()}
"""As a config.json has them: float32, bfloat16, float16."""
