"""The families of models that a class of `transformers` computes exactly as we do, one a file."""
