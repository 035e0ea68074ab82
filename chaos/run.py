"""The same faults for every tool: scripts/chaos starts this."""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import plan
import report
from jobs import run_jobs
from judge import judge_jobs, judge_locks
from locks import run_locks
from peer import all_peers
from servers import Missing

ABOUT = f"""
Runs jobs, and then locks, of rowlock and of other tools under the same faults, on throwaway
servers, and prints one table for each.

Jobs: at every second and every five seconds for ten minutes; of a tool whose finest schedule is a
minute, twenty at every minute and twenty at every five for thirty. Five instances; one is killed
every two seconds, and starts again after {plan.RESTART} s; one is stopped for {plan.PAUSE} s; the
server is restarted twice, once by a crash, and is down for {plan.DOWN} s; then a rolling deploy.
Locks: five workers add to a counter by reading and then writing it. The
holder is stopped for longer than its lease, up to five times; then the server is restarted as
often. Seeds decide who and when, the same for every tool. chaos/judge.py has the definitions.
"""


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=ABOUT,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", metavar="NAME",
                        help="only this one; may be repeated (--list shows the names)")
    parser.add_argument("--part", choices=["jobs", "locks"], help="only this part")
    parser.add_argument("--minutes", type=float, default=10, metavar="N",
                        help="for how long (10; a tool with minutes runs for three times as long)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which faults (1)")
    parser.add_argument("--out", metavar="DIR",
                        help="where histories and logs are kept (otherwise only after a failure)")
    parser.add_argument("--debug", action="store_true",
                        help="build the Rust programs without optimization, which is faster")
    parser.add_argument("--list", action="store_true", help="show the names and end")
    return parser.parse_args()


def say(text):
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def one(peer, folder, options):
    """The figures of one peer's jobs, or the reason why there are none."""
    try:
        peer.install(options.debug)
        print(f"\n{peer.name}: {peer.versions}\n{peer.configuration('jobs')}", flush=True)
        folder.mkdir(parents=True)
        os.chmod(folder, 0o755)
        history = run_jobs(peer, folder, options.minutes, options.seed, say)
    except Missing as reason:
        say(f"{peer.name}: {reason}")
        return " ".join(str(reason).split())
    figures = judge_jobs(history)
    shown = {key: value for key, value in figures.items() if key != "lost_ticks"}
    say(f"{peer.name}: {json.dumps(shown)}")
    for job, tick in figures["lost_ticks"][:20]:
        say(f"{peer.name}: lost {job} {tick}")
    return figures


def locks_of(peer, folder, options):
    """The figures of one peer's locks, one for each of its ways."""
    results = []
    ways = list(peer.settings["locks"]["ways"])
    try:
        peer.install(options.debug)
    except Missing as reason:
        say(f"{peer.name}: {reason}")
        return [(name, " ".join(str(reason).split())) for name in ways]
    print(f"\n{', '.join(ways)}: {peer.versions}\n{peer.configuration('locks')}", flush=True)
    for name in ways:
        place = folder / name.replace(" ", "-").replace(",", "")
        place.mkdir(parents=True)
        try:
            figures = judge_locks(run_locks(peer, name, place, options.minutes, options.seed, say))
            say(f"{name}: {json.dumps(figures)}")
        except Missing as reason:
            figures = " ".join(str(reason).split())
            say(f"{name}: {figures}")
        results.append((name, figures))
    return results


def chosen(kind, options):
    peers = all_peers(kind)
    if options.peer:
        peers = [peer for peer in peers if peer.name in options.peer]
    return peers


def main():
    options = arguments()
    if options.list:
        for kind in ("jobs", "locks"):
            print(f"{kind}: " + ", ".join(peer.name for peer in all_peers(kind)))
        return 0
    known = {peer.name for kind in ("jobs", "locks") for peer in all_peers(kind)}
    for name in options.peer or []:
        if name not in known:
            say(f"no peer {name}: --list shows the names")
            return 2
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, lambda *_: sys.exit(130))
    out = Path(options.out or tempfile.mkdtemp(prefix="rowlock-chaos."))
    out.mkdir(parents=True, exist_ok=True)
    os.chmod(out, 0o755)  # the servers run as another user when this one is root
    results, keep = [], True
    try:
        if options.part != "locks":
            results = [(peer, one(peer, out / "jobs" / peer.name, options))
                       for peer in chosen("jobs", options)]
            print(f"\n{options.minutes:g} minutes, seed {options.seed}\n")
            print(report.jobs_table(results), flush=True)
        if options.part != "jobs":
            of_locks = []
            for peer in chosen("locks", options):
                of_locks += locks_of(peer, out / "locks" / peer.name, options)
            print(f"\n{options.minutes:g} minutes, seed {options.seed}\n")
            print(report.locks_table(of_locks), flush=True)
            results += of_locks
        keep = options.out or any(isinstance(figures, str) for _, figures in results)
    finally:
        if keep:
            say(f"histories and logs are in {out}")
        else:
            shutil.rmtree(out, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
