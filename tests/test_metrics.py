"""Metrics: scraped over HTTP, read by a parser of the format, equal to what the store says itself."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import blockkv
from blockkv.metrics import COUNTERS, GAUGES, LATENCY, StoreCollector, metric_name, serve_metrics

ROOT = Path(__file__).parents[1]


def scraped(port: int) -> dict[str, Any]:
    """Samples by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples
    }


@pytest.fixture(params=["a store", "an array"])
def paths(request: pytest.FixtureRequest, image_dir: Path) -> list[Path]:
    count = 1 if request.param == "a store" else 2
    paths = [image_dir / f"{number}.img" for number in range(count)]
    blockkv.format(paths if count > 1 else paths[0], size="32MiB", average_chunk="64KiB")
    return paths


def test_every_number_is_scraped_as_it_is(paths: list[Path]) -> None:
    with (
        blockkv.open(paths if len(paths) > 1 else paths[0], commit_interval_ms=None) as store,
        serve_metrics(store, port=0, role="test") as port,
    ):
        store.put_many([(f"k{number}", torch.full((5000,), number)) for number in range(40)], durable=True)
        store.get_many([f"k{number}" for number in range(50)])
        store.delete("k3")
        samples, stats = scraped(port), store.stats()
        assert stats["get_misses"] == 10
        assert {metric_name(name) for name in stats} <= samples.keys()
        for name, value in stats.items():
            assert samples[metric_name(name)].value == pytest.approx(value), name
        labels = samples["blockkv_chunks"].labels
        assert labels["role"] == "test"
        assert all(path.name in labels["store"] for path in paths)
        assert samples["blockkv_info"].labels["version"] == blockkv.__version__
        assert samples["blockkv_read_only"].value == 0


def test_calls_are_a_histogram(paths: list[Path]) -> None:
    with blockkv.open(paths if len(paths) > 1 else paths[0]) as store:
        for number in range(5):
            store.put(f"k{number}", torch.zeros(100))
        store.put_many([("a", torch.zeros(9)), ("b", torch.zeros(9))], durable=True)
        store.submit_get("a").result(60)
        store.get_many(["a", "b"])
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        found = {
            (sample.name, sample.labels.get("operation"), sample.labels.get("le")): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }
        for operation, count in (("put", 5), ("durable_put", 1), ("get", 2)):
            latency = store.latencies()[operation]
            assert latency.count == count
            assert found[f"{LATENCY}_count", operation, None] == count
            assert found[f"{LATENCY}_bucket", operation, "+Inf"] == count
            assert found[f"{LATENCY}_sum", operation, None] == pytest.approx(latency.total_s)
            assert 0 < latency.percentile_us(50) <= latency.percentile_us(99) < 60e6


def test_a_closed_store_gives_no_metrics(paths: list[Path]) -> None:
    store = blockkv.open(paths if len(paths) > 1 else paths[0])
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    assert b"blockkv_chunks" in generate_latest(registry)
    store.close()
    assert b"blockkv_chunks" not in generate_latest(registry)


def test_the_endpoint_ends_with_its_context(paths: list[Path]) -> None:
    with blockkv.open(paths if len(paths) > 1 else paths[0]) as store:
        with serve_metrics(store, port=0) as port:
            assert scraped(port)
        with pytest.raises(urllib.error.URLError):
            scraped(port)
        with serve_metrics(store, port=port) as again:
            assert again == port
            with pytest.raises(OSError, match="in use"), serve_metrics(store, port=port):
                pass


def test_a_label_of_ours_is_not_to_be_had(paths: list[Path]) -> None:
    with (
        blockkv.open(paths if len(paths) > 1 else paths[0]) as store,
        pytest.raises(blockkv.InvalidArgument, match="'store'"),
    ):
        StoreCollector(store, store="mine")


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    for meanings in (GAUGES, COUNTERS):
        for name, meaning in meanings.items():
            assert f"| `{metric_name(name)}` | {meaning} |" in text


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "docs/grafana-blockkv.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(asked) >= 10
    known = {metric_name(name) for name in [*GAUGES, *COUNTERS]}
    known |= {"blockkv_info", "blockkv_read_only", f"{LATENCY}_bucket"}
    for expression in asked:
        names = set(re.findall(r"blockkv_\w+", expression))
        assert names, expression
        assert names <= known, expression
