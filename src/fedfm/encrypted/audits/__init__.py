"""Attacks on runs on encrypted rows: what ciphertexts, released states and losses tell."""
