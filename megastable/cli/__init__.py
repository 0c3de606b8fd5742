"""Floor 5: the ``megastable`` command."""
