"""Attacks on runs with encrypted rows: they measure the leaks of ciphertexts, disclosed activations and losses."""
