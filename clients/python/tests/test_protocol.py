"""Lost replies, losses and their times, with a database that fails as a test says."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import rowlock
from rowlock import clock, protocol
from rowlock import lease as leases
from rowlock.errors import Contention, Outage
from rowlock.lease import carry_out
from rowlock.protocol import Claim, Granted, State, Terms


class Fake:
    """A session that answers each request as the test says: a value, or an exception."""

    def __init__(self, answer: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []

    def _request(self, name: str, *arguments: Any) -> Any:
        self.requests.append((name, arguments))
        answer = self.answer(name, arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def claim(self, terms: Terms, holder: str) -> Any:
        return self._request("claim", terms, holder)

    def change(self, change: str, claim: Claim, *arguments: Any) -> Any:
        return self._request(change, claim, *arguments)

    def close(self) -> None:
        pass


def granted(arguments: tuple[Any, ...]) -> Granted:
    return Granted(Claim(arguments[0].key, arguments[1], 7), None)


def state(lease: float = 30.0) -> State:
    return State(Claim("k", "h", 7), lease, clock.now())


def test_a_claim_without_a_reply_is_repeated_by_the_same_holder() -> None:
    replies = iter([Outage(sent=True), Outage(sent=False), rowlock.Refusal("k", "busy"), None])

    def answer(_: str, arguments: tuple[Any, ...]) -> Any:
        reply = next(replies)
        return granted(arguments) if reply is None else reply

    fake = Fake(answer)
    acquired = carry_out(protocol.acquiring(Terms("k"), "h", 0.0), fake, lambda _: None)
    assert not isinstance(acquired, rowlock.Refusal)
    assert [request[1][1] for request in fake.requests] == ["h"] * 4


def test_an_outcome_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "TIME_LIMIT", 0.2)
    with pytest.raises(rowlock.Unknown):
        carry_out(protocol.acquiring(Terms("k"), "h", 0.0), Fake(lambda *_: Outage(sent=True)))
    with pytest.raises(rowlock.Unavailable):
        carry_out(protocol.acquiring(Terms("k"), "h", 0.0), Fake(lambda *_: Outage(sent=False)))
    refused = carry_out(protocol.acquiring(Terms("k"), "h", 0.0), Fake(lambda *_: Contention()))
    assert isinstance(refused, rowlock.Refusal)
    assert refused.reason == "busy"


def test_a_wait_outlives_an_outage() -> None:
    replies = iter([Outage(sent=False)] * 3)
    fake = Fake(lambda _, arguments: next(replies, None) or granted(arguments))
    assert carry_out(protocol.acquiring(Terms("k"), "h", 10.0), fake)


def test_a_wait_ends_before_a_window_that_outlasts_it() -> None:
    window = rowlock.Refusal("k", "within_window", retry_after=60.0)
    began = time.monotonic()
    reply = carry_out(protocol.acquiring(Terms("k"), "h", 5.0), Fake(lambda *_: window))
    assert reply == window
    assert time.monotonic() - began < 4


def test_a_reply_that_comes_after_the_deadline_holds_nothing() -> None:
    slow = [True]

    def answer(_: str, arguments: tuple[Any, ...]) -> Any:
        if slow.pop() if slow else False:
            time.sleep(0.12)
        return granted(arguments)

    fake = Fake(answer)
    acquired = carry_out(protocol.acquiring(Terms("k", lease=0.1), "h", 0.0), fake)
    assert not isinstance(acquired, rowlock.Refusal)
    assert len(fake.requests) >= 2


def test_a_loss_is_told_when_renewals_have_no_reply() -> None:
    silent = threading.Event()

    def answer(name: str, _: tuple[Any, ...]) -> Any:
        silent.wait(30)  # As a server that has gone: the request hangs.
        return "done"

    held = state(4.0)
    lease = leases.Lease("sqlite:/nowhere", Fake(answer), held, None)
    assert not lease.lost
    while not lease.lost:
        assert clock.now() < held.sent + 4.0, "the loss is told before the lease ends"
        time.sleep(0.005)
    # A renewal that has a reply at last revives nothing.
    silent.set()
    time.sleep(0.1)
    assert lease.lost
    with pytest.raises(rowlock.Lost, match="no renewal"):
        lease.release()


def test_a_renewal_that_fails_is_unknown_and_repeated() -> None:
    replies = iter([Outage(sent=True), Contention(), rowlock.Error("refused"), "busy"])
    fake = Fake(lambda *_: next(replies, "done"))
    held = state(3.0)
    lease = leases.Lease("sqlite:/nowhere", fake, held, None)
    until = held.sent + 6
    while clock.now() < until and not lease.lost:
        time.sleep(0.01)
    assert not lease.lost
    assert [name for name, _ in fake.requests[:5]] == ["renew"] * 5
    lease.release()


def test_a_lease_that_is_dropped_is_renewed_no_more() -> None:
    fake = Fake(lambda *_: "done")
    lease = leases.Lease("sqlite:/nowhere", fake, state(0.3), None)
    thread = lease._thread
    del lease
    thread.join(5)
    assert not thread.is_alive()


def test_a_lease_that_has_ended_is_renewed_no_more() -> None:
    """An interrupt may come between the record of its end and the signal to its thread."""
    fake = Fake(lambda *_: "done")
    held = state(0.3)
    held.ended = True
    carry_out(protocol.renewing(held), fake, lambda _: len(fake.requests) > 3)
    assert fake.requests == []


def test_a_loss_names_what_renewals_failed_with() -> None:
    refused = rowlock.Error("the database refused: permission denied")
    outage = Outage(sent=False)
    outage.__cause__ = ConnectionRefusedError("connection refused")
    for answer, reason in (
        (refused, "permission denied"),
        (outage, "connection refused"),
        ("busy", "another transaction has locked its row"),
    ):
        lease = leases.Lease("sqlite:/nowhere", Fake(lambda *_, a=answer: a), state(0.5), None)
        while not lease.lost:
            time.sleep(0.01)
        with pytest.raises(rowlock.Lost, match=reason):
            lease.release()
    # A failure that a later renewal has mended is not the reason.
    replies = iter([refused, "done"])
    gone = threading.Event()
    fake = Fake(lambda *_: next(replies, None) or gone.wait(30))
    lease = leases.Lease("sqlite:/nowhere", fake, state(0.5), None)
    while not lease.lost:
        time.sleep(0.01)
    assert len(fake.requests) == 3
    assert "permission" not in str(lease._state.error())
    gone.set()


def test_errors_pass_between_processes() -> None:
    """As `multiprocessing` and `concurrent.futures` hand them to the caller."""
    refusal = rowlock.Refusal("k", "held", by="another")
    for error in (rowlock.Refused(refusal), rowlock.Lost("k", 7, "why"), rowlock.Unknown("x")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_an_end_without_a_reply_is_repeated() -> None:
    replies = iter([Outage(sent=True), Contention(), "busy"])
    fake = Fake(lambda *_: next(replies, "done"))
    carry_out(protocol.ending(state(), "release", "S"), fake)
    assert len(fake.requests) == 4


def test_an_end_that_may_have_been_carried_out_is_unknown() -> None:
    replies = iter([Outage(sent=True)])
    with pytest.raises(rowlock.Unknown):
        carry_out(protocol.ending(state(), "release", "S"), Fake(lambda *_: next(replies, "lost")))
    with pytest.raises(rowlock.Lost):
        carry_out(protocol.ending(state(), "release", "S"), Fake(lambda *_: "lost"))
    with pytest.raises(rowlock.Unknown):
        carry_out(protocol.ending(state(0.1), "release", "S"), Fake(lambda *_: Outage(sent=True)))


def test_the_deadline_counts_from_before_the_request() -> None:
    def slow(name: str, arguments: tuple[Any, ...]) -> Any:
        time.sleep(0.2)
        return granted(arguments) if name == "claim" else "done"

    before = clock.now()
    acquired = carry_out(protocol.acquiring(Terms("k", lease=2), "h", 0.0), Fake(slow))
    assert not isinstance(acquired, rowlock.Refusal)
    held = acquired[0]
    assert before + 1.9 <= held.deadline < before + 2.05

    sent = []

    def renewal(*_: Any) -> str:
        sent.append(clock.now())
        time.sleep(0.2)
        return "done"

    lease = leases.Lease("sqlite:/nowhere", Fake(renewal), held, None)
    while len(sent) < 2:
        time.sleep(0.01)
    assert held.deadline < sent[0] + 2.05
    lease._stop.set()


def test_a_lease_whose_deadline_has_passed_is_not_renewed() -> None:
    held = State(Claim("k", "h", 7), 1.0, clock.now() - 0.96)
    assert not held.renewed(clock.now())
    assert held.lost
    held = State(Claim("k", "h", 7), 1.0, clock.now() - 0.5)
    assert held.renewed(clock.now())
    assert not held.lost
