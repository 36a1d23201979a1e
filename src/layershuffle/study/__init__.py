"""Studies: plan, run, resume, store. `study.paper` says what they show."""
