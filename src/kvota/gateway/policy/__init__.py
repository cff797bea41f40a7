"""What the gateway decides, as pure code: where to send a request, and when to stop doing so."""
