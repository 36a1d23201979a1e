"""Images as a person sees them: how a file is decoded, turned and brought to a model's size."""
