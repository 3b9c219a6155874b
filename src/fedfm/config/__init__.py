"""The experiment: checked dataclasses from TOML, and the registry of methods, attacks and aggregations."""
