"""The commands of `layershuffle swarm`, and `classify`."""
