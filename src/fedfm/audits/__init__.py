"""Attacks that are run against one finished run, each with a finding: an estimate, an interval, a verdict."""
