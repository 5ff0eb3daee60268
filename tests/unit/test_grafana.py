"""The files of `tools/grafana`: whole, and drawn without holes or overlaps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from runtime_cache.metrics.address import parse_listen
from tests.support.scrape import GRAFANA, alert_rules

BOARD: dict[str, Any] = json.loads((GRAFANA / "dashboard.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
WIDTH = 24


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    rows, columns = range(place["y"], place["y"] + place["h"]), range(place["w"])
    return {(row, place["x"] + column) for row in rows for column in columns}


def test_panels_fill_the_board() -> None:
    taken = [cell for panel in PANELS for cell in cells(panel)]
    assert len(taken) == len(set(taken))
    height = 1 + max(row for row, _ in taken)
    assert set(taken) == {(row, column) for row in range(height) for column in range(WIDTH)}


def test_ids_and_titles_are_unique() -> None:
    for name in ("id", "title"):
        values = [panel[name] for panel in PANELS]
        assert len(values) == len(set(values))


@pytest.mark.parametrize(
    "panel", [p for p in PANELS if p["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_panel_asks_the_chosen_source_with_a_name_for_each_line(panel: dict[str, Any]) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[
        : len(panel["targets"])
    ]
    for target in panel["targets"]:
        assert target["datasource"] == source
        assert "$instance" in target["expr"]


def test_the_scrape_configuration_goes_with_the_documented_address() -> None:
    content = yaml.safe_load((GRAFANA / "prometheus.yml").read_text("utf-8"))
    (job,) = content["scrape_configs"]
    ((target,),) = [group["targets"] for group in job["static_configs"]]
    assert parse_listen(target).port == 9464
    assert job["job_name"] == "rtcached"
    assert content["rule_files"] == ["alerts.yml"]
    for name in ("prometheus.yml", "alerts.yml", "dashboard.json"):
        page = (GRAFANA.parents[1] / "docs" / "metrics.md").read_text("utf-8")
        assert f"tools/grafana/{name}" in page


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(names) == len(set(names)) > 10
    assert all(name.startswith("Rtcached") for name in names)
