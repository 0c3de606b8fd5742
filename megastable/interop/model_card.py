"""The README.md of an exported model: what it is, what it was trained on and how far."""

from __future__ import annotations

import json

from megastable.core.errors import shown
from megastable.core.families.family import Family
from megastable.interop.saved_model import SavedModel

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- megastable
- {model_type}
---

# {title}

A {class_name} of {parameters:,} weights ({weight_format}), pre-trained with megastable {version}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")
```

| training | |
|---|---|
| step | {step:,} |
| samples | {samples:,} |
| tokens | {tokens:,} |
| training loss of the last step (nats per token) | {loss} |
| validation loss (nats per token) | {eval_loss} |
| length of a sample (tokens) | {seq_length:,} |
| layout (stages x replicas x tensor ranks) | {stages} x {replicas} x {tensor} |
| text | {text} |
| text, fingerprint of its tokens | {fingerprint} |

## The run file

```json
{run}
```
"""


def model_card(saved: SavedModel, family: Family, weight_format: str, num_weights: int, title: str) -> str:
    """Write the card in Markdown."""
    state = saved.manifest.state
    layout = saved.manifest.layout
    return CARD.format(
        model_type=family.model_type,
        title=_cell(title),
        class_name=family.class_name,
        parameters=num_weights,
        weight_format=weight_format,
        version=_cell(saved.manifest.versions.get("megastable", "of an unknown version")),
        step=state.step,
        samples=state.consumed_samples,
        tokens=state.consumed_tokens,
        loss=_loss(saved.manifest.loss),
        eval_loss=_loss(saved.manifest.eval_loss),
        seq_length=saved.model.seq_length,
        stages=layout.num_stages,
        replicas=layout.data_parallel_size,
        tensor=layout.tensor_parallel_size,
        text=_cell(json.dumps(saved.run.megastable.data.source.model_dump(mode="json", exclude_none=True))),
        fingerprint=_cell(saved.manifest.corpus_fingerprint) or "none",
        # In ASCII: nothing in it can end the block or be obeyed by a terminal.
        run=json.dumps(saved.manifest.run, indent=2),
    )


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _cell(text: str) -> str:
    # A bar would end the cell of a table.
    return shown(text).replace("|", "\\|")
