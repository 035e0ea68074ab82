"""The rules for SQLite, which has no functions: ``src/rules.rs`` of the crate, in Python.

``tests/rules.json``, which the crate's own tests write, has every cell of the decision table.
Times are microseconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row as the rules see it."""

    locked: bool
    status: str
    begin_time: int | None
    holder: str | None
    expires_at: int | None
    claimed_at: int | None
    ended: bool

    @property
    def is_rowlocks(self) -> bool:
        """Whether a claim of rowlock has locked the row, and no other program overwrote it."""
        untouched = self.claimed_at is not None and self.claimed_at == self.begin_time
        return self.locked and self.holder is not None and untouched and not self.ended


@dataclass(frozen=True)
class Verdict:
    """``acquired``, ``same``, ``taken over``, or the reason of a refusal and its end."""

    name: str
    granted: bool
    until: int | None = None


def judge(row: Row, now: int, holder: str, rules: str, min_interval: int) -> Verdict:
    """Decides whether ``holder`` may claim the key of this row now."""
    recover = rules == "recover"
    if row.is_rowlocks:
        if row.holder == holder:
            return Verdict("same", granted=True)
        if row.expires_at is None or now < row.expires_at:
            return Verdict("held", granted=False, until=row.expires_at)
        if recover:
            return Verdict("taken over", granted=True)
        return Verdict("timed_out_unfinished", granted=False)
    if row.locked:
        return Verdict("held_by_another_program", granted=False)
    if not recover and row.status != "S":
        failed = row.status == "F"
        return Verdict("last_run_failed" if failed else "not_succeeded", granted=False)
    if min_interval and row.begin_time is not None and now < row.begin_time + min_interval:
        return Verdict("within_min_interval", granted=False, until=row.begin_time + min_interval)
    return Verdict("acquired", granted=True)
