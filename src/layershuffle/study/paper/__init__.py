"""What the results of a study say of the paper: claims, tables, figures, the report."""
