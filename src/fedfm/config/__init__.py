"""The experiment: TOML into checked dataclasses, and the registry of what has a name."""
