"""What to expect of k blocks, and the exported model that a gateway serves."""
