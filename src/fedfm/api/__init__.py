"""What Python users call: run, resume, federate, predict, join, and studies (seeds, tuning, baselines)."""
