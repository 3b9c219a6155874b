"""Attacks on runs with encrypted rows: what an attacker learns from ciphertexts, disclosed activations and losses."""
