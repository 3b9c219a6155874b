"""Attacks on the replay of a finished run. Each attack gives findings: an estimate, an interval, a verdict."""
