# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts of an output, prepared by processes that share a folder: manually, by SLURM or Ray."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from energon_ext.cli.cluster import PartStep
from energon_ext.errors import ConfigError, WorkerError
from energon_ext.prepare import inputs
from energon_ext.prepare.accounts import check_files
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.units import run_part
from energon_ext.storage import claim as claims
from energon_ext.storage.claim import ClaimedError, Part, claim
from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import bytes_job, files, memory_unit, read, run, unfinished, wait_for
from tests.prepare.test_units import TEXTS, start_slowly, units_of, write_lines


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A file of about twenty units."""
    monkeypatch.setattr(inputs, "UNIT_BYTES", 4500)
    return write_lines(tmp_path / "a.jsonl", TEXTS)


def call_of(lines, output, *more):
    return ("prepare", output, "--jsonl", lines, "--tokenizer", "bytes", "--jobs", 1, *more)


def contents(output):
    return {file: (output / file).read_bytes() for file in files(output)}


def part_of(units, output, number, count, **options):
    return run_part(bytes_job(**options), units, output, Part(number, count))


# Manually -----------------------------------------------------------------------------------------


def test_any_number_of_parts_in_any_order_equals_one_process(tmp_path, lines):
    assert energon_ext(*call_of(lines, tmp_path / "whole")).exit_code == 0
    expected = contents(tmp_path / "whole")
    units = json.loads(expected["prepared.json"])["units"]
    assert 15 < len(units) < 40
    texts = read(tmp_path / "whole", "train"), read(tmp_path / "whole", "val")
    assert sorted(texts[0] + texts[1]) == sorted(TEXTS)
    for count in (1, 7, 20):
        output = tmp_path / str(count)
        for number in (number * 3 % count for number in range(count)):
            assert not output.exists()
            result = energon_ext(*call_of(lines, output, "--part", f"{number}/{count}"))
            assert result.exit_code == 0, result.stderr
        assert contents(output) == expected
        assert texts == (read(output, "train"), read(output, "val"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "20", "7", "a.jsonl", "whole"]


def test_a_part_prepares_its_own_units_and_lists_missing_parts(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    prepared, _ = part_of(units, output, 1, 2)
    assert prepared is None and not output.exists()
    assert [each["name"] for each in unfinished(output)] == ["part-00001", "part-00003"]
    prepared, _ = part_of(units, output, 0, 2)
    assert prepared["documents"] == {"train": len(TEXTS)} and check_files(output) == 20


def test_parts_without_a_unit_do_nothing(tmp_path):
    units, output = units_of(TEXTS, 2), tmp_path / "out"
    assert part_of(units, output, 2, 3) == (None, [])
    assert files(tmp_path) == []
    part_of(units, output, 0, 3)
    part_of(units, output, 1, 3)
    before = contents(output)
    assert part_of(units, output, 2, 3)[0] is not None
    assert contents(output) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_part_of_a_finished_output_restores_missing_files(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    run(units, output)
    expected = contents(output)
    (output / "train/part-00003.bin").unlink()
    for number in (0, 1):
        prepared, remarks = part_of(units, output, number, 2)
    assert prepared is not None and remarks == [
        "part-00003: train/part-00003.bin is missing, prepared again"
    ]
    assert contents(output) == expected and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_whole_runs_and_parts_continue_each_other(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    part_of(units, output, 1, 2)
    work = tmp_path / ".out.unfinished"
    prepared = {name: (work / name).stat().st_ino for name in files(work) if "accounts" not in name}
    run(units, output)
    assert prepared.items() <= {n: (output / n).stat().st_ino for n in prepared}.items()
    assert open_token_files(output / "train").num_tokens > 0


def test_parts_with_changed_options_are_refused_and_changed_inputs_redone(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    part_of(units, output, 0, 2, seed=0)
    with pytest.raises(ConfigError, match="started with seed 0, now 1"):
        part_of(units, output, 1, 2, seed=1)
    part_of(units, output, 1, 2, seed=0)
    other = [*units[:3], memory_unit(["another text"], "another"), units[4]]
    assert (
        "part-00003: memory3 has changed, prepared again" in part_of(other, output, 1, 2, seed=0)[1]
    )
    assert read(output, "train") == [*TEXTS[:420], "another text", *TEXTS[560:]]


def test_a_damaged_manifest_of_a_part_is_ignored(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    part_of(units, output, 0, 2)
    account = tmp_path / ".out.unfinished/accounts/part-00002.json"
    account.write_bytes(account.read_bytes()[:100])
    assert part_of(units, output, 1, 2)[0] is None
    assert part_of(units, output, 0, 2)[0]["documents"] == {"train": len(TEXTS)}


def test_a_bad_line_fails_only_its_part_with_file_and_line(tmp_path, lines):
    content = lines.read_bytes().splitlines(keepends=True)
    content[150] = b"\xff" * (len(content[150]) - 1) + b"\n"
    lines.write_bytes(b"".join(content))
    output = tmp_path / "out"
    results = [energon_ext(*call_of(lines, output, "--part", f"{number}/3")) for number in range(3)]
    failed = [result for result in results if result.exit_code]
    assert len(failed) == 1 and "a.jsonl:151: not JSON" in error_line(failed[0])
    assert len(unfinished(output)) > 10 and not output.exists()
    counts = []
    for number in range(3):
        skipped = call_of(lines, tmp_path / "skipped", "--on-error", "skip")
        counts.append(energon_ext(*skipped, "--part", f"{number}/3").stdout)
    assert "skipped as unreadable: 1" in counts[-1] and "a.jsonl:151" in counts[-1]


@pytest.mark.parametrize("part", ["3/3", "-1/3", "1", "1/0", "x/y", "1/2/3"])
def test_an_invalid_part_is_refused(part, tmp_path):
    result = energon_ext("prepare", tmp_path / "out", f"--part={part}")
    assert result.exit_code == 2 and "R/N with 0 <= R < N is needed" in result.stderr


def test_parts_cannot_be_combined_with_force(tmp_path, lines):
    line = error_line(energon_ext(*call_of(lines, tmp_path / "out", "--part", "0/2", "--force")))
    assert "--force: cannot be combined with parts" in line


# Concurrent processes -----------------------------------------------------------------------------


def test_the_same_command_continues_a_killed_part_and_cleans_up(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    call = call_of(lines, tmp_path / "out", "--part")
    process = start_slowly(tmp_path, *call, "0/2")
    wait_for(lambda: len(unfinished(tmp_path / "out")) >= 2)
    wait_for(lambda: is_stopped_inside_a_unit(process.pid, tmp_path))
    process.kill()
    process.join()
    kept = {each["name"] for each in unfinished(tmp_path / "out")}
    for part in ("1/2", "0/2"):
        again = start_slowly(tmp_path, *call, part)
        again.join(120)
        assert again.exitcode == 0
        assert (tmp_path / "out").exists() == (part == "0/2")
    assert 2 <= len(kept) < 20
    assert sorted(read(tmp_path / "out", "train") + read(tmp_path / "out", "val")) == sorted(TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "pids"]


def is_stopped_inside_a_unit(process, tmp_path):
    os.kill(process, signal.SIGSTOP)
    if [*tmp_path.glob(".out.unfinished/.staging-*/*/*")]:
        return True
    os.kill(process, signal.SIGCONT)
    return False


def test_concurrent_parts_publish_once(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS[:200])
    call = call_of(lines, tmp_path / "out", "--part")
    parts = [start_slowly(tmp_path, *call, f"{number}/3") for number in range(3)]
    for part in parts:
        part.join(120)
    assert [part.exitcode for part in parts] == [0, 0, 0]
    texts = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    assert sorted(texts) == sorted(TEXTS[:200])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "pids"]


def test_only_one_division_into_parts_at_a_time(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    with claim(Part(1, 2).claimed_path(output)):
        with pytest.raises(ClaimedError, match=f"by process {os.getpid()} "):
            run(units, output)
        with pytest.raises(ClaimedError, match=f"by process {os.getpid()} "):
            part_of(units, output, 0, 3)
        assert part_of(units, output, 0, 2)[0] is None
    with claim(output), pytest.raises(ClaimedError):
        part_of(units, output, 1, 2)
    part_of(units, output, 1, 2)
    assert sorted(read(output, "train")) == sorted(TEXTS)


def test_the_last_part_leaves_publishing_to_running_parts(tmp_path):
    units, output = units_of(TEXTS, 4), tmp_path / "out"
    part_of(units, output, 0, 2)
    with claim(Part(0, 2).claimed_path(output)):  # as if the other part ended at the same time
        assert part_of(units, output, 1, 2)[0] is None
    assert part_of(units, output, 0, 2)[0] is not None


def test_the_claim_of_a_killed_part_is_released(tmp_path):
    units, output = units_of(TEXTS, 4), tmp_path / "out"
    with claim(Part(0, 7).claimed_path(output)):
        path = next(tmp_path.glob(".out.*.claim"))
        words = path.read_text().split()
        path.write_text(" ".join([*words[:2], "999999999"]))  # no process of this host
        run(units, output)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_part_waits_until_the_claim_of_a_killed_one_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "STALE_SECONDS", 1.0)
    output = tmp_path / "out"
    with claim(Part(0, 1).claimed_path(output)):
        next(tmp_path.glob(".out.*.claim")).write_text("elsewhere pid:[1] 7")
        assert part_of([memory_unit(["a"])], output, 0, 1)[0] is not None
    assert read(output, "train") == ["a"]


def test_a_failing_unit_keeps_the_finished_units_of_its_part(tmp_path):
    def fail():
        raise ConfigError("unit 3 is bad")

    units, output = units_of(TEXTS, 5), tmp_path / "out"
    bad = [*units[:3], Unit(units[3].description, fail), units[4]]
    with pytest.raises(ConfigError, match="unit 3 is bad"):
        part_of(bad, output, 1, 2)
    assert [each["name"] for each in unfinished(output)] == ["part-00001"]
    assert not [*tmp_path.glob(".out.unfinished/.staging-*")]
    part_of(units, output, 1, 2)
    part_of(units, output, 0, 2)
    assert sorted(read(output, "train")) == sorted(TEXTS)


# SLURM and Ray ------------------------------------------------------------------------------------

#: A stand-in for a cluster that runs the tasks of an array one after another.
SBATCH = """#!/bin/bash
script="${!#}"
grep -q merge_stats "$script" && { echo "Submitted batch job 18"; exit; }
cp "$script" "$CLUSTER/script"
echo "$@" >> "$CLUSTER/arguments"
for task in $(seq 0 $(sed -n 's/^#SBATCH --array=0-//p' "$script")); do
    env SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=node7 RUN_OFFSET=0 PATH="$CLUSTER:/usr/bin:/bin" \
        bash "$script" > "$CLUSTER/$task.out" 2>&1
    echo $? > "$CLUSTER/$task.code"
