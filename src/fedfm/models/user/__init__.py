"""Users' own modules and Hugging Face Trainers as models: loss, rows, precision and optimiser that they bring."""
