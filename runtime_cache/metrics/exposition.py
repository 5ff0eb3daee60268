"""Writes samples down as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime_cache.histogram import Histogram
from runtime_cache.metrics.definitions import DEFINITIONS, Definition
from runtime_cache.metrics.samples import Sample

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


#: The classic text format, which every reader takes. Not OpenMetrics: prometheus-client 0.26 writes
#: the colon of `vllm:` as `_` there, for readers that do not ask for UTF-8 names.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Once(Collector):
    """Gives what it was given."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def metrics_text(samples: Iterable[Sample]) -> bytes:
    """The page, with figures of this process (CPU, memory, open files) behind the samples."""
    registry = CollectorRegistry()
    registry.register(_Once(lambda: families(samples)))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


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
