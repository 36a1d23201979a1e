"""`layershuffle bench`: measure speed and memory of a machine; also clocks for `benchmarks/`.

A claim about speed is a *paired ratio*: two sides are timed alternately many times, and the median
of the ratios is reported with the range. A throughput is only given with hardware, dtype and batch.
"""
