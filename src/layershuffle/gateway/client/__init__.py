"""Ask a gateway from Python, judge its answers, and measure what they may promise (`calibrate`)."""
