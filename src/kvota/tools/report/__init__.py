"""What a long command leaves behind: JSON, one self-contained HTML page, and a short table."""
