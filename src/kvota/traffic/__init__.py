"""Traffic: what clients ask, when and how much; read from recordings or made up."""
