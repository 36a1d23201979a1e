"""The method alone: a vision transformer whose blocks run in any order."""
