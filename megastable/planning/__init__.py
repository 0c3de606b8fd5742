"""Floor 2: what a run will take, forecast before anything is built. Needs neither torch nor a GPU."""
