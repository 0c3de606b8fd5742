"""megastable: stable pre-training of GPT models on DeepSpeed's pipeline engine."""

__version__ = "0.1.0"
