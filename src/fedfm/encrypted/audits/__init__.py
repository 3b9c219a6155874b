"""Attacks on runs with encrypted rows: what ciphertexts, disclosed activations and losses reveal to an attacker."""
