"""What clients of a gateway see, over HTTP.

A request passes `listening` (bounds on connections), `app` (routes), `admission` (its key, its
place), `requests` (the classification), `images` (decoding) and `answers` (the JSON); `errors` says
what becomes of errors. `cameras` takes the forms of home automation, `operator` the operator's
commands; `keys` has keys and certificates, `files` the pages, `metrics` and `upkeep` what is known
of the gateway, and `start` puts it together.
"""
