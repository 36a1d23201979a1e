"""Placement of blocks on hosts for throughput, latency or battery life, and its figures.

`planner.plan` is the entry point. `hosts` reads the description of the hosts and turns it into
arrays; `placement` finds placements (its docstring states the mixed-integer program); `report`
simulates the result.
"""
