"""`kvota doctor`: whether this machine is fit to serve, and what a running server suffers from."""
