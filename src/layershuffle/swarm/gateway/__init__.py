"""The swarm's HTTP face: requests in, answers with their route out. Import the modules.

`limits` and `access` say who may ask how much, `intake` reads requests, `images` decodes, `answers`
is what comes back, `app` ties them to FastAPI, `serving` runs it. Only the last two know a server.
"""
