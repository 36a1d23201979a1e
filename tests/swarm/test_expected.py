"""What answers say to expect is what they reach, by kind: the shipped model in virtual time."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Executor

import numpy as np
import pytest
from virtual_site import VirtualHost, VirtualSite, virtual_gateway

from clock import AtOnce, loop_time, run_virtual
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.client.labelled import labelled_images
from layershuffle.gateway.hosts.served_model import RemoteModel, ServedModel
from layershuffle.gateway.http.requests import Gateway, Options
from layershuffle.ground.bundled import asset
from layershuffle.images.pixels import image_batch
from layershuffle.models import load
from waiting import until

IMAGES = 200
LIMITS = Limits(start_ms=500)
Kinds = dict[str, list[tuple[float, bool]]]


async def asked(
    site: VirtualSite, gateway: Gateway, images: list[tuple[np.ndarray, int]], **options: object
) -> Kinds:
    """What every answer expected, and whether it was right, by how it ended."""
    kinds: Kinds = defaultdict(list)
    wanted = Options.model_validate(options)
    confidence = gateway._confidence(wanted)
    for pixels, label in images:
        classified = await gateway.remote_model.classify(
            pixels, deadline=loop_time() + 5, confidence=confidence
        )
        expected, why = gateway._expected_of(classified.route, wanted, confidence=confidence)
        kind = classified.route.ending
        if len(classified.route.order) > classified.route.kept:
            kind += " again"
        assert expected is not None, (kind, why)
        kinds[kind].append((expected.top1, int(classified.logits.argmax()) == label))
    return kinds


def differences(kinds: Kinds) -> dict[str, tuple[int, float, float]]:
    """Of every kind the answers, what they expected on average and what was right, in percent."""
    found = {}
    for kind, pairs in kinds.items():
        expected, right = np.mean(pairs, axis=0)
        found[kind] = len(pairs), float(expected), 100 * float(right)
    return found


def measured(count: int) -> dict[str, dict[str, tuple[int, float, float]]]:
    """By what was asked of how many blocks."""
    results = {}

    async def main() -> None:
        files = labelled_images(load("bundled:digits-onnx"), "digit-pairs", count=count)
        model = ServedModel(asset("digits-onnx"))
        async with virtual_gateway(LIMITS, model=model, copies=1) as site:
            view = model.manifest.file_view
            images = []
            for labelled in files:
                pixels, _ = image_batch(labelled.image, view=view, most_pixels=10**6)
                images.append((pixels, labelled.label))
            threads: Executor = AtOnce()
            remote = RemoteModel(model, site.router, calibration=model.calibration)
            gateway = Gateway(remote, site.coordinator, decoder_threads=threads)
            block = model.weights[0].size
            hosts = [VirtualHost(site, f"host-{n}", memory=3 * block + 9) for n in range(4)]
            await until(lambda: min(site.copies()) == 1)
            results["all, off"] = differences(await asked(site, gateway, images, confidence="off"))
            results["all"] = differences(await asked(site, gateway, images))
            for alive in (6, 3):
                hosts.pop().close(1001, "bye")
                if alive == 6:
                    hosts.pop().close(1001, "bye")
                await until(lambda n=alive: sum(site.copies()) == n)  # type: ignore[misc]
                off = await asked(site, gateway, images, confidence="off")
                results[f"{alive} alive, off"] = differences(off)
                results[f"{alive} alive"] = differences(await asked(site, gateway, images))
            remote.close()

    run_virtual(main())
    return results


def test_each_kind_of_answer_expects_what_is_right() -> None:
    """The same images as those of the calibration, in the orders of a swarm; 200 of 2,000."""
    for asked_of, kinds in measured(IMAGES).items():
        for kind, (answers, expected, right) in kinds.items():
            spread = 100 * np.sqrt(expected * (100 - expected) / 10**4 / answers)
            assert right == pytest.approx(expected, abs=1.5 + 3 * spread), (asked_of, kind)


if __name__ == "__main__":
    for asked_of, kinds in measured(1000).items():
        for kind, (answers, expected, right) in kinds.items():
            print(f"{asked_of:16} {kind:18} {answers:5} {expected:6.1f} {right:6.1f}")
