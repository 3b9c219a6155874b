"""Mathematics of inference attacks, on arrays alone."""
