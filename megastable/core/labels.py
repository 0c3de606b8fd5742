"""The labels that the data write and the loss reads."""

IGNORED_LABEL = -100
"""A position with this label counts neither in the loss nor in its denominator (torch's own default)."""
