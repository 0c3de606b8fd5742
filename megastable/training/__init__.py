"""Floor 4: the training loop, and ``build``, the one place that imports everything."""
