"""Measuring speed and memory: paired comparisons, and the numbers of one machine in one run.

A claim of speed here is a *paired ratio*: two sides timed in turn many times, the median of the
ratios judged, the range given. Absolute throughputs never stand without hardware, dtype and batch.
"""
