"""Built-in architectures and tokenizers."""
