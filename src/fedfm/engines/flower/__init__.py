"""The engines on Flower: its simulation, its deployment, and the apps of both. Flower is imported here."""
