"""The decisions of a gateway, without I/O: each is a pure function of a state and a moment.

Read `limits` and `messages`, then `state` (what is known of the hosts), `policy` (the next step of
a request), `rounds` and `sureness` (when it may end), `assignment` (who holds which blocks), and
`places` (who may have a request under way).
"""
