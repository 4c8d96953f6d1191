"""The results of a benchmark, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """The values of a quantity that was measured several times, in order of measurement."""

    name: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median of the values."""
        return median(self.values)


@dataclass(frozen=True)
class Check:
    """A measured value and its required minimum or maximum."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "×"

    @property
    def holds(self) -> bool:
        """Whether the requirement is met."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def required(self) -> str:
        """The requirement in words."""
        return f"≥ {self.at_least:g} {self.unit}" if self.at_least is not None else f"≤ {self.at_most:g} {self.unit}"


@dataclass(frozen=True)
class Report:
    """The results and checks of one benchmark."""

    title: str
    figures: list[Figure]
    checks: list[Check]

    def tables(self) -> Group:
        """Return a table of the measurements and one of the checks."""
        measured = Table("", "median", "unit", "each", title=self.title, title_justify="left")
        for figure in self.figures:
            measured.add_row(figure.name, _text(figure.median), figure.unit, "  ".join(map(_text, figure.values)))
        compared = Table("", "measured", "required", "")
        for check in self.checks:
            compared.add_row(
                check.name,
                f"{_text(check.value)} {check.unit}",
                check.required,
                "yes" if check.holds else "[bold red]no",
            )
        return Group(*([measured] if self.figures else []), *([compared] if self.checks else []))

    def document(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {
            "title": self.title,
            "figures": [{**dataclasses.asdict(figure), "median": figure.median} for figure in self.figures],
            "checks": [{**dataclasses.asdict(check), "holds": check.holds} for check in self.checks],
        }


def write(path: Path, reports: dict[str, Report], scale: float) -> None:
    """Write the results of all benchmarks to a JSON file, with the machine and the package versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packages = {name: version(name) for name in ("raytrain", "ray", "torch", "pyarrow", "obstore")}
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    about = {
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "scale": scale,
        "machine": machine,
        "packages": packages,
    }
    document = {**about, "benchmarks": {name: report.document() for name, report in reports.items()}}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
