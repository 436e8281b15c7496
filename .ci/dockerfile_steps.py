"""Runs the steps of the Dockerfile without a Docker engine.

    python .ci/dockerfile_steps.py [--list] [--stage NAME] [--target DIR]

The file itself is parsed, so the two cannot drift. Each stage gets an empty directory, in which the
paths of the image stand, and a virtual environment of its own in place of the image's Python.
Commands that change the operating system (packages, users) are named and left out; what they
bring has to be there. At the end the entry point is started, serves the starter model on a free
port, and passes the file's own health check; then it has to stop within its time.
"""

import argparse
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER",
    "VOLUME", "WORKDIR",
}  # fmt: skip
SYSTEM = {"apt-get": "gcc", "useradd": "", "install": "", "rm": ""}
"""Commands that need the image's operating system, and the program that has to be there instead."""
START_SECONDS, STOP_SECONDS = 600, 60


@dataclass
class Stage:
    """One FROM and what follows it, as (instruction, arguments)."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> list[Stage]:
    """The stages of a Dockerfile. Raises ValueError for what this script does not know."""
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, _, rest = line.strip().partition(" ")
        if instruction not in KNOWN:
            raise ValueError(f"unknown instruction {instruction}")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name.strip() or str(len(stages)), base.strip()))
        else:
            stages[-1].steps.append((instruction, " ".join(rest.split())))
    return stages


def image_paths(stages: list[Stage]) -> list[str]:
    """Absolute folders that the steps name: working directories, mounts, volumes, wheels."""
    found = set()
    for stage in stages:
        for instruction, rest in stage.steps:
            if instruction in ("WORKDIR", "VOLUME"):
                found.add(rest)
            found |= set(re.findall(r"(?:target=|--wheel-dir )(/\w+)", rest))
    return sorted(found, key=len, reverse=True)


@dataclass
class Runner:
    """Carries out stages below `target`."""

    target: Path
    paths: list[str]

    def run(self, stage: Stage) -> None:
        """Makes the environment of a stage and runs its steps in order."""
        home = self.target / f"python-{stage.name}"
        venv.create(home, with_pip=True, clear=True)
        variables = {"PATH": f"{home / 'bin'}:$PATH", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        directory = self.target
        for instruction, rest in stage.steps:
            if instruction == "WORKDIR":
                directory = Path(self.inside(rest))
                directory.mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self.copy_context(directory, rest)
            elif instruction in ("ENV", "ARG"):
                for assignment in shlex.split(rest):
                    name, _, value = assignment.partition("=")
                    variables.setdefault(name, self.inside(value))
            elif instruction == "RUN":
                for command in commands(rest):
                    self.shell(self.inside(command), directory, variables)
            elif instruction == "ENTRYPOINT":
                check = dict(stage.steps)["HEALTHCHECK"]
                command = json.loads(check[check.index("CMD ") + 4 :])
                serve_and_check(json.loads(rest), command, directory, variables)

    def inside(self, text: str) -> str:
        """`text` with the image's folders below the target."""
        for path in self.paths:
            text = re.sub(
                rf"(?<![\w/.]){re.escape(path)}(?=[/\s\"']|$)", f"{self.target}{path}", text
            )
        return text

    def copy_context(self, directory: Path, rest: str) -> None:
        """COPY . . of what git tracks: a clean checkout."""
        if rest != ". .":
            raise ValueError(f"COPY {rest}: only the whole context is known")
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.split("\0"):
            if name and (ROOT / name).exists():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)

    def shell(self, command: str, directory: Path, variables: dict[str, str]) -> None:
        """Runs one command, or says why not; ends the script where it fails."""
        program = shlex.split(command)[0]
        if program in SYSTEM:
            say(f"-- left out: {command}")
            needed = SYSTEM[program]
            if needed and shutil.which(needed) is None:
                raise SystemExit(f"{needed} is missing, which the left out step would bring")
            return
        say(f"-- {command}")
        exports = "".join(f'export {name}="{value}"; ' for name, value in variables.items())
        subprocess.run(["bash", "-euc", exports + command], cwd=directory, check=True)


def serve_and_check(
    entry: list[str], check: list[str], directory: Path, variables: dict[str, str]
) -> None:
    """Starts the entry point and runs the health check until it passes; ends the script if not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As a container sees it, but for the port, which may be taken on this machine.
    variables = {**variables, "OCTAVO_PORT": str(port), "OCTAVO_HOST": "127.0.0.1"}
    exports = "".join(f'export {name}="{value}"; ' for name, value in variables.items())
    say(f"-- {shlex.join(entry)} on port {port}")
    server = subprocess.Popen(
        ["bash", "-euc", exports + "exec " + shlex.join(entry)], cwd=directory
    )
    deadline = time.monotonic() + START_SECONDS
    try:
        while subprocess.run(
            ["bash", "-euc", exports + shlex.join(check)],
            cwd=directory,
            stderr=subprocess.DEVNULL,
        ).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the entry point does not become healthy")
            time.sleep(1)
        say(f"-- healthy: {shlex.join(check)}")
    finally:
        server.terminate()
        stopped = server.wait(STOP_SECONDS)
    if stopped:
        raise SystemExit(f"the entry point stopped with {stopped}")


def commands(rest: str) -> Iterator[str]:
    """The commands of a RUN, without its mounts: what is bound stands where it was built."""
    rest = re.sub(r"--mount=\S+ ", "", rest)
    yield from (part.strip() for part in rest.split("&&"))


def say(line: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Lists or runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only show the steps")
    parser.add_argument("--stage", help="only this stage")
    parser.add_argument("--target", type=Path, help="where to work; a new temporary folder")
    options = parser.parse_args()
    stages = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    chosen = [stage for stage in stages if options.stage in (None, stage.name)]
    if options.list:
        for stage in chosen:
            say(f"{stage.name} ({stage.base})")
            for instruction, rest in stage.steps:
                say(f"  {instruction} {rest}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        runner = Runner((options.target or Path(temporary)).resolve(), image_paths(stages))
        runner.target.mkdir(parents=True, exist_ok=True)
        for stage in chosen:
            say(f"== {stage.name}")
            runner.run(stage)


if __name__ == "__main__":
    main()
