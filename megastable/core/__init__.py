"""Floor 0: everything that can be computed without torch. Standard library only."""
