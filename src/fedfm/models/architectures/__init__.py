"""Architectures and tokenizers that come with fedfm."""
