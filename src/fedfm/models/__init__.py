"""Foundation models: loading them, what of them is trained, metrics, export."""
