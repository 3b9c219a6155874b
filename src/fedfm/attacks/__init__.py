"""Poisoning: what malicious clients of a run do. One file an attack."""
