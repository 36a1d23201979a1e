"""A block's time is measured once: plans of one file are the same plan."""

from __future__ import annotations

import json

import pytest

from layershuffle.cli import main
from layershuffle.swarm.speed import store_path, stored_ms


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_measurements_are_cached():
    times = iter([0.123456, 2.0, 3.0])
    measure = times.__next__
    assert [stored_ms(b"a", measure) for _ in range(3)] == [0.123] * 3
    assert stored_ms(b"b", measure) == 2.0
    assert stored_ms(b"a", measure) == 0.123
    # A cache that cannot be read is made anew.
    store_path().write_text('{"half')
    assert stored_ms(b"a", measure) == 3.0
    assert list(json.loads(store_path().read_text()).values()) == [3.0]


def test_a_plan_is_the_same_every_time(tmp_path, capsys):
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: {a: {memory_mb: 2}, b: {memory_mb: 2, speed: 0.5}}\n")
    texts = []
    for number in range(2):
        out = tmp_path / f"plan{number}.yaml"
        assert main(["swarm", "plan", str(hosts), "--out", str(out)]) == 0
        text = capsys.readouterr().out
        assert str(store_path()) in text
        texts.append((text.replace(str(out), ""), out.read_text()))
    assert texts[0] == texts[1]
