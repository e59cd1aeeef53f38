"""What a model is made of and what it costs: layers, gradient structure, seconds."""
