"""What a release tells of one record: noise from a secret key, its calibration, and what was spent."""
