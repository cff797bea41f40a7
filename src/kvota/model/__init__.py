"""All that knows a model: files, weights, text, arithmetic. OpenVINO appears only here."""
