"""What a daemon says at /metrics, read as Prometheus would, and what dashboards ask of it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

GRAFANA = Path(__file__).parents[2] / "tools" / "grafana"
#: What Prometheus 3 sends.
_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
#: Labels and series that Prometheus adds.
ADDED_LABELS = {"instance", "job"}
ADDED_SERIES = {"up"}
_VARIABLE = re.compile(r"\$__rate_interval|\$\{?\w+\}?")


@dataclass(frozen=True)
class Query:
    """A PromQL expression of a dashboard or an alert rule.

    Attributes:
        where: the title of its panel, or the name of its rule.
    """

    where: str
    text: str


@dataclass
class Asked:
    """What a query reads: series → labels that it uses of them."""

    series: dict[str, set[str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Page:
    """What came back."""

    status: int
    text: str
    content_type: str


def get(address: str, path: str = "/metrics") -> Page:
    """Ask as Prometheus does."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers={"Accept": _ACCEPT, "Accept-Encoding": "gzip"})
    response = connection.getresponse()
    page = Page(response.status, response.read().decode(), str(response.headers["Content-Type"]))
    connection.close()
    return page


def scrape(address: str) -> dict[str, Metric]:
    """Family → samples; a format error fails the test."""
    page = get(address)
    assert (page.status, page.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = list(text_string_to_metric_families(page.text))
    found = {family.name: family for family in families}
    assert len(found) == len(families), "a family came twice"
    return found


def series_of(families: dict[str, Metric]) -> dict[str, set[str]]:
    """Series → the labels it has."""
    found: dict[str, set[str]] = {}
    for family in families.values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of a series' samples that have these labels; there must be one."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no {name} {labels}"
    return sum(found)


def dashboard_queries() -> list[Query]:
    """Every expression of the dashboard, its variables and annotations included."""
    board = json.loads((GRAFANA / "dashboard.json").read_text("utf-8"))
    queries = [
        Query(panel["title"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    queries += [Query(note["name"], note["expr"]) for note in board["annotations"]["list"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert selector, variable["definition"]
            text = f"count by ({selector[2]}) ({selector[1]})"
            queries.append(Query(f"variable {variable['name']}", text))
    return queries


def alert_rules() -> list[dict[str, Any]]:
    """Every rule of the file."""
    content = yaml.safe_load((GRAFANA / "alerts.yml").read_text("utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def asked_by(text: str) -> Asked:
    """What a query reads; a syntax error fails the test."""
    asked = Asked()
    for node in _nodes(promql_parser.parse(_VARIABLE.sub(_plain, text))):
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            labels = asked.series.setdefault(node.name, set())
            labels |= {matcher.name for matcher in node.matchers.matchers}
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            asked.labels |= set(node.modifier.labels)
    return asked


def _plain(match: re.Match[str]) -> str:
    return "5m" if match[0] == "$__rate_interval" else "x"


def _nodes(node: promql_parser.Expr) -> Iterator[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(node, pre_visit=lambda each: found.append(each) is None)
    yield from found
