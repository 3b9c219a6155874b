"""Users' own modules and Hugging Face Trainers as models, with their loss, rows, precision and optimiser."""
