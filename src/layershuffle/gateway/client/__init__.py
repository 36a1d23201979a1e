"""Ask a gateway from Python, and judge its answers."""
