"""Floor 4: models in the formats of other programs, both ways."""
