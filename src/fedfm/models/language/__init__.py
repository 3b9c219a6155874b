"""Language models: chat templates, truncation, the loss of the next token, tool calls."""
