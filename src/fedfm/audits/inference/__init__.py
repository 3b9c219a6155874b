"""The mathematics of what an adversary infers: arrays in, figures out. Nothing here knows what a run is."""
