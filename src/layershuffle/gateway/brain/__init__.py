"""The decisions of a gateway, without I/O: each is a pure function of a state and a moment.

Read `limits`, then `state` (visits, and what is known of the hosts), `policy` (the next step of a
request, and its route), `sureness` (when it may end) and `assignment` (who holds which blocks).
"""
