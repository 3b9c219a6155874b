"""Attacks: what an adversary does to a run, or with what it saw. None is built in yet."""
