"""What clients of a gateway see, over HTTP.

A request passes `listening` (bounds on connections), `app` (routes), `admission` (its key, its
place), `requests` (the classification), `images` (decoding) and `answers` (the JSON); `errors` says
what becomes of errors. `operator` has the operator's commands, `keys` keys and certificates,
`files` the pages, `metrics` and `upkeep` what is known of the gateway, and `start` puts it
together.
"""
