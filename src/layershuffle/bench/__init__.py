"""`layershuffle bench`: speed and memory of one machine in one run; clocks for `benchmarks/`.

A claim about speed is a *paired ratio*: two sides are timed in turn many times; the median of the
ratios counts, and the range is given. A throughput stands only with hardware, dtype and batch.
"""
