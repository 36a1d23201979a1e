"""What every room stands on: errors, text, files, statistics, rows of results, the machine."""
