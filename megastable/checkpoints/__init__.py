"""The checkpoints of a run folder: what is in one, which there are, whether they are whole, which may go."""
