"""The judge of scripts/chaos: reads what happened, and computes the figures. It starts nothing.

A history of jobs has `jobs` (name, every: the period in seconds), `from` and `to` (the time in
which ticks count), `runs` (job, slot, instance, begun, ended) and `faults` (at, kind, instance).
All times are seconds since 1970 on one machine.

Definitions, the same for every peer:

- A job's ticks are the multiples of its period in [from, to).
- A run's tick is the latest one at or before the time that the peer tells. If it tells none, it is
  the latest tick at or before the run's begin.
- A tick is lost if no run of it has ended when the instances are stopped, which is `drain` seconds
  after `to`. A run that begins again under the same tick saves it.
- A tick was run twice if two of its runs have ended. Each further end counts.
- Two runs of one job are beside each other if both go on at the same time, whatever their ticks.
  A run that has no end goes on until its instance dies or the server stops, whichever is first. If
  neither happens, it counts as over at once.
- The delay of a tick is the time from the tick to the begin of its first run that has ended. A lost
  tick has none.
- Without any run after a kill: the time from the next tick of the jobs with the shortest period
  after the kill to the next begin of one of their runs. It is none if that comes before the tick. A
  kill counts unless the server is down, or has no run yet since it came back.
- Without any run after a restart: the same, from the moment at which the server takes connections
  if a tick was due while it did not.
- If no run begins any more, both last until the end of the history.
- Statements a second are those that the peer's servers count from `from` to `to`, without the
  work's own two.

A history of locks has `workers` (name, events) and `split`: holds that are granted before it are
judged as those under a paused holder, the others as those under a restart of the server.

- A hold lasts from the grant until the worker has written, was refused, or was told of the loss. It
  ends before that if the worker says that its work has ended (`left`), and only commits.
- Two holders: holds during which the lock was granted to another worker.
- Lost updates: increments that were told as done, minus the different values that they wrote. This
  is what is told as done minus the counter if the outcome of no write is unknown.
- The longest wait is from a request to its grant.
"""

import bisect
import math


def percentile(values, share):
    """The smallest of the sorted values that this share of them does not exceed."""
    if not values:
        return None
    return values[max(0, math.ceil(share * len(values)) - 1)]


def tick_of(run, every):
    """The tick of a run, as a number of seconds."""
    told = run["slot"] if run.get("slot") is not None else run["begun"]
    return math.floor(told / every + 1e-6) * every  # times have microseconds


def ticks_between(start, end, every):
    first = math.ceil(start / every)
    return [n * every for n in range(first, math.ceil(end / every))]


def ends_of(runs, faults, until):
    """When each run stops going on, by the definition above."""
    deaths, downs = {}, []
    for fault in faults:
        if fault["kind"] in ("kill", "exit"):
            deaths.setdefault(fault["instance"], fault["at"])
        elif fault["kind"] == "server_down":
            downs.append(fault["at"])
    ends = []
    for run in runs:
        if run["ended"] is not None:
            ends.append(run["ended"])
            continue
        stops = [at for at in [deaths.get(run["instance"])] + downs if at and at >= run["begun"]]
        ends.append(min(stops, default=run["begun"]))
    return ends


def pairs_beside(spans):
    """How many pairs of (start, end, owner) overlap that have different owners."""
    pairs, open_spans = 0, []
    for start, end, owner in sorted(spans):
        open_spans = [(e, o) for e, o in open_spans if e > start]
        pairs += sum(1 for _, o in open_spans if o != owner)
        open_spans.append((end, owner))
    return pairs


def intruded(spans):
    """How many spans (start, end, owner) see another owner's span begin."""
    starts = sorted((start, owner) for start, _, owner in spans)
    times = [start for start, _ in starts]
    count = 0
    for start, end, owner in spans:
        inside = starts[bisect.bisect_right(times, start):bisect.bisect_left(times, end)]
        count += any(other != owner for _, other in inside)
    return count


def next_begin(begins, at, until):
    place = bisect.bisect_left(begins, at)
    return begins[place] if place < len(begins) else until


