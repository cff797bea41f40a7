"""The edge: HTTP itself, as a node and a gateway share it. Knows no engine, desk or model."""
