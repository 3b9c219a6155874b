"""The mathematics of inference attacks. This package uses arrays only and knows nothing of runs."""
