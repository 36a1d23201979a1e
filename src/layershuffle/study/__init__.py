"""Studies: plan, runs, results, tables, figures, report. Import the modules, not this package."""
