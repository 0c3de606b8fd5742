"""Records the golden curve anew: ``python -m tests.golden.record``."""

from __future__ import annotations

import json

from tests.golden.test_golden_curve import CURVE, golden_steps
from tests.support.ranks import run_ranks

if __name__ == "__main__":
    CURVE.write_text(json.dumps(run_ranks(golden_steps, world_size=1)[0], indent=1) + "\n")
    print(f"wrote {CURVE}")
