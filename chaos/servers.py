"""Throwaway servers on free loopback ports: PostgreSQL and Redis, which sync each commit."""

import glob
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """Something cannot be had on this machine. The text says what, and what to do."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_server():
    """What goes before a server's command: it ends with this program, and is never root."""
    prefix = ["setpriv", "--pdeathsig", "TERM"]
    if os.geteuid() == 0:
        prefix += ["--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    return prefix


def debian_package(*names):
    """Installs Debian packages as scripts/test does, without starting their services."""
    script = """
set -euo pipefail
say() { echo "chaos: $*" >&2; }
. scripts/servers
. scripts/programs
set_up
install_packages "$@" || { echo "$why" >&2; exit 1; }"""
    done = subprocess.run(["bash", "-c", script, "chaos", *names], cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode:
        raise Missing(f"{' '.join(names)}: {done.stderr.strip()[-200:]}")


def postgres_folder():
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
    if not found:
        debian_package("postgresql")
        found = glob.glob("/usr/lib/postgresql/*/bin")
    if not found:
        raise Missing("PostgreSQL is not installed: apt-get install postgresql")
    return found[-1]


class Server:
    """What both have in common."""

    def __init__(self, folder, log):
        self.folder, self.port, self.process = folder, free_port(), None
        self.log = open(log, "ab")
        os.makedirs(folder)
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")

    def start(self):
        self.process = subprocess.Popen(as_server() + self.command(), stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log, cwd=self.folder)
        deadline = time.monotonic() + 60
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"{self.name} did not start: see {self.log.name}")
            time.sleep(0.05)

    def stop(self, how):
        if self.process and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Postgres(Server):
    name = "PostgreSQL"
    gently, crash = signal.SIGINT, signal.SIGQUIT  # fast: clients are cut off; immediate: a crash

    def __init__(self, folder, log, preload=()):
        self.bin = postgres_folder()
        super().__init__(folder, log)
        self.preload = ["pg_stat_statements", *preload]
        initdb = [f"{self.bin}/initdb", "-D", f"{folder}/data", "-U", "postgres", "-A", "trust",
                  "-E", "UTF8", "--no-locale"]
        subprocess.run(as_server() + initdb, check=True, stdout=self.log, stderr=self.log,
                       cwd=folder)
        self.url = f"postgres://postgres@127.0.0.1:{self.port}/postgres"
        self.counted = 0

    def command(self):
        command = [f"{self.bin}/postgres", "-D", f"{self.folder}/data", "-k", self.folder,
                   "-p", str(self.port), "-c", "listen_addresses=127.0.0.1",
                   "-c", "max_connections=300", "-c", "pg_stat_statements.max=5000",
                   "-c", f"shared_preload_libraries={','.join(self.preload)}"]
        if "pg_cron" in self.preload:
            # Background workers need no login, as its documentation says.
            command += ["-c", "cron.use_background_workers=on", "-c", "max_worker_processes=60",
                        "-c", "cron.max_running_jobs=30"]
        return command

    def ready(self):
        return subprocess.run([f"{self.bin}/pg_isready", "-q", "-h", "127.0.0.1", "-p",
                               str(self.port)]).returncode == 0

    def version(self):
        text = subprocess.run([f"{self.bin}/postgres", "--version"], capture_output=True, text=True)
        return "PostgreSQL " + text.stdout.split()[2]

    def psql(self, sql):
        done = subprocess.run([f"{self.bin}/psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", self.url,
                               "-c", sql], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"psql: {done.stderr.strip()}")
        return done.stdout

    def count(self):
        """Adds the statements since the last call, without the work's own, which name chaos_run."""
        self.counted += int(self.psql(
            "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query !~ "
            "'chaos_run|pg_stat_statements'"))
        self.psql("SELECT pg_stat_statements_reset()")


class Redis(Server):
    name = "Redis"
    gently, crash = signal.SIGTERM, signal.SIGKILL

    def __init__(self, folder, log):
        if not shutil.which("redis-server"):
            debian_package("redis-server")
        if not shutil.which("redis-server"):
            raise Missing("Redis is not installed: apt-get install redis-server")
        super().__init__(folder, log)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.counted = 0

    def command(self):
        return ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1",
                "--dir", self.folder, "--appendonly", "yes", "--appendfsync", "always",
                "--maxmemory-policy", "noeviction"]

    def cli(self, *words):
        done = subprocess.run(["redis-cli", "-p", str(self.port), *words], capture_output=True,
                              text=True)
        return done.stdout.strip()

    def ready(self):
        return self.cli("ping") == "PONG"

    def version(self):
        text = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout
        return "Redis " + text.split("v=")[1].split()[0]

    def count(self):
        """Adds the commands since the last call, those of scripts too."""
        for line in self.cli("info", "stats").splitlines():
            if line.startswith("total_commands_processed:"):
                self.counted += int(line.split(":")[1])
        self.cli("config", "resetstat")
