"""Attacks: what an adversary does with what it saw. Arrays in, figures out; none knows what a run is."""
