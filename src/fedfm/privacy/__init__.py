"""What a release reveals of one record (noise, calibration, accounting), and what a silo's policy allows."""
