"""A process that prepares a corpus: ``python -m tests.data.corpus_worker DOCUMENTS CACHE LOG RELEASE``.

Whoever builds notes its process id in LOG when all files are written, and ends the build when RELEASE exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megastable.data import corpus, prepare_corpus
from megastable.data.token_store import TokenStoreMeta
from megastable.data.token_writer import write_token_store
from tests.data.data_examples import text_data, tiny_model


def main(documents: str, cache_dir: str, log: str, release: str) -> None:
    def write_slowly(*arguments: Any, **options: Any) -> TokenStoreMeta:
        meta = write_token_store(*arguments, **options)
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        while not Path(release).exists():
            time.sleep(0.02)
        return meta

    data = text_data(Path(documents), Path(cache_dir))
    with mock.patch.object(corpus, "write_token_store", write_slowly):
        print(prepare_corpus(data, tiny_model(), show_progress=True).fingerprint)


if __name__ == "__main__":
    main(*sys.argv[1:])
