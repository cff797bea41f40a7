"""The known encoder, where it is in the cache, against similarities published for it."""

import os

import numpy as np
import pytest

from kvota.model.catalog import DEFAULT_ENCODER, KNOWN_MODELS, cache_dir_of, cached_models
from kvota.model.encoder import load_encoder

CACHE = cache_dir_of(os.environ)
IS_CACHED = any(model.name == DEFAULT_ENCODER for model in cached_models(CACHE))

# sbert.net, "Quickstart": cosine similarities that all-MiniLM-L6-v2 gives these three.
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
PUBLISHED = ((1.0, 0.6660, 0.1046), (0.6660, 1.0, 0.1411), (0.1046, 0.1411, 1.0))


@pytest.mark.skipif(not IS_CACHED, reason=f"kvota node {DEFAULT_ENCODER} has not fetched it yet")
def test_the_published_similarities_come_out() -> None:
    encoder = load_encoder(KNOWN_MODELS[DEFAULT_ENCODER].path(CACHE), num_threads=1)
    vectors = encoder.embed([encoder.encode(text) for text in SENTENCES])
    np.testing.assert_allclose(vectors @ vectors.T, PUBLISHED, atol=5e-5)
