"""Black-box tools: they speak HTTP to any OpenAI-compatible server and import no engine."""
