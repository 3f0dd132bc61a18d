# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the parts of a preparation as cluster tasks, with datatrove's executors for SLURM and Ray.

Only its executors are used. Each task prepares one part, independently of the others.
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
from energon_ext.prepare.pool import end_with_parent
from energon_ext.state.files import write_file
from energon_ext.storage.claim import Part

#: Settings that the executors accept themselves: strings and integers.
SLURM_TEXTS = ("partition", "time", "qos", "job_name", "env_command", "condaenv", "venv_path")
SLURM_INTEGERS = ("cpus_per_task", "mem_per_cpu_gb", "workers", "max_array_size")
RAY_INTEGERS = ("cpus_per_task", "mem_per_cpu_gb", "workers", "time")
_RUN = "srun -l -n 1 launch_pickled_pipeline"  # as datatrove runs it

PreparePart = Callable[[Part, int], None]


@dataclass(frozen=True)
class PartStep:
    """The only step of the datatrove pipeline: prepares the part of a task."""

    prepare: PreparePart  # pickled
    processes: int  # per part
    folder: str  # working directory of the command, since paths may be relative
    failures: Path  # folder with one file per failed task

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        os.chdir(self.folder)
        try:
            self._prepare(Part(rank, world_size))
        except (EnergonExtError, OSError) as error:
            line = " ".join(str(error).split())
            self.failures.mkdir(parents=True, exist_ok=True)
            write_file(self.failures / f"{rank:05d}.txt", f"{line}\n".encode())
            if "SLURM_ARRAY_TASK_ID" not in os.environ:
                raise
            click.echo(f"Error: {line}", err=True)  # exit like the command
            raise SystemExit(2) from error

    def _prepare(self, part: Part) -> None:
        # In a separate process: if Ray's own process is killed, Ray waits forever for its result.
        fork = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(1, fork, end_with_parent) as process:
                process.submit(self.prepare, part, self.processes).result()
        except BrokenProcessPool as error:
            reason = "was killed, perhaps out of memory; finished units are kept"
            raise WorkerError(f"Part {part} {reason}. Run the same command again.") from error


def settings_of(given: Sequence[str], option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` settings.

    Example:
        >>> settings_of(["partition=cpu", "time=2:00:00"], "--slurm")
        {'partition': 'cpu', 'time': '2:00:00'}
    """
    for setting in given:
        if setting.find("=") < 1:
            raise ConfigError(f"{option} {setting!r:.80}: NAME=VALUE is needed.")
    return dict(setting.split("=", 1) for setting in given)


def run_on_slurm(
    prepare: PreparePart,
    tasks: int,
    settings: Mapping[str, str],
    logs: Path,
    *,
    render: bool,
    after: str | None = None,
) -> str | None:
    """Submit a job array with one task per part, and return its job id.

    Args:
        settings: settings of the executor; any others become options of ``sbatch``.
        render: print the script instead of submitting it.
        after: id of a job that must have ended, whether its tasks failed or not.
    """
    for name in ("partition", "time"):
        if name not in settings:
            raise ConfigError(f"--executor slurm: --slurm {name}=... is missing.")
    texts = {name: settings[name] for name in SLURM_TEXTS if name in settings}
    accepted = texts | _integers(settings, SLURM_INTEGERS, "--slurm")
    logs = _new_log_folder(logs)
    # Tasks start in a new shell, in which the environment of this command may not be active.
    environment = f"export PATH={Path(sys.executable).parent}:$PATH"
    executor = _executor("slurm")(
        pipeline=[_step(prepare, accepted, logs)],
        tasks=tasks,
        logging_dir=str(logs),
        depends_job_id=after,
        run_on_dependency_fail=True,
        **{"qos": None, "job_name": "energon-ext-prepare", "env_command": environment, **accepted},
        sbatch_args={name: value for name, value in settings.items() if name not in accepted},
    )
    if render:
        most = min(tasks, executor.max_array_size if executor.max_array_size > 0 else tasks)
        script = f"{_RUN} {logs / 'executor.pik'}"
        echo(executor.get_launch_file_contents(executor.get_sbatch_args(most), script))
        return None
    try:
        executor.run()
    except FileNotFoundError as error:
        advice = f"{error.filename} was not found; --render only prints the script"
        raise ConfigError(f"--executor slurm: {advice}.") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"--executor slurm: {error.cmd[0]} failed, see above.") from error
    echo(f"Submitted {tasks} tasks as SLURM job {executor.job_id}; logs in {logs}.")
    return str(executor.job_id)


def run_on_ray(prepare: PreparePart, tasks: int, settings: Mapping[str, str], logs: Path) -> None:
    """Run tasks on the Ray cluster at ``RAY_ADDRESS``, or locally, and wait for them."""
    if unknown := sorted({*settings} - {*RAY_INTEGERS}):
        raise ConfigError(f"--ray {unknown[0]}: unknown; use one of {', '.join(RAY_INTEGERS)}.")
    accepted = _integers(settings, RAY_INTEGERS, "--ray")
    kind, ray, logs = _executor("ray"), _module("ray", "ray"), _new_log_folder(logs)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the logs contain the output of tasks
    pipeline = [_step(prepare, accepted, logs)]
    executor = kind(pipeline=pipeline, tasks=tasks, logging_dir=str(logs), **accepted)
    executor.run()
    failures = sorted((logs / "failures").glob("*.txt"))
    if failures:
        more = f" ({len(failures) - 1} more tasks failed)" if failures[1:] else ""
        raise ConfigError(failures[0].read_text(encoding="utf-8").strip() + more)
    if missing := executor.get_incomplete_ranks(skip_completed=True):
        raise WorkerError(
            f"{len(missing)} of {tasks} tasks did not finish; see {logs}. "
            f"Run the same command again."
        )


def _step(prepare: PreparePart, settings: Mapping[str, Any], logs: Path) -> PartStep:
    return PartStep(prepare, settings.get("cpus_per_task", 1), os.getcwd(), logs / "failures")


def _new_log_folder(logs: Path) -> Path:
    """Return a new folder per run, since datatrove records finished tasks in its log folder."""
    return logs.absolute() / time.strftime("%Y%m%d-%H%M%S")


def _integers(settings: Mapping[str, str], names: Sequence[str], option: str) -> dict[str, Any]:
    """Return the settings with these names, as integers."""
    integers = {}
    for name in [name for name in names if name in settings]:
        try:
            integers[name] = int(settings[name])
        except ValueError as error:
            message = f"{settings[name]!r:.80} found, an integer is needed"
            raise ConfigError(f"{option} {name}: {message}.") from error
    return integers


def _executor(name: str) -> Any:
    module = _module(f"datatrove.executor.{name}", name)
    # Datatrove logs every step; warnings are enough.
    _module("loguru", name).logger.configure(handlers=[{"sink": sys.stderr, "level": "WARNING"}])
    return getattr(module, f"{name.title()}PipelineExecutor")


def _module(module: str, executor: str) -> Any:
    package = module.partition(".")[0]
    install = "datatrove[ray]" if package == "ray" else "energon_ext[prepare]"
    return optional_module(module, f"--executor {executor}", package, install)
