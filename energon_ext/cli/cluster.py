# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a preparation as tasks of a cluster, by datatrove's executors for SLURM and Ray.

Only its executors are used. A task makes one part, and takes nothing from the task before it.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import click

from energon_ext.arguments import optional_module
from energon_ext.cli import echo
from energon_ext.errors import ConfigError, EnergonExtError, WorkerError
from energon_ext.prepare.claim import Part
from energon_ext.prepare.pool import end_with_parent

#: What the executors take themselves: texts, and integers.
SLURM_TEXTS = ("partition", "time", "qos", "job_name", "env_command", "condaenv", "venv_path")
SLURM_INTEGERS = ("cpus_per_task", "mem_per_cpu_gb", "workers", "max_array_size")
RAY_INTEGERS = ("cpus_per_task", "mem_per_cpu_gb", "workers", "time")
_RUN = "srun -l -n 1 launch_pickled_pipeline"  # as datatrove runs it

MakePart = Callable[[Part, int], None]


@dataclass(frozen=True)
class PartStep:
    """The one step of a datatrove pipeline: makes the part of a task."""

    make: MakePart  # is pickled
    processes: int  # of a part
    folder: str  # in which the command was given, since paths may be relative
    failures: Path  # a folder for the errors of tasks, a file for each

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        os.chdir(self.folder)
        try:
            self._make(Part(rank, world_size))
        except (EnergonExtError, OSError) as error:
            line = " ".join(str(error).split())
            self.failures.mkdir(parents=True, exist_ok=True)
            (self.failures / f"{rank:05d}.txt").write_text(line + "\n", encoding="utf-8")
            if "SLURM_ARRAY_TASK_ID" not in os.environ:
                raise
            click.echo(f"Error: {line}", err=True)  # the task ends as the command does
            raise SystemExit(2) from error

    def _make(self, part: Part) -> None:
        # In a process of its own: Ray's would wait for ever for the result of a killed one.
        fork = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(1, fork, end_with_parent) as process:
                process.submit(self.make, part, self.processes).result()
        except BrokenProcessPool as error:
            said = "was killed, perhaps for want of memory; what is finished is kept"
            raise WorkerError(f"Part {part} {said}. Run the same command again.") from error


def settings_of(given: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` by name.

    Example:
        >>> settings_of(["partition=cpu", "time=2:00:00"], "--slurm")
        {'partition': 'cpu', 'time': '2:00:00'}
    """
    for each in given:
        if not each.partition("=")[0] or "=" not in each:
            raise ConfigError(f"{option} {each!r:.80}: NAME=VALUE is needed.")
    return dict(each.split("=", 1) for each in given)


def run_on_slurm(
    make: MakePart, tasks: int, settings: Mapping[str, str], logs: Path, *, render: bool
) -> None:
    """Submit an array of tasks.

    Args:
        settings: of the executor; those that it does not take are options of ``sbatch``.
        render: print the script, and run nothing.
    """
    for name in ("partition", "time"):
        if name not in settings:
            raise ConfigError(f"--executor slurm: --slurm {name}=... is missing.")
    texts = {name: settings[name] for name in SLURM_TEXTS if name in settings}
    own = texts | _integers(settings, SLURM_INTEGERS, "--slurm")
    logs = _logs_of_now(logs)
    # Tasks begin in a shell of their own, where the environment of this command may not be active.
    environment = f"export PATH={Path(sys.executable).parent}:$PATH"
    executor = _executor("slurm")(
        pipeline=[_step(make, own, logs)],
        tasks=tasks,
        logging_dir=str(logs),
        **{"qos": None, "job_name": "energon-ext-prepare", "env_command": environment, **own},
        sbatch_args={name: value for name, value in settings.items() if name not in own},
    )
    if render:
        most = min(tasks, executor.max_array_size if executor.max_array_size > 0 else tasks)
        script = f"{_RUN} {logs / 'executor.pik'}"
        echo(executor.get_launch_file_contents(executor.get_sbatch_args(most), script))
        return
    try:
        executor.run()
    except FileNotFoundError as error:
        said = f"no {error.filename} here; --render prints"
        raise ConfigError(f"--executor slurm: {said}.") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"--executor slurm: {error.cmd[0]} failed, see above.") from error
    echo(f"Submitted {tasks} tasks as SLURM job {executor.job_id}; logs in {logs}.")


def run_on_ray(make: MakePart, tasks: int, settings: Mapping[str, str], logs: Path) -> None:
    """Run tasks on the Ray cluster that ``RAY_ADDRESS`` names, else here, and wait for them."""
    if unknown := sorted({*settings} - {*RAY_INTEGERS}):
        raise ConfigError(f"--ray {unknown[0]}: give one of {', '.join(RAY_INTEGERS)}.")
    own = _integers(settings, RAY_INTEGERS, "--ray")
    kind, ray, logs = _executor("ray"), _module("ray", "ray"), _logs_of_now(logs)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # what tasks print is in the logs
    executor = kind(pipeline=[_step(make, own, logs)], tasks=tasks, logging_dir=str(logs), **own)
    executor.run()
    failures = sorted((logs / "failures").glob("*.txt"))
    if failures:
        more = f" ({len(failures) - 1} more tasks failed)" if failures[1:] else ""
        raise ConfigError(failures[0].read_text(encoding="utf-8").strip() + more)
    if missing := executor.get_incomplete_ranks(skip_completed=True):
        raise WorkerError(
            f"{len(missing)} of {tasks} tasks did not end; see {logs}. Run the same command again."
        )
    make(Part(0, tasks), 1)  # has nothing left to do, and says what was made


def _step(make: MakePart, own: Mapping[str, Any], logs: Path) -> PartStep:
    return PartStep(make, own.get("cpus_per_task", 1), os.getcwd(), logs / "failures")


def _logs_of_now(logs: Path) -> Path:
    """A folder for each run: datatrove keeps there which of its tasks have ended."""
    return logs.absolute() / time.strftime("%Y%m%d-%H%M%S")


def _integers(settings: Mapping[str, str], names: Sequence[str], option: str) -> dict[str, Any]:
    """Those of the settings that are integers."""
    found = {}
    for name in filter(settings.__contains__, names):
        try:
            found[name] = int(settings[name])
        except ValueError as error:
            raise ConfigError(f"{option} {name}: {settings[name]!r:.80} is not int.") from error
    return found


def _executor(name: str) -> Any:
    module = _module(f"datatrove.executor.{name}", name)
    # It logs each step of its own; what goes wrong is enough.
    _module("loguru", name).logger.configure(handlers=[{"sink": sys.stderr, "level": "WARNING"}])
    return getattr(module, f"{name.title()}PipelineExecutor")


def _module(module: str, executor: str) -> Any:
    package = module.partition(".")[0]
    install = "datatrove[ray]" if package == "ray" else "energon_ext[prepare]"
    return optional_module(module, f"--executor {executor}", package, install)
