"""The Prometheus text: read back by its grammar, and equal to what was done."""

from __future__ import annotations

import re
from typing import Any

import httpx

from dockyard_sandbox.metrics import Metrics

SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+|\+Inf)$')


def parse(text: str) -> dict[str, float]:
    """Every sample; fails on a line that no scraper would take."""
    assert text.endswith("\n")
    found, typed = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            base = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert {match[1], base} & typed, f"{line} has no TYPE"
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_counters_histogram_and_gauges_are_written_as_prometheus_reads_them() -> None:
    metrics = Metrics()
    metrics.count("things_total", "Things.", kind='a"b\\c\nd')
    metrics.count("things_total", "Things.", by=2, kind="e")
    for seconds in (0.06, 0.3, 1000.0):
        metrics.observe("run", seconds)
    found = parse(metrics.text([("level", "A level.", {(): 1.0, (("of", "x"),): 2.5})]))
    assert found['dockyard_sandbox_things_total{kind="e"}'] == 2
    assert found['dockyard_sandbox_things_total{kind="a\\"b\\\\c\\nd"}'] == 1
    assert found['dockyard_sandbox_stage_seconds_bucket{le="0.1",stage="run"}'] == 1
    assert found['dockyard_sandbox_stage_seconds_bucket{le="0.5",stage="run"}'] == 2
    assert found['dockyard_sandbox_stage_seconds_bucket{le="+Inf",stage="run"}'] == 3
    assert found['dockyard_sandbox_stage_seconds_count{stage="run"}'] == 3
    assert found['dockyard_sandbox_stage_seconds_sum{stage="run"}'] == 1000.36
    assert found['dockyard_sandbox_level{of="x"}'] == 2.5


def test_a_server_counts_what_it_answers(project: Any, judge: Any, body: Any) -> None:
    def scrape() -> dict[str, float]:
        reply = httpx.get(judge.server.url + "/metrics", trust_env=False)
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        return parse(reply.text)

    before = scrape()
    assert judge.post(body(project.task(), project.gold())).status_code == 200
    assert judge.post({}).status_code == 422
    after = scrape()
    for name in ('dockyard_sandbox_verdicts_total{status="resolved"}', 'dockyard_sandbox_refused_total{code="422"}'):
        assert after[name] == before.get(name, 0) + 1
    assert after['dockyard_sandbox_isolation{level="namespaces"}'] == 1
    assert after["dockyard_sandbox_workers"] == 2
