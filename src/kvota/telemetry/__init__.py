"""What operators see: metrics now, journal and traces beside them."""
