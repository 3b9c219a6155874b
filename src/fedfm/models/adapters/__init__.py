"""The trainable part of a model: adaptations, LoRA, several adapters at once."""
