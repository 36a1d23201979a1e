"""What to expect of k blocks."""