done
echo "Submitted batch job 17"
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
exec "$@"
"""
SLURM = ("--executor", "slurm", "--slurm", "partition=cpu", "--slurm", "time=2:00:00")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with stand-ins for the programs of SLURM, and their output."""
    pytest.importorskip("datatrove")
    folder = tmp_path / "cluster"
    folder.mkdir()
    hosts = "#!/bin/bash\necho node7\n"
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": hosts}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    return folder


def codes(cluster):
    return [int(path.read_text()) for path in sorted(cluster.glob("*.code"))]


def test_slurm_tasks_give_the_files_of_one_process(tmp_path, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [write_lines(tmp_path / f"{n}.jsonl", TEXTS[n::5]).name for n in range(5)]
    call = ("--jsonl", *texts, "--tokenizer", "bytes")
    assert energon_ext("prepare", "whole", *call, "--jobs", 1).exit_code == 0
    result = energon_ext("prepare", "out", *call, *SLURM, "--tasks", 3, "--slurm", "account=llm")
    assert result.exit_code == 0, result.stderr
    assert "Submitted 3 tasks as SLURM job 17; logs in " in result.stdout
    assert codes(cluster) == [0, 0, 0], (cluster / "0.out").read_text()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert "out: part 1/3 is prepared, other parts are not." in (cluster / "1.out").read_text()
    rendered = energon_ext(
        "prepare", "out", *call, *SLURM, "--tasks", 3, "--slurm", "account=llm", "--render"
    )
    assert without_times(rendered.stdout) == without_times((cluster / "script").read_text())


def test_slurm_runs_both_passes_of_a_shuffled_preparation(tmp_path, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [write_lines(tmp_path / f"{n}.jsonl", TEXTS[n::5]).name for n in range(5)]
    call = ("--jsonl", *texts, "--tokenizer", "bytes", "--shuffle", 3)
    assert energon_ext("prepare", "whole", *call, "--jobs", 1).exit_code == 0
    result = energon_ext("prepare", "out", *call, *SLURM, "--tasks", 3)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("Submitted 3 tasks as SLURM job 17; logs in ") == 2
    assert codes(cluster) == [0, 0, 0], (cluster / "0.out").read_text()
    first, second = (cluster / "arguments").read_text().splitlines()
    assert "--dependency" not in first and "--dependency=afterany:17 " in second
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    rendered = energon_ext("prepare", "out", *call, *SLURM, "--tasks", 3, "--render").stdout
    assert rendered.count("srun") == 1 and "pass-1" in rendered and "dependency" not in rendered


def without_times(script):
    return re.sub(r"\d{8}-\d{6}", "TIME", " ".join(script.split()))


def test_a_bad_line_makes_a_slurm_task_exit_with_2_and_name_the_line(tmp_path, cluster):
    texts = [write_lines(tmp_path / f"{n}.jsonl", TEXTS[n::3]) for n in range(3)]
    texts[1].write_bytes(b'{"text": "good"}\n\xff\n')
    call = ("prepare", tmp_path / "out", "--jsonl", *texts, "--tokenizer", "bytes", "--tasks", 3)
    energon_ext(*call, *SLURM, "--logs", tmp_path / "logs")
    assert codes(cluster) == [0, 2, 0]
    line = f"{texts[1]}:2: not JSON"
    assert f"Error: {line}" in (cluster / "1.out").read_text()
    (failure,) = (tmp_path / "logs").glob("*/failures/00001.txt")
    assert failure.read_text().startswith(line)
    assert len(unfinished(tmp_path / "out")) == 2


def test_rendering_a_script_with_sbatch_options_runs_nothing(tmp_path, lines):
    pytest.importorskip("datatrove")
    call = call_of(lines, tmp_path / "out")[:-2]
    result = energon_ext(
        *(*call, *SLURM, "--tasks", 2500, "--slurm", "account=llm", "--slurm", "cpus_per_task=4"),
        *("--slurm", "workers=100", "--render"),
    )
    directives = re.findall(r"^#SBATCH --(.*)$", result.stdout, re.MULTILINE)
    assert {"partition=cpu", "time=2:00:00", "account=llm", "cpus-per-task=4"} < {*directives}
    assert "array=0-1000%100" in directives  # three arrays, of at most 1001 tasks
    assert "qos" not in result.stdout
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in result.stdout
    assert re.search(r"^srun -l -n 1 launch_pickled_pipeline .*/executor.pik$", result.stdout, re.M)
    assert not (tmp_path / "out").exists() and not [*tmp_path.rglob("executor.pik")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--executor", "slurm"), "--slurm partition=... is missing"),
        ((*SLURM, "--slurm", "account"), "--slurm 'account': NAME=VALUE is needed"),
        ((*SLURM, "--slurm", "workers=many"), "--slurm workers: 'many' found, an integer"),
        ((*SLURM, "--jobs", 2), "--executor: sets --jobs itself"),
        ((*SLURM, "--part", "0/2"), "--executor: sets --part itself"),
        ((*SLURM, "--force"), "--force: cannot be combined with parts"),
        ((*SLURM, "--key", "x", "--text", "a"), "Give one of"),
    ],
)
def test_unsupported_executor_options_are_refused_at_once(options, expected, tmp_path, lines):
    call = call_of(lines, tmp_path / "out")[:-2]
    assert expected in error_line(energon_ext(*call, *options))


@pytest.mark.parametrize("executor", ["slurm", "ray"])
def test_a_missing_datatrove_is_a_one_line_error_with_the_command(
    executor, tmp_path, lines, monkeypatch
):
    monkeypatch.setitem(sys.modules, f"datatrove.executor.{executor}", None)
    call = call_of(lines, tmp_path / "out")[:-2]
    line = error_line(energon_ext(*call, *SLURM[2:], "--executor", executor))
    assert line == (
        f"--executor {executor} needs the package `datatrove`: pip install 'energon_ext[prepare]'."
    )


# Examples -----------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples/prepare"


def test_the_slurm_example_prepares_a_folder(tmp_path, cluster, monkeypatch):
    (tmp_path / "web").mkdir()
    write_lines(tmp_path / "web/a.jsonl", TEXTS)
    values = {"INPUT": tmp_path / "web", "OUTPUT": tmp_path / "out", "TOKENIZER": "bytes"}
    for name, value in {**values, "PARTITION": "cpu", "ACCOUNT": "llm", "TASKS": "1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(fake_command(tmp_path)), prepend=os.pathsep)
    script = ("bash", EXAMPLES / "slurm.sh", "--val", "0")
    subprocess.run(script, check=True, timeout=300)
    assert codes(cluster) == [0]
    assert "#SBATCH --account=llm" in (cluster / "script").read_text()
    assert read(tmp_path / "out", "train") == TEXTS


def fake_command(tmp_path):
    """Return a folder with an `energon-ext` that runs this Python without installation."""
    command = tmp_path / "bin" / "energon-ext"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec {sys.executable} -m energon_ext "$@"\n')
    command.chmod(0o755)
    return command.parent


@pytest.mark.parametrize(
    ("tasks", "on"),
    [(1, ()), pytest.param(3, ("--partition", "cpu"), marks=pytest.mark.nightly)],
)
def test_the_filter_example_drops_documents_in_each_task(tmp_path, tasks, on, cluster):
    long = [f"document {n} of five words" for n in range(4)]
    texts = [["short", long[0], long[0]], [long[1], long[0]], [long[2]], [long[2], long[3]]]
    names = [write_lines(tmp_path / f"{n}.jsonl", part) for n, part in enumerate(texts)]
    options = ("--tokenizer", "bytes", "--tasks", str(tasks), *on)
    script = (sys.executable, EXAMPLES / "filters.py", tmp_path / "out", *names, *options)
    for _ in range(2):  # the second time nothing is left to do
        subprocess.run(script, check=True, timeout=300)
    found = sorted(read(tmp_path / "out", "train"))
    assert codes(cluster) == [0] * (tasks if on else 0)
    # Three tasks read the files 0 and 3, 1, and 2.
    extra = {1: [], 3: [long[0], long[2]]}[tasks]
    assert found == sorted(long + extra)


@pytest.fixture(scope="module")
def ray():
    """A Ray cluster on this machine."""
    pytest.importorskip("datatrove")
    module = pytest.importorskip("ray")
    root = str(Path(__file__).parents[2])
    module.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    yield module
    module.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 3)])
