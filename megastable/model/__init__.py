"""Floor 2: the GPT as a flat list of layers, its loss and the drawing of its weights."""
