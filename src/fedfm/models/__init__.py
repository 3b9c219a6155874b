"""Foundation models: load, adapt, score, export."""
