"""Runs a call under the sanitizer, and looks into the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bridge
from bridge import Finding, SanitizerReport


def checked(call: Callable[[], Any], seeds: int = 2) -> tuple[Any, SanitizerReport]:
    """What a call gives, or raises, and the report."""
    with bridge.sanitize(seeds=seeds) as report:
        try:
            result = call()
        except Exception as error:
            result = error
    assert report.kernels
    return result, report


def the_only(report: SanitizerReport, kind: str) -> Finding:
    """The finding of a kind."""
    (found,) = [finding for finding in report.findings if finding.kind == kind]
    return found


def kinds(report: SanitizerReport) -> set[str]:
    return {finding.kind for finding in report.findings}
