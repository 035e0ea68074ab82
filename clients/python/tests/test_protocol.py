"""Lost replies, losses and their times, with a database that fails as a test says."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from typing import Any

import pytest
from fakes import Fake, acquiring, carry_out, database, granted, hold, state, together

import rowlock
from rowlock import clock
from rowlock.database import Database
from rowlock.errors import Contention, Outage, Refusal
from rowlock.kinds import Permit, Reader, Writer
from rowlock.protocol import Acquired, Call, Claim, Granted, Previous, Seen, State, Steps, Wait
from rowlock.result import Result
from rowlock.sources import Place
from rowlock.steps import Pauses, ending, extending, renewing
from rowlock.terms import Terms


def test_a_claim_without_a_reply_is_repeated_by_the_same_holder() -> None:
    replies = iter([Outage(sent=True), Outage(sent=False), rowlock.Refusal("k", "busy"), None])

    def answer(_: str, request: Any) -> Any:
        reply = next(replies)
        return granted(request) if reply is None else reply

    fake = Fake(answer)
    acquired = carry_out(acquiring(Terms("k")), fake, lambda _: None)
    assert isinstance(acquired, Acquired)
    holders = [holder for _, (_, holder) in fake.requests]
    assert holders == [acquired.state.claim.holder] * 4


def test_a_permit_that_was_taken_between_two_requests_is_left_for_a_free_one() -> None:
    taken: list[str] = []

    def answer(kind: str, request: Any) -> Any:
        if kind == "look":
            return []
        if not taken:
            taken.append(request[0].key)
            return Contention()
        is_taken = request[0].key in taken
        return rowlock.Refusal(request[0].key, "held") if is_taken else granted(request)

    steps = Permit(Terms("s"), 2).acquiring(Wait(0.0), lambda: Pauses(0.02, 1.0), lambda _: None)
    acquired = carry_out(steps, Fake(answer))
    assert isinstance(acquired, Acquired)
    assert acquired.state.claim.key not in taken


def test_the_shortest_lease_decides_how_long_the_session_waits() -> None:
    """It stays open meanwhile."""
    sessions: list[Fake] = []
    waits: list[float] = []

    def session() -> Fake:
        sessions.append(Fake(lambda *_: waits.append(sessions[-1].patience)))
        return sessions[-1]

    def steps() -> Steps[None]:
        yield Call("look", [None])

    on = Database(Place(object(), session))
    for lease in (60.0, 3.0, 9.0):
        on.ask(steps(), lease).result(30)
    on.close()
    assert waits == [5.0, 1.0, 3.0]
    assert len(sessions) == 1


def test_an_extension_is_not_sent_after_the_end_of_its_claim() -> None:
    """As if a task is cancelled that extends a lease in its block: the abandon would be undone."""
    for answer in ("busy", Outage(sent=True)):
        held = state()
        fake = Fake(functools.partial(lambda answer, *_: answer, answer))

        def end(_: float, held: State = held) -> None:
            held.end()

        with pytest.raises(rowlock.Lost, match="was ended"):
            carry_out(extending(held, 3600.0), fake, end)
        assert [kind for kind, _ in fake.requests] == ["renew"]


def test_an_extension_precedes_the_abandon_of_its_claim() -> None:
    """Also if an abandon of another claim, with which it travels, comes before both."""
    fake = Fake(lambda *_: "done")
    on = database(fake)
    other, held = state(), state()
    ends: list[Result[None]] = []
    with together(on):
        ends.append(on.end(other, "abandon"))
        extension = on.extend(held, 3600.0)
        # After the extension has begun, and before it is sent.
        on.requests._inbox.put(lambda: ends.append(on.end(held, "abandon")))
    with pytest.raises(rowlock.Lost):
        extension.result(30)
    for end in ends:
        end.result(30)
    kinds = [(kind, change.claim is held.claim) for kind, change in fake.requests]
    assert kinds == [("renew", True), ("abandon", False), ("abandon", True)]


def test_an_outcome_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowlock.steps.TIME_LIMIT", 0.2)
    with pytest.raises(rowlock.Unknown):
        carry_out(acquiring(Terms("k")), Fake(lambda *_: Outage(sent=True)))
    with pytest.raises(rowlock.Unavailable):
        carry_out(acquiring(Terms("k")), Fake(lambda *_: Outage(sent=False)))
    refused = carry_out(acquiring(Terms("k")), Fake(lambda *_: Contention()))
    assert isinstance(refused, rowlock.Refusal)
    assert refused.reason == "busy"


def test_a_wait_outlives_an_outage() -> None:
    replies = iter([Outage(sent=False)] * 3)
    fake = Fake(lambda _, request: next(replies, None) or granted(request))
    assert carry_out(acquiring(Terms("k"), 10.0), fake)


@pytest.mark.parametrize("kind", [Reader, Writer])
def test_a_wait_outlives_a_claim_of_a_readers_key_without_a_reply(
    kind: type[Reader | Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader claims one, and a writer that of a reader whose lease is over.

    The claim stands: forgotten, it would keep writers out until its lease ends.
    """
    slept: list[float] = []
    monkeypatch.setattr(clock, "now", lambda: sum(slept))
    claims: list[Any] = []
    name = Seen("k", "free", 5, None, "", None, None)

    def answer(kind: str, request: Any) -> Any:
        if kind == "claim" and "#" in request[0].key:
            claims.append((request[0].key, request[1]))
        if claims and clock.now() < 20:
            return Outage(sent=True)
        if kind == "look" and request.last != "k":
            state = "held" if claims else "expired"
            return [Seen("k#r1", state, 6 if claims else 5, "h", "label", None, None)]
        if kind == "look":
            return [name]
        return granted(request) if kind == "claim" else "done"

    fake = Fake(answer)
    steps = kind(Terms("k", lease=60)).acquiring(
        Wait(60.0), lambda: Pauses(0.02, 1.0), lambda _: None
    )
    acquired = carry_out(steps, fake, slept.append)
    assert isinstance(acquired, Acquired)
    assert len(claims) > 2
    assert len(set(claims)) == 1
    ended = [change.claim.key for kind, change in fake.requests if kind == "release"]
    assert ended == ([] if kind is Reader else ["k#r1"])


