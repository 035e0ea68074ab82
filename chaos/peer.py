"""A peer: a folder of chaos/peers with a peer.toml, its program, and the versions, pinned."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from servers import Missing

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "chaos" / "peers"
NODE = "node_modules/node/bin/node"  # a package: some peers need a newer one than the machine has


def cache():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rowlock" / "chaos"


def all_peers(kind):
    """The peers of a kind, `jobs` or `locks`, in the order of the table."""
    peers = [Peer(folder) for folder in PEERS.iterdir() if (folder / "peer.toml").exists()]
    return sorted((peer for peer in peers if kind in peer.settings),
                  key=lambda peer: (peer.settings.get("order", 99), peer.name))


def run(command, cwd, what, **more):
    """A step of an installation."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **more)
    except FileNotFoundError as error:
        raise Missing(f"{what}: {command[0]} is not installed") from error
    if done.returncode:
        raise Missing(f"{what}: {(done.stderr.strip() or done.stdout.strip())[-300:]}")
    return done.stdout


class Peer:
    def __init__(self, folder):
        self.folder, self.name = folder, folder.name
        self.settings = tomllib.loads((folder / "peer.toml").read_text())
        self.place, self.versions = None, ""

    def install(self, debug):
        """Brings the peer onto this machine. Raises Missing with the reason if that fails."""
        getattr(self, "install_" + self.settings["install"])(debug)

    def copy(self, lock):
        """A copy of the folder in the cache, named by what it pins. Packages go beside it."""
        mark = hashlib.sha256((self.folder / lock).read_bytes()).hexdigest()[:10]
        self.place = cache() / f"{self.name}-{mark}"
        shutil.copytree(self.folder, self.place, dirs_exist_ok=True)
        return self.place / "installed"

    def install_npm(self, debug):
        done = self.copy("package-lock.json")
        if not done.exists():
            run(["npm", "ci", "--no-audit", "--no-fund"], self.place, "npm ci")
            if not (self.place / NODE).exists():
                raise Missing("npm ci: the package node brought no program; allow its "
                              "install script")
            done.touch()
        locked = json.loads((self.place / "package-lock.json").read_text())["packages"]
        wanted = json.loads((self.place / "package.json").read_text())["dependencies"]
        self.versions = ", ".join(f"{name} {locked['node_modules/' + name]['version']}"
                                  for name in wanted)

    def install_pip(self, debug):
        done = self.copy("requirements.txt")
        python = self.place / "venv" / "bin" / "python"
        if not done.exists():
            run([sys.executable, "-m", "venv", "venv"], self.place, "python -m venv")
            run([python, "-m", "pip", "install", "-q", "-r", "requirements.txt"], self.place,
                "pip install")
            done.touch()
        lines = (self.place / "requirements.txt").read_text().splitlines()
        asked = lines[:lines.index("")] if "" in lines else lines
        named = [line.replace("==", " ") for line in asked if line and not line.startswith("#")]
        self.versions = ", ".join(named) + f", Python {sys.version.split()[0]}"

    def install_cargo(self, debug):
        self.place = self.folder
        target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target" / "chaos")
        manifest = self.folder / self.settings.get("manifest", "Cargo.toml")
        command = ["cargo", "build", "-q", "--locked", "--target-dir", str(target),
                   "--manifest-path", str(manifest)]
        command += ["-p", self.settings["package"]] if "package" in self.settings else []
        run(command + ([] if debug else ["--release"]), ROOT, "cargo build")
        self.built = target / ("debug" if debug else "release")
        lock = tomllib.loads((manifest.parent / "Cargo.lock").read_text())["package"]
        versions = {package["name"]: package["version"] for package in lock}
        self.versions = ", ".join(f"{name} {versions[name]}" for name in self.settings["versions"])
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                                capture_output=True, text=True)
        if "rowlock" in self.name and not commit.returncode:
            self.versions += f" ({commit.stdout.strip()})"

    def install_postgres(self, debug):
        """An extension of the server, in a Debian package."""
        from servers import debian_package, postgres_folder
        self.place = self.folder
        folder = postgres_folder()
        control = folder.replace("/lib/", "/share/").replace("/bin", "") + "/extension"
        control = Path(control) / f"{self.settings['extension']}.control"
        if not control.exists():
            debian_package(f"postgresql-{folder.split('/')[4]}-{self.settings['debian']}")
        for line in control.read_text().splitlines():
            if line.startswith("default_version"):
                self.versions = self.settings["extension"] + " " + line.split("'")[1]

    def argv(self, command):
        """A command of peer.toml: {folder} is that of the peer, {built} has its built programs."""
        names = {"built": getattr(self, "built", ""), "folder": self.folder,
                 "python": self.place / "venv" / "bin" / "python",
                 "node": self.place / NODE}
        return [word.format(**names) for word in command]

    def configuration(self, kind):
        return self.settings[kind]["configuration"].strip()
