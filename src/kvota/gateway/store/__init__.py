"""What outlives a gateway: keys and usage in SQL; limits in memory or in Redis."""