@pytest.mark.parametrize("why", ["no reply", "all numbers are held", "the caller has gone"])
def test_a_takeover_of_a_name_that_lets_no_reader_in_is_put_back(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the crash of its writer would be told to nobody."""
    slept: list[float] = []
    monkeypatch.setattr(clock, "now", lambda: sum(slept))
    wait = Wait(1.0)
    took_over: list[str] = []

    def answer(kind: str, request: Any) -> Any:
        if kind == "look":
            return [Seen("k", "expired", 5, "h", "crashed", None, None)]
        if kind != "claim":
            return "done"
        if request[0].key == "k":
            took_over.append(request[1])
            return Granted(Claim("k", request[1], 6), Previous(5, "crashed"))
        if took_over and why == "the caller has gone":
            wait.leave()
        elif took_over:
            return Outage(sent=True) if why == "no reply" else Refusal(request[0].key, "held")
        return granted(request)

    fake = Fake(answer)
    steps = Reader(Terms("k", lease=60)).acquiring(wait, lambda: Pauses(0.02, 1.0), lambda _: None)
    with contextlib.suppress(rowlock.Unknown, rowlock.Unavailable):
        assert isinstance(carry_out(steps, fake, slept.append), Refusal)
    ends = [
        kind
        for kind, change in fake.requests
        if kind in ("release", "put back") and change.claim.key == "k"
    ]
    assert ends
    assert set(ends) == {"put back"}


def test_a_wait_ends_before_a_min_interval_that_outlasts_it() -> None:
    interval = rowlock.Refusal("k", "within_min_interval", retry_after=60.0)
    began = time.monotonic()
    reply = carry_out(acquiring(Terms("k"), 5.0), Fake(lambda *_: interval))
    assert reply == interval
    assert time.monotonic() - began < 4


def test_a_reply_that_comes_after_the_deadline_holds_nothing() -> None:
    slow = [True]

    def answer(_: str, request: Any) -> Any:
        if slow.pop() if slow else False:
            time.sleep(0.12)
        return granted(request)

    fake = Fake(answer)
    acquired = carry_out(acquiring(Terms("k", lease=0.1)), fake)
    assert isinstance(acquired, Acquired)
    assert len(fake.requests) >= 2


def test_a_loss_is_told_when_renewals_have_no_reply() -> None:
    silent = threading.Event()

    def answer(name: str, _: Any) -> Any:
        silent.wait(30)  # As a server that has gone: the request hangs.
        return "done"

    held = state(4.0)
    lease = hold(Fake(answer), held)
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
    lease = hold(fake, held)
    until = held.sent + 6
    while clock.now() < until and not lease.lost:
        time.sleep(0.01)
    assert not lease.lost
    assert [name for name, _ in fake.requests[:5]] == ["renew"] * 5
    lease.release()


def test_a_lease_that_has_ended_is_renewed_no_more() -> None:
    """An interrupt may come between the record of its end and the signal to its thread."""
    fake = Fake(lambda *_: "done")

    def end(seconds: float) -> bool:
        time.sleep(seconds)
        held.ended = True
        return len(fake.requests) > 3

    for ended in (True, False):  # Before the first pause, and in it.
        held = state(0.6)
        held.ended = ended
        carry_out(renewing(held, lambda _: None), fake, end)
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
        held = state(6.0, clock.now() - 2)  # It is renewed at once.
        lease = hold(Fake(lambda *_, a=answer: a), held)
        while held.failure is None:
            time.sleep(0.01)
        held.deadline = clock.now()
        with pytest.raises(rowlock.Lost, match=reason):
            lease.release()
    # A failure that a later renewal has mended is not the reason.
    replies = iter([refused, "done"])
    gone = threading.Event()
    fake = Fake(lambda *_: next(replies, None) or gone.wait(30))
    held = state(6.0, clock.now() - 2)
    lease = hold(fake, held)
    while len(fake.requests) < 3:
        time.sleep(0.01)
    held.deadline = clock.now()
    assert lease.lost
    assert "permission" not in str(held.error())
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
    carry_out(ending(state(), "release", "S"), fake)
    assert len(fake.requests) == 4


def test_an_end_that_may_have_been_carried_out_is_unknown() -> None:
    replies = iter([Outage(sent=True)])
    with pytest.raises(rowlock.Unknown):
        carry_out(ending(state(), "release", "S"), Fake(lambda *_: next(replies, "lost")))
    with pytest.raises(rowlock.Lost):
        carry_out(ending(state(), "release", "S"), Fake(lambda *_: "lost"))
    with pytest.raises(rowlock.Unknown):
        carry_out(ending(state(0.1), "release", "S"), Fake(lambda *_: Outage(sent=True)))


def test_the_deadline_counts_from_before_the_request() -> None:
    def slow(name: str, request: Any) -> Any:
        time.sleep(0.2)
        return granted(request) if name == "claim" else "done"

    before = clock.now()
    acquired = carry_out(acquiring(Terms("k", lease=2)), Fake(slow))
    assert isinstance(acquired, Acquired)
    held = acquired.state
    assert before + 1.9 <= held.deadline < before + 2.05

    sent = []

    def renewal(*_: Any) -> str:
        sent.append(clock.now())
        time.sleep(0.2)
        return "done"

    lease = hold(Fake(renewal), held)
    while len(sent) < 2:
        time.sleep(0.01)
    assert held.deadline < sent[0] + 2.05
    lease.release()


def test_a_lease_whose_deadline_has_passed_is_not_renewed() -> None:
    held = state(1.0, clock.now() - 0.96)
    assert not held.renewed(clock.now())
    assert held.lost
    held = state(1.0, clock.now() - 0.5)
    assert held.renewed(clock.now())
    assert not held.lost
