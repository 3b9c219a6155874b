"""Poisoning attacks by malicious clients; one file for each attack."""
