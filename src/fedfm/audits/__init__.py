"""Attacks on a replay of one finished run. Each gives a finding: an estimate, an interval, a verdict."""
