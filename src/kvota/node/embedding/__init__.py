"""A node for text encoders: /v1/embeddings, batched by length."""
