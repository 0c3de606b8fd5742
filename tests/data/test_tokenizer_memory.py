"""How much memory the training of a BPE takes inside a document that is larger than what it learns from."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENT_BYTES = 24_000_000
BUDGET_CHARACTERS = 2_000_000

# In a process of its own: what a process has needed at most never falls again.
TRAINING = """
import resource, sys
from pathlib import Path
import numpy as np
from megastable.config import BpeTokenizerConfig
from megastable.data import corpus
from megastable.data.sources import open_source
from megastable.data.text_tokenizers import make_tokenizer
from tests.data.data_examples import text_data, tiny_model

def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

file, budget = sys.argv[1:]
corpus.BPE_TRAINING_CHARACTERS = int(budget)
source = open_source(text_data(Path(file), Path("unused")).source)
make_tokenizer(BpeTokenizerConfig(type="bpe"), tiny_model(vocab_size=260), ["a few words"])
before = peak_bytes()
texts = corpus.texts_to_learn_from(source, np.arange(1), in_order=False)
make_tokenizer(BpeTokenizerConfig(type="bpe"), tiny_model(), texts)
print(peak_bytes() - before)
"""


def write_real_text(path: Path) -> None:
    """Write the source text of the standard library, without what is not ASCII, until the file is large enough."""
    size = 0
    with path.open("wb") as file:
        while size < DOCUMENT_BYTES:
            for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
                size += file.write(module.read_bytes().decode(errors="ignore").encode("ascii", "ignore"))


@pytest.mark.timeout(120)
def test_the_memory_to_train_a_bpe_is_bounded_inside_a_document(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    write_real_text(file)
    finished = subprocess.run(
        [sys.executable, "-c", TRAINING, str(file), str(BUDGET_CHARACTERS)],
        cwd=REPOSITORY,
        env={**os.environ, "RAYON_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    # The document as bytes and as text, and 20 bytes for each character that is learned from; a trainer that gets these
    # as a whole takes 90.
    assert int(finished.stdout) < 2.2 * DOCUMENT_BYTES + 20 * BUDGET_CHARACTERS
