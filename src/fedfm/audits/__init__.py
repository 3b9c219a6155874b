"""Attacks on a replay of one finished run, each with a finding: an estimate, an interval, a verdict."""
