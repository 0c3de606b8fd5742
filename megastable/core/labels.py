"""Labels, as the data writes them and the loss reads them."""

IGNORED_LABEL = -100
"""A position with this label counts neither in the loss nor in its denominator (torch's own default)."""
