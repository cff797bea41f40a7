"""What model files say about themselves, read without a model runtime."""
