"""What is trained of a model: adaptations, LoRA, two adapters at once."""