@pytest.mark.parametrize("tasks", [1, 7, 20])
def test_ray_tasks_give_the_files_of_one_process(tasks, shuffle, tmp_path, ray, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [write_lines(tmp_path / f"{n}.jsonl", TEXTS[n::9]).name for n in range(9)]
    call = ("--jsonl", *texts, "--tokenizer", "bytes", *shuffle)
    assert energon_ext("prepare", "whole", *call, "--jobs", 1).exit_code == 0
    on_ray = ("--executor", "ray", "--tasks", tasks, "--ray", "mem_per_cpu_gb=1")
    result = energon_ext("prepare", "out", *call, *on_ray)
    assert result.exit_code == 0, result.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    whole = energon_ext("prepare", "whole", *call, "--jobs", 1).stdout
    assert result.stdout == whole.replace("whole", "out")


@pytest.mark.nightly
def test_a_bad_line_on_ray_makes_the_command_exit_with_2(tmp_path, ray):
    texts = [write_lines(tmp_path / f"{n}.jsonl", TEXTS[n::3]) for n in range(3)]
    texts[1].write_bytes(b'{"text": "good"}\n\xff\n')
    call = ("prepare", tmp_path / "out", "--jsonl", *texts, "--tokenizer", "bytes", "--tasks", 3)
    on_ray = (*call, "--executor", "ray", "--ray", "mem_per_cpu_gb=1")
    assert f"{texts[1]}:2: not JSON" in error_line(energon_ext(*on_ray))
    assert len(unfinished(tmp_path / "out")) == 2
    result = energon_ext(*on_ray[:-4], "--on-error", "skip", "--executor", "ray")
    assert "started with on_error" in result.stderr


def test_a_killed_task_ends_with_an_error_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = PartStep(kill_itself, 1, str(tmp_path), tmp_path / "failures")
    with pytest.raises(WorkerError, match="Part 3/4 was killed, perhaps out of memory"):
        step(None, 3, 4)
    assert "Part 3/4 was killed" in (tmp_path / "failures/00003.txt").read_text()


def kill_itself(part, processes):
    os.kill(os.getpid(), signal.SIGKILL)
