"""Lists the scenarios of the gauntlet by name."""

from __future__ import annotations

from gauntlet import data_faults, process_faults, run_file_faults, weight_faults
from gauntlet.scenario import Scenario

GROUPS = (weight_faults, data_faults, process_faults, run_file_faults)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for group in GROUPS for scenario in group.SCENARIOS}
