"""Models: directories, hub ids, presets with random weights and the tutor, and how their weights are read."""
