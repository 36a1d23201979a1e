"""Requests that schemathesis makes from the gateway's OpenAPI description, with all checks."""

import asyncio

import pytest
from gateway_site import site, started
from hypothesis import HealthCheck, Phase, given, settings

from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.run import listening

KEY = "the-key-of-this-test"
LIMITS = GatewayLimits(rate=1e6, burst=1e6)
# Requests of each operation, valid ones and others, the same ones in every run.
BOUNDS = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "with keys"])
@pytest.mark.filterwarnings("default")  # those of schemathesis are its own
def test_no_request_that_the_description_allows_or_forbids_breaks_it(keys):
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    asked = set()
    headers = {"Authorization": f"Bearer {KEY}"} if keys else {}

    def check(case):
        asked.add((case.method, case.path))
        # No description says which bytes are an image; and an address has no types: an empty list,
        # or null, is an option that is not sent.
        unfit = [negative_data_rejection, positive_data_acceptance] if case.method == "POST" else []
        case.call_and_validate(headers=headers, excluded_checks=unfit, timeout=60)

    async def serving(tell):
        async with (
            site(limits=LIMITS, keys=keys) as place,
            listening(place.app, limits=LIMITS) as (listener, _),
        ):
            tell(f"http://127.0.0.1:{listener.port}")
            await asyncio.Event().wait()

    with started(serving) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json", timeout=60)
        for result in schema.get_all_operations():
            operation = result.ok()
            # The other operations have no invalid requests.
            takes_options = operation.method == "post"
            for mode in list(GenerationMode) if takes_options else [GenerationMode.POSITIVE]:
                BOUNDS(given(case=operation.as_strategy(mode))(check))()
    assert ("POST", "/v1/classify") in asked
    assert ("GET", "/v1/swarm") in asked
