"""The words of `layershuffle swarm`: each parses, builds settings, calls one function."""
