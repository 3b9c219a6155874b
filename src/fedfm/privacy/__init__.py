"""What a release tells of one record (noise, its calibration, what was spent), and what a silo's policy lets out."""
