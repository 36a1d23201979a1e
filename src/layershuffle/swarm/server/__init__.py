"""The swarm's HTTP server: it answers requests with classes and the route. Import the modules.

`run` accepts connections, `app` holds the routes and the API keys, `scheduler` carries a request
out, `requests` reads its form and decodes its images, and `schemas` is the JSON of the answer.
`limits` bounds what is accepted, `errors` has the refusals, `metrics` counts, `tls` encrypts, and
`admin` is the operator's own socket.

`page` holds the files and routes of the page, which `gateway_page` serves for a swarm and `demo`
for the models of `workbench` in this process. `live` sends the state of the swarm and the visits of
one request to the page.

Clients read answers with `schemas`, which imports no web framework.
"""
