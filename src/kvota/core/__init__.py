"""The vocabulary every other part speaks: time, errors, requests, and a step as data."""
