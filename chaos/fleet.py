"""Instances of a program, as a service manager would keep them: one that ends is started again."""

import json
import os
import signal
import subprocess
import threading
import time

from plan import RESTART


class Log:
    """The faults, as they happened: a line of JSON each."""

    def __init__(self, path):
        self.file, self.entries, self.lock = open(path, "w"), [], threading.Lock()

    def add(self, kind, instance=None, at=None, **more):
        entry = {"at": at or time.time(), "kind": kind, "instance": instance, **more}
        with self.lock:
            self.entries.append(entry)
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()


class Instance:
    """One place of the fleet. Its process has a new name each time it starts."""

    def __init__(self, fleet, place):
        self.fleet, self.place, self.generation = fleet, place, 0
        self.process, self.due, self.paused_until, self.ending = None, 0, None, None
        self.output = open(f"{fleet.folder}/instance-{place}.log", "ab")

    def start(self):
        self.generation += 1
        self.name = f"{self.place}.{self.generation}"
        env = dict(self.fleet.env, CHAOS_INSTANCE=self.name, CHAOS_PLACE=str(self.place))
        # A process group of its own, and its end with this program's.
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self.fleet.argv], env=env, cwd=self.fleet.cwd,
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output,
            start_new_session=True)
        self.due, self.ending = None, None
        self.fleet.log.add("start", self.name)

    def running(self):
        return self.process is not None and self.process.poll() is None

    def free(self):
        """Whether a fault may choose it."""
        return self.running() and not self.paused_until and not self.ending

    def kill(self, kind="kill"):
        at = time.time()
        self.process.kill()
        self.process.wait()
        self.fleet.log.add(kind, self.name, at)
        self.due = time.monotonic() + RESTART

    def look(self, now):
        """What is due: the end of a pause, a new process."""
        if self.paused_until and now >= self.paused_until:
            self.process.send_signal(signal.SIGCONT)
            self.paused_until = None
            self.fleet.log.add("continue", self.name)
        if self.due is None and not self.running():
            self.fleet.log.add("exit", self.name, status=self.process.returncode)
            self.due = now + RESTART
        if self.due is not None and now >= self.due:
            self.start()


class Fleet:
    def __init__(self, argv, env, cwd, folder, log, places):
        self.argv, self.cwd, self.folder, self.log = argv, cwd, folder, log
        self.env = {**os.environ, **env}
        self.deploying, self.stopped = [], False
        self.instances = [Instance(self, place) for place in range(places)]
        for instance in self.instances:
            instance.start()

    def choose(self, place):
        """The instance at this place, or the next one that a fault may choose."""
        count = len(self.instances)
        for further in range(count):
            instance = self.instances[(place + further) % count]
            if instance.free():
                return instance
        return None

    def kill(self, place):
        victim = self.choose(place)
        if victim:
            victim.kill()
        else:
            self.log.add("no_victim")

    def pause(self, place, seconds):
        victim = self.choose(place)
        if victim:
            victim.process.send_signal(signal.SIGSTOP)
            victim.paused_until = time.monotonic() + seconds
            self.log.add("stop", victim.name)

    def deploy(self):
        """The processes go, one by one, and each has a new one in its place."""
        self.deploying = [instance.place for instance in self.instances]

    def look(self):
        now = time.monotonic()
        if self.deploying:
            instance = self.instances[self.deploying[0]]
            if instance.ending is None and instance.free():
                instance.process.terminate()
                instance.ending = now + 20  # what service managers give
                self.log.add("terminate", instance.name)
            elif instance.ending and not instance.running():
                self.log.add("exit", instance.name, status=instance.process.returncode)
                instance.start()
                self.deploying.pop(0)
            elif instance.ending and now >= instance.ending:
                instance.kill("exit")
                instance.start()
                self.deploying.pop(0)
        for instance in self.instances:
            if not instance.ending:
                instance.look(now)

    def stop(self):
        """Ends what this fleet has started, and what that has started in its process group."""
        if self.stopped:
            return
        self.stopped = True
        for instance in self.instances:
            if instance.running():
                instance.process.send_signal(signal.SIGCONT)
                instance.process.terminate()
        deadline = time.monotonic() + 15
        for instance in self.instances:
            try:
                instance.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                instance.kill("late")
            try:
                os.killpg(instance.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the usual case: the group ended with the process
