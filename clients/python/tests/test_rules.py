"""The rules for SQLite, against the cells that the crate's tests write from ``src/rules.rs``."""

from __future__ import annotations

import json
from pathlib import Path

from rowlock.rules import Row, judge

NOW = 1_800_000_000_000_000
CELLS = json.loads((Path(__file__).parent / "rules.json").read_text())


def ago(millis: int | None) -> int | None:
    return None if millis is None else NOW - millis * 1000


def test_every_cell_of_the_rules_table() -> None:
    names = set()
    for cell in CELLS:
        row = Row(
            cell["locked"],
            cell["status"],
            ago(cell["begin"]),
            "00112233" if cell["holder"] else None,
            ago(cell["expires"]),
            ago(cell["claimed"]),
            cell["ended"],
        )
        verdict = judge(row, NOW, "another", cell["rules"], cell["min_interval"] * 1000)
        assert (verdict.name, verdict.until) == (cell["verdict"], ago(cell["until"])), cell
        assert verdict.granted == (cell["verdict"] in ("acquired", "taken over"))
        names.add(verdict.name)
    assert len(names) == 8, names


def test_the_same_holder_has_its_claim_again() -> None:
    row = Row(True, "P", NOW, "me", NOW - 1, NOW, False)
    assert judge(row, NOW, "me", "recover", 0).name == "same"
