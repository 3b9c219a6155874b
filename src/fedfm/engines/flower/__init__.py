"""The engines on Flower: its simulation, its deployment, and the apps of both. Only this package imports Flower."""
