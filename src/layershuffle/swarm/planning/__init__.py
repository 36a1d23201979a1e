"""Which host holds which blocks: placements by throughput, latency or life, and their figures.

`plan` in `planner` is the way in. `hosts` is what people write, and the same in arrays; `placement`
finds placements (its docstring states the mixed-integer program); `report` simulates the result.
"""
