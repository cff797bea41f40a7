"""The gateway: one door for a team, in front of any engine."""
