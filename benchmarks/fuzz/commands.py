"""Bad input through real processes: `splitc ...` with bad files and arguments, and `launch.py` of torn builds.

A process ends by itself, with an exit code that says whether the input was wrong, without a traceback, and writes
nothing outside of its folder, which an audit hook in each of them sees.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz import models
from benchmarks.fuzz.junk import MARK, json_texts, shell_words, torn
from benchmarks.fuzz.oracle import Judge

SECONDS, TICK = 120, 0.1  # of processor time, and of waiting in a process that is not stopped
_HOOK = f"""import os, sys
ROOT, SAYS = os.environ["FUZZ_ROOT"], os.open(os.environ["FUZZ_LOG"], os.O_WRONLY | os.O_APPEND)
CHANGES = {{"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event in ("os.system", "subprocess.Popen", "os.exec") and {MARK!r} in repr(arguments):
        os.write(SAYS, f"a text was run: {{arguments!r:.80}}\\n".encode())
    elif event in CHANGES or (event == "open" and type(arguments[2]) is int and arguments[2] & WRITES):
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.path.abspath(os.fsdecode(path))
            if not path.startswith((ROOT, "/dev/", "/proc/")):
                os.write(SAYS, f"{{event}} outside of the folder: {{path}}\\n".encode())

sys.addaudithook(watch)
"""
_USUAL = ["--world", "2", "--cluster", "v100-10gbe", "-q"]
_TRAIN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_ARGUMENTS = (
    *("--steps", "--epochs", "--data", "--eval-data", "--eval-every", "--seed", "--backend", "--device", "--save"),
    *("--save-every", "--checkpoints", "--check-finite", "--check-replicas", "--resume", "--tensorboard", "--measure"),
)
_OF_RUN = ("--restarts", "--hosts", "--min-world", "--trace", "--correct")
_OF_JOB = ("--image", "--ranks-per-host", "--cpus", "--gpus", "--restarts")
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SPLITC_TIMEOUT", "SPLITC_TOKEN"),
    *("SPLITC_COMMAND", "SPLITC_MIN_WORLD", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS", "SPLITC_CACHE"),
)


@dataclass(frozen=True)
class Command:
    """argv: of `splitc`, or "launch.py" and its own.  files: in place of valid ones; None: it is missing."""

    argv: tuple[str, ...]
    files: tuple[tuple[str, bytes | None], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Commands:
    """Run commands in copies of a folder with a model file, a cluster, builds of one and two ranks, and checkpoints."""

    folder: Path
    judge: Judge

    @cached_property
    def valid(self) -> Path:
        """The folder that is copied."""
        made = self.folder / "valid"
        made.mkdir()
        (made / "net.py").write_text(models.model_text({}))
        self.watch()
        code, text = self.run(made, ["-m", "splitc.cli", "clusters", "v100-10gbe"])
        (made / "cluster.toml").write_text(text)
        usual = ["compile", "net.py", "--cluster", "cluster.toml", "-q"]
        train = ["run", "two", "--steps", "2", "--checkpoints", "kept"]
        for argv in ([*usual, "--world", "1"], [*usual, "--world", "2", "-o", "two"], train):
            code, text = self.run(made, ["-m", "splitc.cli", *argv])
            assert code == 0, text
        return made

    def watch(self) -> None:
        """Make the hook that all processes load."""
        for name in ("home", "hook"):
            (self.folder / name).mkdir()
        (self.folder / "hook" / "sitecustomize.py").write_text(_HOOK)
        (self.folder / "log").touch()

    def inputs(self, pairs: st.SearchStrategy[list[str]]) -> st.SearchStrategy[Command]:
        """Commands with something wrong.  pairs: of an option of `splitc` and its value."""
        contents = {path: (self.valid / path).read_bytes() for path in _paths(self.valid)}
        build = [path for path in contents if path.startswith("build/") and not path.endswith("launch.py")]

        @st.composite
        def files(draw: Any, paths: list[str]) -> tuple[tuple[str, bytes | None], ...]:
            path = draw(st.sampled_from(paths))
            made = torn([contents[path]])
            if path.endswith(".py"):  # code that one edits is run; one that ends early is none
                size = len(contents[path])
                made = st.integers(0, size).map(lambda end: contents[path][:end]) if size else st.just(b"")
            return ((path, draw(st.none() | made)),)

        model = st.just(()) | models.model_files().map(lambda text: (("net.py", text.encode()),))
        few = st.lists(pairs | shell_words.map(lambda word: [word]), max_size=3).map(lambda parts: tuple(chain(*parts)))
        own = st.lists(
            st.tuples(st.sampled_from(_ARGUMENTS + _OF_RUN), shell_words | st.sampled_from(("1", "2", "net:x")))
            .map(list) | shell_words.map(lambda word: [word]), max_size=3,
        ).map(lambda parts: tuple(chain(*parts)))  # fmt: skip
        verbs = st.sampled_from(("inspect", "compile", "verify", "explain", "simulate"))
        planned = st.tuples(verbs, few, model).map(
            lambda each: Command((each[0], "net.py", *_USUAL, *each[1], *_short(each[0])), each[2])
        )
        training = st.tuples(st.sampled_from(("try", "tune")), st.just(()) | few, model).map(
            lambda each: Command((each[0], "net.py", *_USUAL, *each[1], *_short(each[0])), each[2])
        )
        plans = json_texts([json.loads(contents["build/plan.json"])]).map(lambda text: (("build/plan.json", text),))
        by_plan = st.tuples(st.sampled_from(("inspect", "compile", "verify")), plans).map(
            lambda each: Command((each[0], "net.py", "--plan", "build", "-q"), each[1])
        )
        clusters = files(["cluster.toml"]).map(
            lambda given: Command(("inspect", "net.py", "--world", "2", "--cluster", "cluster.toml", "-q"), given)
        )
        diffs = (plans | files(build)).map(lambda given: Command(("diff", "build", "build/plan.json"), given))
        alone = st.tuples(st.sampled_from(("calibrate", "clusters", "example", "doctor", "")), few).map(
            lambda each: Command((each[0], *each[1], "--budget", "junk")[: 9 if each[0] in _MEASURING else -2])
        )
        runs = st.tuples(own, st.just(()) | files(build)).map(
            lambda each: Command(("run", "build", "--steps", "1", *each[0]), each[1])
        )
        two, kept = ([path for path in contents if path.startswith(folder)] for folder in ("two/", "kept/"))
        resumed = st.tuples(st.sampled_from(("--resume", "--restarts=1")), own, st.just(()) | files(kept + two)).map(
            lambda each: Command(("run", "two", "--steps=3", "--checkpoints", "kept", each[0], *each[1]), each[2])
        )
        values = st.sampled_from(("1", "2", "3", "me/net:1")) | shell_words
        options = st.lists(st.tuples(st.sampled_from(_OF_JOB), values), max_size=2).map(
            lambda each: tuple(chain(*each))
        )
        jobs = st.tuples(st.sampled_from(("--sbatch", "--jobset")), options, own, st.just(()) | files(two)).map(
            lambda each: Command(("job", each[0], "job", *each[1], "two", *each[2]), each[3])
        )
        which = st.sampled_from(("kept", "kept/step-000002", "two")) | shell_words
        target = st.sampled_from(("model.pt", "net.py", "two")) | shell_words
        exports = st.tuples(
            which, st.sampled_from(("--torch", "--safetensors")), target, st.just(()) | files(kept)
        ).map(lambda each: Command(("export", *each[:3]), each[3]))
        variables = st.dictionaries(st.sampled_from(_VARIABLES), shell_words, max_size=2).map(
            lambda given: tuple(given.items())
        )
        launches = st.tuples(own, st.just(()) | files(build), variables).map(
            lambda each: Command(("launch.py", "--steps", "1", *each[0]), each[1], each[2])
        )
        trained = st.one_of(training, resumed, jobs, exports, runs)
        return st.one_of(planned, by_plan, clusters, diffs, alone, launches, launches, trained, trained, trained)

    def __call__(self, given: Command) -> None:
        """Run one in a fresh copy, and judge how it ended."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.valid, work)
        for path, data in given.files:
            (work / path).unlink()
            if data is not None:
                (work / path).write_bytes(data)
        (self.folder / "log").write_text("")
        is_launch = given.argv[0] == "launch.py"
        argv = ["build/launch.py", *given.argv[1:]] if is_launch else ["-m", "splitc.cli", *given.argv]
        variables = {**_TRAIN, "MASTER_PORT": str(_free_port()), **dict(given.variables)} if is_launch else {}
        code, text = self.run(work, argv, variables)
        wrong = (self.folder / "log").read_text().splitlines()
        wrong += [f"exit code {code}: {_last(text)}"] * (code not in _CODES.get(given.argv[0], (0, 2)))
        wrong += [f"traceback: {_last(text)}"] * ("Traceback (most recent" in text)
        wrong += [f"a bug: {_last(text)}"] * ("is a bug of splitc" in text)
        wrong += [f"few words: {text!r}"] * (code != 0 and len(text.split()) < 4)
        print(f"{code} {given.argv} {_last(text)}", *wrong, sep="\n  ", file=sys.stderr, flush=True)
        self.judge.note(f"command {given.argv[0]}", given, "works" if code == 0 else "refused", wrong)

    def run(self, work: Path, argv: list[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
        """The exit code of Python with such arguments, and what it said; None for one that hangs."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        own = {"HOME": self.folder / "home", "XDG_CACHE_HOME": self.folder / "home", "TMPDIR": self.folder / "home"}
        watched = {"FUZZ_ROOT": self.folder, "FUZZ_LOG": self.folder / "log"}
        path = {"PYTHONPATH": f"{self.folder / 'hook'}:{Path(__file__).parents[2]}", "PYTHONDONTWRITEBYTECODE": "1"}
        env = {name: str(value) for name, value in {**kept, **own, **watched, **path, **(variables or {})}.items()}
        env |= {"SPLITC_ADVICE": "0", "SPLITC_TIMEOUT": env.get("SPLITC_TIMEOUT", "20")}
        said = self.folder / "said"
        with said.open("wb") as out, contextlib.suppress(ValueError):
            process = subprocess.Popen(
                [sys.executable, *argv], cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=_limited,
            )  # fmt: skip
            for _ in range(round(3 * SECONDS / TICK)):  # ticks, since all may be stopped for a while
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(TICK)
                    return code, said.read_text(errors="replace")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -signal.SIGKILL, f"hangs: {said.read_text(errors='replace')}"
        return 2, "an argument that no process can have"


_CODES = {"diff": (0, 1, 2), "run": (0, 2, 3), "launch.py": (0, 2, 3), "verify": (0, 1, 2)}  # 1 of others: a bug
_MEASURING = ("calibrate", "doctor")


def _short(command: str) -> tuple[str, ...]:
    return {"tune": ("--budget", "1", "--finalists", "2"), "verify": ("--steps", "1")}.get(command, ())


def _paths(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _last(text: str) -> str:
    """The last line that says something."""
    return next((line.strip()[:120] for line in reversed(text.splitlines()) if line.strip()), "")


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
