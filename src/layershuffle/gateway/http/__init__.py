"""What clients of a gateway see, over HTTP.

A request passes `listening` (bounds on connections), `admission` (its key, its place) and
`requests` (the classification). `answers` has the fields of the JSON, `app` the routes, `errors`
what becomes of errors. `cameras` takes the forms of home automation, `operator` the operator's
commands; `secrets` has files of keys and certificates, `files` the pages, `metrics` and `upkeep`
what is known of the gateway, and `start` puts it together.
"""
