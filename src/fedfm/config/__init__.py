"""The experiment: TOML to checked dataclasses, and the registry of methods, attacks and aggregations."""
