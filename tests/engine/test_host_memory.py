"""Large temporaries of a connected process on a CPU are not paged in anew every time."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from tests.support.ranks import run_bounded, run_ranks

BARE_PROCESS = "from tests.engine.test_host_memory import page_faults; print('faults', page_faults())"


def page_faults() -> int:
    """Count the pages that are faulted in as large tensors come and go, after a few rounds."""
    before = 0
    for turn in range(8):
        if turn == 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        large = torch.ones(12_000_000)
        larger = large + 1
        del large, larger
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_not_faulted_in_again() -> None:
    bare = run_bounded([sys.executable, "-c", BARE_PROCESS], 120).stdout
    assert run_ranks(page_faults, world_size=1)[0] < int(bare.split("faults ")[-1]) / 2
