"""What goes wrong on a cluster, done to real jobs of launch/slurm/train.sbatch: what they decide, what they trained.

    python -m tests.cluster.launch.test_slurm_scenarios         play all: 20 minutes; their table goes to docs/slurm.md
    python -m tests.cluster.launch.test_slurm_scenarios WORDS   only those that have some of these words

The training is loop.py beside it. What it recorded is compared with a run that nobody stopped, line by line: the
samples of every rank in every step, and its loss, which no sample before it may have changed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from megaresume.shipped import launch_script
from tests.cluster.launch.conftest import Cluster, hurried, running_cluster
from tests.cluster.training.conftest import write_corpus
from tests.release import release

DOCUMENT = Path(__file__).parents[3] / "docs" / "slurm.md"
LOOP = Path(__file__).parent / "loop.py"
PATIENCE = 300
TASK = "${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}"
#: of the script, as a user edits it; an array has directories for every task.
TRAIN = f'\nRUN_DIR=$RUN_DIR{TASK}\nTRAIN=("$LOOP" --data "$DATA" --control "$CONTROL{TASK}")\n'
#: of the run that nobody stops: more than any other has.
REFERENCE_STEPS = 600
#: of the table in the document.
HEAD = "| scenario | expected | seen | samples and losses equal |\n| --- | --- | --- | --- |\n"
#: lines of the driver, and what they decide.
DECISIONS = {
    r"queued again: ": "requeue",
    r"TERM came: Slurm ends this attempt and has queued the job again itself": "requeue",
    r"not queued again, REQUEUE=no, but job": "chain",
    r"again in this job: ": "again",
    r"the run is over": "finish",
    r"NOT queued again: |refused, and not queued again: |TERM came: the job was cancelled": "refuse",
}


def write_data(directory: Path) -> Path:
    """A corpus and its data.yaml."""
    write_corpus(directory / "web", documents=2000, seed=1)
    (directory / "data.yaml").write_text("seed: 1234\nseq_length: 64\nsources:\n  web: {path: web}\n")
    return directory / "data.yaml"


@cache
def reference(world: int) -> dict[tuple[int, int], str]:
    """What a run that nobody stops records: rank and step to line."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "last").write_text(str(REFERENCE_STEPS))
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(LOOP)]
        words += ["--data", str(write_data(directory)), "--control", scratch, "--pace", "0"]
        words += ["--save", f"{scratch}/save", "--load", f"{scratch}/save"]
        words += ["--megaresume-stop-file", f"{scratch}/stop", "--megaresume-log-samples", f"{scratch}/samples"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = recorded(directory)
        assert len(lines) == world * REFERENCE_STEPS
        return {at: line for at, (line,) in lines.items()}


def recorded(control: Path) -> dict[tuple[int, int], set[str]]:
    """Rank and step to all different lines about them; a line that a kill has cut off is left out."""
    lines: dict[tuple[int, int], set[str]] = {}
    for path in control.glob("rank-*.txt"):
        for line in path.read_text().split("\n")[:-1]:
            lines.setdefault((int(path.stem.removeprefix("rank-")), int(line.split()[0])), set()).add(line)
    return lines


def samples_equal(control: Path) -> str:
    """``N of N steps``, whose samples and losses are those of the uninterrupted run; ``none trained``."""
    lines = recorded(control)
    if not lines:
        return "none trained"
    world = 1 + max(rank for rank, _ in lines)
    last = min(max(step for of, step in lines if of == rank) for rank in range(world))
    expected = reference(world)
    wanted = [[(rank, step) for rank in range(world)] for step in range(1, last + 1)]
    equal = sum(all(lines.get(at) == {expected[at]} for at in step) for step in wanted)
    return f"{equal} of {last} steps"


class Run:
    """The jobs of a run directory, submitted from ``directory``."""

    def __init__(self, cluster: Cluster, directory: Path, name: str = "run") -> None:
        self.cluster, self.directory, self.name = cluster, directory, name
        self.control = directory / f"control of {name}"
        self.control.mkdir(parents=True)
        if not (directory / "data.yaml").exists():
            write_data(directory)
        text = launch_script("slurm/train.sbatch").read_text()
        self.script = directory / "train.sbatch"
        self.script.write_text(re.sub(r"\nTRAIN=\(.*?\n\)\n", lambda _: TRAIN, text, flags=re.DOTALL))

    @property
    def path(self) -> Path:
        """RUN_DIR."""
        return self.directory / "runs" / self.name

    def submit(self, *options: str, flags: tuple[str, ...] = (), nodes: int = 2, **settings: str) -> str:
        """The job's id."""
        env = {name: value for name, value in self.cluster.env.items() if not name.startswith("SLURM_JOB")}
        env |= {
            "PYTHON": sys.executable,
            "LOOP": str(LOOP),
            "CONTROL": str(self.control),
            "LAUNCHER": "srun",
            "EXCLUDE_NODES": "0",
        } | settings
        env |= {"RUN_DIR": str(self.path)}
        words = ["sbatch", "--parsable", f"--job-name={self.name}", f"--nodes={nodes}", *options]
        words += [str(self.script), *flags]
        done = subprocess.run(words, cwd=self.directory, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def lines(self) -> list[str]:
        """What the drivers have written, in all logs of Slurm, by time."""
        texts = [log.read_text(errors="replace") for log in self.directory.glob(f"{self.name}-*.log")]
        lines = [line for text in texts for line in text.splitlines() if re.match(r"\S+ \[job ", line)]
        return sorted(lines, key=lambda line: line.split()[0])

    def decisions(self, job: str = "") -> str:
        """Of all attempts in their order, or those of one job: ``requeue x 3, finish``."""
        words: list[str] = []
        for line in self.lines():
            about, _, said = line.partition("] ")
            if job and f"[job {job}," not in about:
                continue
            words += [word for start, word in DECISIONS.items() if re.match(start, said)]
            if found := re.match(r"node (\S+) is (?:left out from now on|replaced by)", said):
                words[-1] += f" without {found[1]}"
        counts = [(word, len([*group])) for word, group in groupby(words)]
        return ", ".join(word if count == 1 else f"{word} x {count}" for word, count in counts)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.directory.glob("*.log"), *self.path.glob("**/logs/*/*.log")]
                tails = "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
                pytest.fail(f"{what}: not within {PATIENCE} s\n{self.cluster.slurm('squeue')}\n{tails}", pytrace=False)
            time.sleep(0.1)

    def until_said(self, words: str, times: int = 1) -> None:
        self.until(lambda: sum(words in line for line in self.lines()) >= times, f"{words} x {times}")

    def trained(self) -> int:
        """Steps that the first rank has recorded, those of all attempts."""
        log = self.control / "rank-0.txt"
        return log.read_text().count("\n") if log.exists() else 0

    def until_trained(self, number: int = 8) -> None:
        """So many more steps than now: after a save among them, if there are eight."""
        goal = self.trained() + number
        self.until(lambda: self.trained() >= goal, f"{number} more steps")

    def end(self) -> None:
        """Let the run come to its end, and wait for that."""
        steps = max((step for _, step in recorded(self.control)), default=0)
        (self.control / "last").write_text(str(steps + 10))
        self.until_said("the run is over")
        self.until_gone()

    def until_gone(self) -> None:
        mine = ("squeue", "-h", f"--name={self.name}")
        self.until(lambda: not self.cluster.slurm(*mine, check=False).strip(), "the end of the jobs")

    def process(self, program: str, **variables: str) -> psutil.Process:
        """Of a job: the one that runs a program, with these variables."""
        for process in psutil.process_iter():
            try:
                words, env = process.cmdline(), process.environ()
            except (psutil.Error, OSError):
                continue
            if (
                program in words[1:3]
                and any(word.startswith(str(self.control)) for word in words)
                and variables.items() <= env.items()
            ):
                return process
        raise AssertionError(f"no process of {program}, {variables}")

    def nodes_of(self, job: str) -> list[str]:
        found = re.search(r" NodeList=(\S+)", self.cluster.slurm("scontrol", "show", "job", job))
        assert found is not None
        return self.cluster.slurm("scontrol", "show", "hostnames", found[1]).split()


# ---------------------------------------------------------------- the scenarios: what was decided, and what was trained


@dataclass(frozen=True)
class Scenario:
    what: str
    expected: str
    play: Callable[[Cluster, Path], tuple[str, str]]
    #: whether something was trained, and is compared.
    trains: bool = True


def nine_stops(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    job = run.submit(LAUNCHER="torchrun")
    lost: list[str] = []

    def down() -> None:
        lost.append(run.nodes_of(job)[-1])
        cluster.slurm("scontrol", "update", f"nodename={lost[-1]}", "state=down", "reason=scenario")

    def power_cut() -> None:
        cluster.kill_node(run.nodes_of(job)[-1])
        down()

    def time_limit() -> None:
        cluster.slurm("scontrol", "update", f"jobid={job}", "timelimit=2")

    stops: list[Callable[[], object]] = [
        lambda: cluster.slurm("scancel", "--batch", "--signal=USR1", job),
        lambda: cluster.slurm("scancel", "--batch", "--signal=TERM", job),
        lambda: cluster.slurm("scontrol", "requeue", job),
        lambda: run.process(str(LOOP), RANK="1").kill(),
        (run.control / "raise").touch,
        lambda: cluster.slurm(
            "sbatch", "-p", "urgent", "--nodes=4", "--exclusive", "-o", "/dev/null", "--wrap", "true"
        ),
        down,
        power_cut,
        time_limit,
    ]
    for number, stop in enumerate(stops):
        run.until_said(f"start: restart count {number};")
        run.until_trained()
        stop()
        if lost:
            run.until(lambda: "COMPLETING" not in cluster.slurm("squeue", "-h", "-o", "%T"), "the end of the attempt")
            cluster.start_node(lost[-1])
            cluster.slurm("scontrol", "update", f"nodename={lost.pop()}", "state=resume")
    run.until_said(f"start: restart count {len(stops)};")
    cluster.slurm("scontrol", "update", f"jobid={job}", "timelimit=60")
    run.until_trained()
    run.end()
    return run.decisions(), samples_equal(run.control)


def slurmd_of_the_only_node(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """Nobody tells the old ranks to end: they go on until they want to save, and then the lock is another job's."""
    run = Run(cluster, directory)
    job = run.submit(nodes=1)
    run.until_trained()
    node = run.nodes_of(job)[0]
    cluster.kill_slurmd(node)
    run.until_said("start: restart count 1;")
    run.until_said("[job", times=3)
    run.until_trained(20)
    cluster.start_node(node)
    run.end()
    return run.decisions(), samples_equal(run.control)


def slurmd_of_the_batch_node(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    job = run.submit()
    run.until_trained()
    node = run.nodes_of(job)[0]
    cluster.kill_slurmd(node)
    run.until_said("start: restart count 1;")
    run.until_trained()
    cluster.start_node(node)
    run.until_trained()
    run.end()
    return run.decisions(), samples_equal(run.control)


def controller_away(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    run.submit()
    run.until_trained()
    with cluster.without_controller():
        # Nobody but the driver hears of it, and Slurm cannot tell the ranks: there is the stop file.
        run.process("megaresume.cluster.drivers").send_signal(signal.SIGUSR1)
        run.until_said("USR1 came")
        time.sleep(8)
    run.until_said("start: restart count 1;")
    run.until_trained()
    run.end()
    return run.decisions(), samples_equal(run.control)


def two_jobs_of_one_name(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    first = run.submit()
    run.until_trained()
    second = run.submit(MAX_RESTARTS="1")
    run.until_said("NOT queued again")
    run.until_trained()
    run.end()
    return f"{run.decisions(first)}; the second: {run.decisions(second)}", samples_equal(run.control)


def an_array(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory, "array")
    job = run.submit("--array=0-2", nodes=1, flags=("--fault", "task 1"))
    controls = [run.control / str(task) for task in range(3)]
    for control in controls:
        control.mkdir()
    run.until(lambda: all((control / "rank-0.txt").exists() for control in controls), "three tasks that train")
    cluster.slurm("scancel", f"{job}_2")
    run.until_said("the job was cancelled")
    for control in controls[:2]:
        (control / "last").write_text("120")
    run.until_said("the run is over", times=2)
    run.until_gone()
    # The output of Slurm has another number than the task.
    decided = [f"task {task}: {run.decisions(f'{job}_{task}')}" for task in range(3)]
    equal = [samples_equal(control).removesuffix(" steps") for control in controls]
    return "; ".join(decided), f"{', '.join(equal)} steps"


def heterogeneous(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    run.submit(":", "--nodes=1", nodes=1)
    run.until_gone()
    return run.decisions(), samples_equal(run.control)


def full_disk(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """RUN_DIR is a small file system of the only node, which fills up during the training."""
    run = Run(cluster, directory)
    run.path.mkdir(parents=True)
    cluster.exec("n1", "mount", "-t", "tmpfs", "-o", "size=8m", "none", str(run.path))
    try:
        run.submit("--nodelist=n1", nodes=1, NODE_CHECK="no")
        run.until_trained()
        cluster.exec("n1", "bash", "-c", f"cat /dev/zero > '{run.path}/ballast' || true")
        run.until_said("refused, and not queued again: the count of attempts cannot be written")
        run.until_gone()
        cluster.exec("n1", "rm", f"{run.path}/ballast")
        run.submit("--nodelist=n1", nodes=1, NODE_CHECK="no")
        run.until_trained()
        run.end()
    finally:
        cluster.exec("n1", "umount", "-l", str(run.path))
    return run.decisions(), samples_equal(run.control)


def a_bad_node(cluster: Cluster, directory: Path) -> tuple[str, str]:
    run = Run(cluster, directory)
    run.submit(EXCLUDE_NODES="1", flags=("--fault", "on n1"))
    run.until_trained()
    run.end()
    return run.decisions(), samples_equal(run.control)


def a_firewall(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """Slurm itself reaches the node."""
    run = Run(cluster, directory)
    found = re.search(r"NodeAddr=(\S+)", cluster.slurm("scontrol", "show", "node", "-o", "n1"))
    assert found is not None
    rule = ("to", found[1], "dport", "10000-30000", "prohibit")
    cluster.exec("n2", "ip", "rule", "add", *rule)
    try:
        run.submit("--nodelist=n1,n2,n3", nodes=3, EXCLUDE_NODES="1")
        run.until_said("left out from now on")
    finally:
        cluster.exec("n2", "ip", "rule", "del", *rule)
    return run.decisions(), samples_equal(run.control)


def a_spare_node(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """It takes the place of a node without power, and of one whose rank fails; then there is none left."""
    run = Run(cluster, directory)
    job = run.submit("--no-kill", nodes=3, TRAIN_NODES="2")
    run.until_trained()
    dead = run.nodes_of(job)[1]
    cluster.kill_node(dead)
    try:
        run.until_said("attempt 0.1] start: ")
        run.until_trained()
        cluster.slurm("scancel", "--batch", "--signal=USR1", job)
        for attempt in ("1", "1.1"):
            run.until_said(f"attempt {attempt}] start: ")
            run.until_trained()
            (run.control / "raise").touch()
        run.until_said("attempt 2] start: ")
        run.until_trained()
        run.end()
    finally:
        cluster.start_node(dead)
    return run.decisions(), samples_equal(run.control)


def the_batch_node_beside_spares(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """Slurm would keep the job without its script; a spare node has it queued again."""
    run = Run(cluster, directory)
    job = run.submit("--no-kill", nodes=3, TRAIN_NODES="2")
    run.until_trained()
    dead = run.nodes_of(job)[0]
    cluster.kill_node(dead)
    try:
        run.until_said("start: restart count 1;")
        assert run.nodes_of(job) == [node for node in cluster.nodes if node != dead]
        run.until_trained()
        run.end()
    finally:
        cluster.start_node(dead)
    return run.decisions(), samples_equal(run.control)


def without_training(*options: str, fault: str = "", **settings: str) -> Callable[[Cluster, Path], tuple[str, str]]:
    """A job that ends before its first step."""

    def play(cluster: Cluster, directory: Path) -> tuple[str, str]:
        run = Run(cluster, directory)
        flags = ("--fault", fault) if fault else ("--no-such-flag",)
        run.submit(*options, flags=flags, **settings)
        run.until(lambda: "refuse" in run.decisions(), "a refusal")
        run.until_gone()
        return run.decisions(), samples_equal(run.control)

    return play


def a_chain(cluster: Cluster, directory: Path) -> tuple[str, str]:
    (directory / "my runs").mkdir()
    run = Run(cluster, directory / "my runs", "first one")
    job = run.submit("--no-requeue", REQUEUE="no", CHAIN="2")
    for jobs in (1, 2):
        run.until_said("start: ", times=jobs)
        run.until_trained()
        job = next(line.split("[job ")[1].split(",")[0] for line in reversed(run.lines()) if "start: " in line)
        cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    run.until_said("start: ", times=3)
    run.until_trained()
    run.end()
    return run.decisions(), samples_equal(run.control)


def unwritable_directory(cluster: Cluster, directory: Path) -> tuple[str, str]:
    """Where the log of Slurm would be: no line of the script ever runs."""
    run = Run(cluster, directory)
    cluster.exec("n1", "mount", "--bind", str(directory), str(directory))
    cluster.exec("n1", "mount", "-o", "remount,bind,ro", str(directory))
    try:
        job = run.submit("--nodelist=n1", nodes=1)
        run.until_gone()
    finally:
        cluster.exec("n1", "umount", str(directory))
    said = cluster.slurm("scontrol", "show", "job", job)
    state, restarts = (re.search(rf"{name}=(\w+)", said) for name in ("JobState", "Restarts"))
    assert state is not None and restarts is not None
    return f"Slurm: {state[1]}, restarts {restarts[1]}", samples_equal(run.control)


SCENARIOS = [
    Scenario(
        "nine kinds of stop in a row: USR1, TERM, `scontrol requeue`, a killed rank, a rank that fails, preemption, a "
        "node set down, a node without power, the time limit",
        "requeue x 9, finish",
        nine_stops,
    ),
    Scenario("slurmd of the batch node is killed", "requeue, finish", slurmd_of_the_batch_node),
    Scenario("slurmd of the only node is killed, its ranks keep running", "requeue, finish", slurmd_of_the_only_node),
    Scenario("the controller is away during a save and the requeue after it", "requeue, finish", controller_away),
    Scenario(
        "two jobs of one name: the lock keeps the second out",
        "finish; the second: requeue, refuse",
        two_jobs_of_one_name,
    ),
    Scenario(
        "a job array: task 1 fails once, task 2 is cancelled",
        "task 0: finish; task 1: requeue, finish; task 2: refuse",
        an_array,
    ),
    Scenario("a heterogeneous job", "refuse", heterogeneous, trains=False),
    Scenario("RUN_DIR fills up; then there is room again, and the same sbatch", "requeue, refuse, finish", full_disk),
    Scenario("a bad node", "requeue without n1, finish", a_bad_node),
    Scenario(
        "a node whose firewall lets Slurm through, and not the ranks", "requeue without n2", a_firewall, trains=False
    ),
    Scenario(
        "TRAIN_NODES=2 of three nodes: one loses its power; USR1; a rank fails, and one when no spare node is left",
        "again without n2, requeue, again without n3, requeue, finish",
        a_spare_node,
    ),
    Scenario(
        "TRAIN_NODES=2 of three nodes: that of the batch script loses its power, and another one tells Slurm",
        "finish",
        the_batch_node_beside_spares,
    ),
    Scenario(
        "a time limit before any progress, MAX_RESTARTS=0",
        "refuse",
        without_training("--time=1", "--signal=B:28@1", fault="hang", MAX_RESTARTS="0"),
        trains=False,
    ),
    Scenario(
        "status 0 without progress, MAX_RESTARTS=1",
        "requeue, refuse",
        without_training(fault="nothing", MAX_RESTARTS="1"),
        trains=False,
    ),
    Scenario("a mistake in the flags, under torchrun", "refuse", without_training(LAUNCHER="torchrun"), trains=False),
    Scenario("a chain of three jobs, with spaces in all paths", "chain x 2, finish", a_chain),
    Scenario(
        "a submit directory that cannot be written: no line of the script runs",
        "Slurm: FAILED, restarts 0",
        unwritable_directory,
        trains=False,
    ),
]


def is_as_expected(scenario: Scenario, seen: str, equal: str) -> bool:
    counts = re.findall(r"(\d+) of (\d+)", equal)
    trained = bool(counts) and all(one == all_ and int(all_) > 8 for one, all_ in counts)
    return seen == scenario.expected and (trained if scenario.trains else equal == "none trained")


@release(
    "20 minutes: all that goes wrong on a cluster, with the samples",
    "`tests/cluster/drivers/test_decide.py`, "
    "`tests/cluster/launch/test_slurm_coming_back.py::test_a_bad_node_is_left_out_and_only_a_run_that_says_so_is_over`,"
    " `tests/cluster/launch/test_slurm_scripts.py::test_a_signal_a_requeue_a_cancel_and_the_end`",
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s.what.split(":")[0].replace(" ", "-") for s in SCENARIOS])
def test_scenario(scenario: Scenario, slurm: Cluster, tmp_path: Path) -> None:
    if slurm.mode != "ns":
        pytest.skip("the nodes share this machine's mounts: cluster.sh was not started as root")
    seen, equal = scenario.play(slurm, tmp_path)
    assert is_as_expected(scenario, seen, equal), (scenario.expected, seen, equal)


def test_the_table_of_the_document_is_of_these_scenarios() -> None:
    rows = rows_of_document()
    assert [*rows] == [scenario.what for scenario in SCENARIOS]
    for scenario in SCENARIOS:
        expected, seen, equal = rows[scenario.what]
        assert expected == scenario.expected and is_as_expected(scenario, seen, equal), rows[scenario.what]


def rows_of_document() -> dict[str, list[str]]:
    """Scenario to what was expected, what was seen, and what was equal."""
    table = DOCUMENT.read_text().split(HEAD)[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def main(*words: str) -> None:
    """Play the scenarios that have some of these words, or all; the rows of the others stay."""
    rows = rows_of_document()
    with running_cluster() as cluster, hurried(cluster), tempfile.TemporaryDirectory() as scratch:
        os.environ["SLURM_CONF"] = str(cluster.conf)
        for number, scenario in enumerate(SCENARIOS):
            if not words or any(word in scenario.what for word in words):
                cluster.rest()
                directory = Path(scratch) / str(number)
                directory.mkdir()
                rows[scenario.what] = [scenario.expected, *scenario.play(cluster, directory)]
                print(scenario.what, *rows[scenario.what], sep=" | ", flush=True)
    lines = [" | ".join([f"| {s.what}", *rows[s.what]]) + " |" for s in SCENARIOS if s.what in rows]
    before, after = DOCUMENT.read_text().split(HEAD)
    DOCUMENT.write_text("\n".join([before + HEAD.rstrip(), *lines]) + "\n\n" + f"\n{after}".split("\n\n", 1)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
