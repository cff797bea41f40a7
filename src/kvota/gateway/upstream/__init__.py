"""One backend as the gateway sees it: its connection, its stream, its health, and its desk."""
