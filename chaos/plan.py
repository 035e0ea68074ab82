"""The faults of a run, from a seed: the same for every peer with the same length."""

import random

INSTANCES = 5
LEASE = 10     # seconds after which each peer that can be told so notices a crash
PAUSE = 30     # how long an instance is stopped: past that
DOWN = 3       # how long the server stays down
RESTART = 1    # how long after its death an instance is started again


def faults(seed, seconds):
    """[(seconds after the begin, kind, argument)], in order. Places are those of instances."""
    chance = random.Random(seed)
    # Every two seconds, at any part of a second: jobs begin at whole ones.
    plan = [(2.0 * n + chance.uniform(-0.5, 0.5), "kill", chance.randrange(INSTANCES))
            for n in range(1, int(seconds / 2))]
    plan.append((seconds * 0.15, "pause", chance.randrange(INSTANCES)))
    # Not at a whole second, at which the jobs begin.
    plan.append((int(seconds * 0.45) + 0.1 + chance.random() * 0.8, "restart", "fast"))
    plan.append((int(seconds * 0.60) + 0.1 + chance.random() * 0.8, "restart", "crash"))
    plan.append((seconds * 0.75, "deploy", None))
    return sorted(plan, key=lambda fault: fault[0])


def pause_of(seconds):
    """A short run has a shorter pause, which is still longer than the lease."""
    return min(PAUSE, max(LEASE + 5, seconds * 0.25))


def jobs(grain):
    """The jobs. With minutes, for three times as long, they have as many ticks."""
    if grain == "second":
        return [{"name": "second", "every": 1}, {"name": "five", "every": 5}]
    return ([{"name": f"minute{n}", "every": 60} for n in range(20)]
            + [{"name": f"five{n}", "every": 300} for n in range(20)])
