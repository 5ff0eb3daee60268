"""Writes samples down as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runtime_cache.metrics.definitions import DEFINITIONS, Definition
from runtime_cache.metrics.histogram import Histogram
from runtime_cache.metrics.samples import Sample

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricsPage(NamedTuple):
    """An answer: what kind of text, and the text."""

    content_type: str
    body: bytes


class _Once(Collector):
    """Gives what it was given."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def metrics_page(samples: Iterable[Sample], accept: str = "") -> MetricsPage:
    """The page, with figures of this process (CPU, memory, open files) behind the samples.

    Args:
        accept: what the client understands (`Accept`); the classic text format if it does not say.
    """
    registry = CollectorRegistry()
    registry.register(_Once(lambda: families(samples)))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return MetricsPage(content_type, encode(registry))


def families(samples: Iterable[Sample]) -> Iterator[Family]:
    """One family of each definition, in their order; those without a sample too."""
    found = {name: _family(definition) for name, definition in DEFINITIONS.items()}
    for name, labels, value in samples:
        family = found[name]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            family.add_metric(labels, value.cumulative(), value.total)
        else:
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
    yield from found.values()


def _family(definition: Definition) -> Family:
    name, kind, labels, meaning = definition
    if kind == "counter":
        return CounterMetricFamily(name, meaning, labels=labels)
    if kind == "gauge":
        return GaugeMetricFamily(name, meaning, labels=labels)
    return HistogramMetricFamily(name, meaning, labels=labels)
