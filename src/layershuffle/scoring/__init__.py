"""Scores of a model that is named by its spec, and predictions for image files."""
