"""The swarm's HTTP server: requests come in, answers go out with their route. Import the modules.

`run` accepts connections, `app` holds the routes, `auth` says who may ask and how much, `scheduler`
carries a request out, `requests` reads its form, `images` decodes its files, and `schemas` is the
JSON of the answer. `errors` has the refusals, `metrics` counts, `tls` encrypts, `admin` is the
operator's own socket. Only `app`, `admin` and `run` import a web server.
"""
