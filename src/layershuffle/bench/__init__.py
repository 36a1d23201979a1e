"""`layershuffle bench`: speed and memory of this machine. Claims are in `benchmarks/`, in pairs."""
