"""Models (directories, hub ids, random presets and the tutor) and how their weights are read."""
