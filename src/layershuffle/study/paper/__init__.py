"""What a study shows beside the paper: its tables, its figures, the report."""