def gaps(history, begins, until, every):
    """The longest times in which a run was owed and none began: after a kill, after a restart."""
    def silence(at, since):
        tick = math.ceil(since / every) * every
        return max(0, next_begin(begins, at, until) - max(at, tick))

    faults = sorted(history["faults"], key=lambda fault: fault["at"])
    blind, after_restart, down = [], [], None
    for fault in faults:
        if fault["kind"] == "server_down":
            down = fault["at"]
        elif fault["kind"] == "server_up" and down is not None:
            after_restart.append(silence(fault["at"], down))
            blind.append((down, next_begin(begins, fault["at"], until)))
            down = None
    if down is not None:
        blind.append((down, until))
    after_kill = [
        silence(fault["at"], fault["at"])
        for fault in faults
        if fault["kind"] == "kill" and history["from"] <= fault["at"] < history["to"]
        and not any(start <= fault["at"] <= end for start, end in blind)
    ]
    return max(after_kill, default=None), max(after_restart, default=None)


def judge_jobs(history):
    """The figures of a history of jobs."""
    start, end = history["from"], history["to"]
    runs, faults = history["runs"], history["faults"]
    until = history.get("until", end)
    lost = twice = ticks = beside = 0
    lost_ticks, delays = [], []
    for job in history["jobs"]:
        every = job["every"]
        mine = [run for run in runs if run["job"] == job["name"]]
        ended = {}
        for run in mine:
            if run["ended"] is not None:
                ended.setdefault(tick_of(run, every), []).append(run["begun"])
        for tick in ticks_between(start, end, every):
            ticks += 1
            begins = ended.get(tick)
            if not begins:
                lost += 1
                lost_ticks.append((job["name"], tick))
                continue
            twice += len(begins) - 1
            delays.append(min(begins) - tick)
        ends = ends_of(mine, faults, until)
        beside += pairs_beside([(run["begun"], ends[i], i) for i, run in enumerate(mine)])
    shortest = min(job["every"] for job in history["jobs"])
    finest = {job["name"] for job in history["jobs"] if job["every"] == shortest}
    begins = sorted(run["begun"] for run in runs if run["job"] in finest)
    after_kill, after_restart = gaps(history, begins, until, shortest)
    delays.sort()
    return {
        "ticks": ticks, "runs": len(runs),
        "unended": sum(1 for run in runs if run["ended"] is None),
        "lost": lost, "lost_ticks": lost_ticks, "twice": twice, "beside": beside,
        "p50": percentile(delays, 0.50), "p99": percentile(delays, 0.99),
        "longest": delays[-1] if delays else None,
        "after_kill": after_kill, "after_restart": after_restart,
        "kills": sum(1 for fault in faults if fault["kind"] == "kill"),
        "statements": history.get("statements"), "versions": history.get("versions", ""),
    }


def holds_of(worker):
    """The holds of one worker, from its events in order."""
    holds, asked, hold = [], None, None
    for event in worker["events"]:
        kind, at = event["event"], event["at"]
        if kind == "ask":
            asked = at
        elif kind == "got":
            hold = {"worker": worker["name"], "asked": asked, "got": at, "left": None,
                    "outcome": "unknown", "value": None}
            holds.append(hold)
        elif hold is not None and kind == "left":
            hold["left"] = at
        elif hold is not None and kind in ("done", "refused", "unknown"):
            hold["left"], hold["outcome"] = hold["left"] or at, kind
            hold["value"] = event.get("value")
            hold = None
    return holds


def judge_locks(history):
    """The figures of a history of locks, for each of its two parts."""
    holds = [hold for worker in history["workers"] for hold in holds_of(worker)]
    figures = {}
    for part in ("pause", "restart"):
        mine = [hold for hold in holds if (hold["got"] < history["split"]) == (part == "pause")]
        done = [hold for hold in mine if hold["outcome"] == "done"]
        spans = [(hold["got"], hold["left"], hold["worker"])
                 for hold in mine if hold["left"] is not None]
        waits = [hold["got"] - hold["asked"] for hold in mine]
        figures[part] = {
            "holds": len(mine), "done": len(done),
            "refused": sum(1 for hold in mine if hold["outcome"] == "refused"),
            "unknown": sum(1 for hold in mine if hold["outcome"] == "unknown"),
            "two_holders": intruded(spans),
            "longest_wait": max(waits, default=None),
        }
        figures[part]["lost"] = len(done) - len({hold["value"] for hold in done})
    return figures
