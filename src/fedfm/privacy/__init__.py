"""Differential privacy (noise, calibration, accounting), and a silo's policy."""
