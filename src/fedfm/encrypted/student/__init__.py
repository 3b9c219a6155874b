"""The polynomial student: a model whose softmax, LayerNorm and GELU are polynomials, and its distillation."""
