"""The product under a manual clock: traces in, real parts inside, every request's fate out."""
