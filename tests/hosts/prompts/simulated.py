"""A simulated asynchronous trainer of reinforcement learning, and what its weights have seen written down.

    python -m tests.hosts.prompts.simulated DIRECTORY SEED     until it is killed; or to the end of the data

Workers take prompts, answer in any order, fail, outlive a kill and answer the start after it; groups are filtered,
cancelled, trained whole or in parts; the weights get newer; checkpoints hold the weights and the state of the prompts.
A kill comes anywhere, also between a state and the checkpoint that it is for; it may cut the last line of the ledger,
and the run may go on from an older checkpoint. The weights *are* the list of what they were trained on: (step, ordinal,
rollout, what the worker was given), so that a checkpoint and the record cannot differ.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megaresume


class Texts:
    """Prompt i of a dataset says its name and i."""

    def __init__(self, name: str, items: int) -> None:
        self.name, self.items = name, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < self.items:
            raise IndexError(i)
        return f"{self.name} {i}"


@dataclass
class Plan:
    """What a run is, and what becomes of it at each start: all drawn from a seed."""

    seed: int
    rollouts: int
    min_rollouts: int | None
    max_staleness: int | None
    on_stale: str
    #: items of each dataset; the first start has these.
    items: dict[str, int]
    append: str | None
    blended: bool
    epochs: int | None
    #: chance that datasets grow, or weights change, at a start.
    changes: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Drawn."""
        draw = random.Random(f"plan {seed}")
        blended = draw.random() < 0.4
        rollouts = draw.choice([1, 1, 2, 4, 8])
        return cls(
            seed=seed,
            rollouts=rollouts,
            min_rollouts=draw.choice([None, max(1, rollouts // 2)]),
            max_staleness=draw.choice([None, 1, 3]),
            on_stale=draw.choice(["requeue", "drop"]),
            items={"web": draw.randrange(30, 120), "code": draw.randrange(10, 60)} if blended else {"data": 60},
            append=draw.choice(["now", "next_epoch"]),
            blended=blended,
            epochs=None if blended else 4,
            changes=draw.choice([0.0, 0.3]),
        )

    def prompts(self, world: World, draw: random.Random) -> megaresume.Prompts:
        """As a start makes them: with more prompts than the last one now and then, and other weights."""
        if world.starts and draw.random() < self.changes:
            for name in world.items:
                world.items[name] += draw.randrange(0, 15)
            if self.blended:
                world.shares = {name: draw.randrange(1, 5) for name in world.items}
        data: Any = {name: (Texts(name, n), world.shares[name]) for name, n in world.items.items()}
        return megaresume.Prompts(
            data if self.blended else data["data"][0],
            rollouts=self.rollouts,
            min_rollouts=self.min_rollouts,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            ledger=world.directory / "prompts.jsonl",
            seed=self.seed,
            max_epochs=self.epochs,
            append=self.append,
            on_change="stage",
            stages=[{"from_samples": 150, "weights": {"web": 1, "code": 3}}] if self.blended else (),
        )


@dataclass
class World:
    """What outlives a kill."""

    directory: Path
    items: dict[str, int]
    shares: dict[str, int]
    starts: int = 0
    #: the checkpoint: state of the prompts, weights, and rollouts that were kept with it.
    state: bytes | None = None
    weights: list[list[Any]] = field(default_factory=list)
    kept: list[list[Any]] = field(default_factory=list)
    #: what workers were sent before a kill, the newest last; earlier checkpoints.
    outlived: list[tuple[int, str, int, str, int]] = field(default_factory=list)
    earlier: list[tuple[Any, ...]] = field(default_factory=list)
    #: of every ordinal that a checkpoint knows, what it says; where a resume gave it another text.
    said: dict[int, str] = field(default_factory=dict)
    mismatched: int = 0


class Killed(Exception):
    """In the place of a SIGKILL, where everything but `World` is thrown away."""


class Life:
    """One process, from its start to a kill.

    Args:
        plan: of the run.
        world: what earlier ones have left.
        commit: puts a checkpoint where the next life finds it.
    """

    def __init__(self, plan: Plan, world: World, commit: Any) -> None:
        self.draw = draw = random.Random(f"life {plan.seed} {world.starts}")
        self.plan, self.world, self.commit = plan, world, commit
        ledger = world.directory / "prompts.jsonl"
        if world.state is None:  # of a first checkpoint that was never whole
            ledger.unlink(missing_ok=True)
        elif draw.random() < 0.1:  # cut by the kill
            ledger.write_bytes(ledger.read_bytes() + b'{"id": "')
        self.prompts = plan.prompts(world, draw)
        #: (ordinal, ticket, rollout, text, version) with workers, and those that came back and are wanted.
        self.out: list[tuple[int, str, int, str, int]] = []
        self.back: dict[tuple[int, int], str] = {}
        self.weights = [*world.weights]
        self.said = dict(world.said)
        self.workers = draw.choice([1, 3, 8, 20])
        self.refuses = draw.random() < 0.5
        if world.state is not None:
            self.prompts.load_state_dict(json.loads(world.state))
            assert self.prompts.in_flight == self.prompts.in_flight
            for ordinal, ticket, rollout, text in world.kept:
                if self.prompts.done(ordinal, ticket, rollout, version=self.prompts.version):
                    self.back[ordinal, rollout] = text
        world.starts += 1

    def run(self, moves: int | None) -> bool:
        """Whether the data has ended.

        Raises:
            Killed: after so many moves.
        """
        while moves is None or moves > 0:
            move = self.draw.choices(
                (self.issue, self.answer, self.answer_late, self.fail, self.give_up, self.train, self.save, self.sync),
                (4, 12, 1, 1, 1, 4, 1, 1),
            )[0]
            if move() is False and not self.out and not self.prompts.in_flight:
                self.save()
                return True
            if moves is not None:
                moves -= 1
                if move == self.save and self.draw.random() < 0.1:
                    self.prompts.state_dict()  # whose checkpoint never comes to be
                    break
        raise Killed

    def issue(self) -> bool:
        """False at the end of the data."""
        free = self.workers * self.plan.rollouts - len(self.out)
        if free <= 0:
            return True
        issued = self.prompts.issue(self.draw.randrange(1, free + 1))
        for prompt in issued:
            if self.said.setdefault(prompt.ordinal, prompt.content) != prompt.content:
                self.world.mismatched += 1
            version = self.prompts.version
            self.out += [(prompt.ordinal, prompt.ticket, k, prompt.content, version) for k in prompt.rollouts]
        return bool(issued)

    def answer(self) -> None:
        """Any rollout comes back, now and then twice."""
        if not self.out:
            return
        one = self.draw.randrange(len(self.out))
        ordinal, ticket, rollout, text, version = self.out[one]
        if self.draw.random() > 0.05:
            self.out.pop(one)
        if self.prompts.done(ordinal, ticket, rollout, version=version):
            self.back[ordinal, rollout] = text

    def answer_late(self) -> None:
        """A worker that was sent its prompt before a kill."""
        if not self.world.outlived:
            return
        ordinal, ticket, rollout, text, version = self.draw.choice(self.world.outlived)
        try:
            wanted = self.prompts.done(ordinal, ticket, rollout, version=version)
        except megaresume.MegaresumeError as error:  # the resume went back before it
            assert "was never issued" in str(error) or "of another prompt" in str(error)
        else:
            if wanted:
                self.back[ordinal, rollout] = text

    def fail(self) -> None:
        """A worker dies, or its prompt is cancelled."""
        if not self.out:
            return
        ordinal, _, rollout, _, _ = self.out.pop(self.draw.randrange(len(self.out)))
        if ordinal in self.prompts.in_flight and (ordinal, rollout) not in self.back:
            try:
                self.prompts.drop(ordinal, "failed", requeue=self.draw.random() < 0.8, rollout=rollout)
            except megaresume.MegaresumeError as error:  # repeated: its twin was trained in a part of the group
                assert "trained or dropped already" in str(error)

    def give_up(self) -> None:
        """A group is filtered; or was asked for in vain, and waits for later."""
        if not (there := self.prompts.in_flight):
            return
        ordinal = self.draw.choice(there)
        requeue = self.draw.random() < 0.7
        self.prompts.drop(ordinal, "cancelled" if requeue else "filtered", requeue)
        self.back = {key: text for key, text in self.back.items() if key[0] != ordinal}
        self.out = [one for one in self.out if one[0] != ordinal or self.draw.random() < 0.5]

    def train(self) -> None:
        """A step, of groups that are whole, large enough, or of some rollouts."""
        groups: dict[int, list[int]] = {}
        for ordinal, rollout in self.back:
            groups.setdefault(ordinal, []).append(rollout)
        step, chosen, used = self.prompts.step + 1, [], []
        for ordinal, rollouts in groups.items():
            enough = len(rollouts) >= (self.plan.min_rollouts or self.plan.rollouts)
            if enough and self.draw.random() < 0.7:
                chosen.append(ordinal)
                used += [(ordinal, rollout) for rollout in rollouts]
            elif self.draw.random() < 0.2:
                part = rollouts[: self.draw.randrange(1, len(rollouts) + 1)]
                chosen += [(ordinal, rollout) for rollout in part]
                used += [(ordinal, rollout) for rollout in part]
        if chosen:
            self.prompts.trained(step, chosen)
            self.weights += [[step, ordinal, rollout, self.back.pop((ordinal, rollout))] for ordinal, rollout in used]

    def sync(self) -> None:
        """The weights that answer are newer."""
        for stale in self.prompts.advance(self.prompts.version + 1):
            del self.back[stale]

    def save(self) -> None:
        """A checkpoint; with the rollouts that wait to be trained, or without."""
        kept = [] if self.draw.random() < 0.5 else self.kept()
        said = {ordinal: text for ordinal, text in self.said.items() if ordinal < self.prompts.next_ordinal}
        self.commit(json.dumps(self.prompts.state_dict()).encode(), [*self.weights], kept, said)

    def kept(self) -> list[list[Any]]:
        """As a store of rollouts keeps them: with the digest of their prompts."""
        from megaresume.hosts.prompts import digest_of

        return [[ordinal, digest_of(text), rollout, text] for (ordinal, rollout), text in self.back.items()]


def lives(seed: int, kills: int, directory: Path) -> tuple[World, Plan]:
    """A run that is killed so often, in this process; then to the end of the data if it has one."""
    plan = Plan.of(seed)
    directory.mkdir(parents=True)
    world = World(directory, dict(plan.items), dict.fromkeys(plan.items, 1))

    def commit(*checkpoint: Any) -> None:
        world.state, world.weights, world.kept, world.said = checkpoint
        world.earlier.append(checkpoint)

    draw = random.Random(f"kills {seed}")
    for _ in range(kills):
        if world.earlier and draw.random() < 0.1:  # the newest one cannot be read
            del world.earlier[draw.randrange(len(world.earlier)) + 1 :]
            commit(*world.earlier.pop())
        life = Life(plan, world, commit)
        try:
            if life.run(draw.randrange(1, 120)):
                return world, plan
        except Killed:
            world.outlived = [*world.outlived, *life.out][-50:]
    if plan.epochs is not None:
        Life(plan, world, commit).run(None)
    return world, plan


def main(directory: Path, seed: int) -> None:
    """In a process of its own: the checkpoint is a file."""
    plan, path = Plan.of(seed), directory / "checkpoint.json"
    world = World(directory, dict(plan.items), dict.fromkeys(plan.items, 1))
    if path.exists():
        found = json.loads(path.read_bytes())
        world.starts, world.items, world.shares = found["starts"], found["items"], found["shares"]
        world.state, world.weights, world.kept = found["state"].encode(), found["weights"], found["kept"]
        world.said = {int(ordinal): text for ordinal, text in found["said"].items()}
        world.mismatched = found["mismatched"]

    def commit(state: bytes, weights: Any, kept: Any, said: Any) -> None:
        known = {"starts": world.starts, "items": world.items, "shares": world.shares}
        known |= {"state": state.decode(), "weights": weights, "kept": kept, "said": said}
        known |= {"mismatched": world.mismatched}
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(known))
        os.replace(temporary, path)

    print("started", flush=True)
    Life(plan, world, commit).run(None)
    print("ended", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
