"""The Python interface: run, resume, federate, predict, join, and studies (seeds, tuning, baselines)."""
