"""Sentence and tables about a result file of tests/gpu/soak.py, for the documentation."""

from __future__ import annotations

from typing import Any

import row_tables

# Errors by kind of check, and what the tables call them.
_ERRORS = {
    "forward": {
        "error": "to float64",
        "against_model": "to the model",
        "gain": "gain",
        "logsumexp": "logsumexp",
    },
    "backward": {name: name for name in ("dquery", "dkey", "dvalue")},
}


def sentence(meta: dict[str, Any]) -> str:
    """What all runs made together."""
    lengths = " and ".join(f"{run['seconds']:.0f}" for run in meta.get("runs", ()))
    return (
        f"Random calls on an {meta['card']}: {meta['cases']:,} cases and {meta['calls']:,} calls "
        f"in {meta['seconds']:,.0f} s{f' (runs of {lengths} s)' if lengths else ''}; "
        f"{meta['failures']:,} cases failed, {meta['died']:,} processes hung or died, "
        f"{meta['cut']:,} cases were not judged, since they were cut short at the end."
    )


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Number of checks and largest errors of all seeds: forward, then backward."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        own = found.setdefault(row["check"], {"checks": 0})
        own["checks"] += row["checks"]
        for name, value in row["worst"].items():
            own[name] = max(own.get(name, 0.0), value)
    made = []
    for kind, names in _ERRORS.items():
        lines = [
            [check, f"{own['checks']:,}", *(row_tables.cell(own, name, ".1e") for name in names)]
            for check, own in sorted(found.items())
            if check.startswith(kind)
        ]
        made.append(row_tables.markdown(["check", "checks", *names.values()], lines))
    return made
