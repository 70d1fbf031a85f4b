"""Writes down what the Trainer of any program trains, without a change to it: on PYTHONPATH, Python runs this at start.

    RECORD    file, to which each rank adds its number: a line for each call of ``training_step``
    ATTEMPT   number of the launch
    KILL      ``save 10`` or ``step 7``: where this process ends itself with SIGKILL

An item's number is the word ``wNUMBER`` in its text, whose token is FIRST + NUMBER. No code of megaresume is used.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys

#: token of the word w0.
FIRST = 16


def _record(trainer, inputs):
    step, rank = trainer.state.global_step + 1, trainer.args.process_index
    rows = next(value for key, value in inputs.items() if key.endswith("input_ids")).tolist()
    items = [token - FIRST for row in rows for token in row if token >= FIRST]
    line = {"attempt": int(os.environ["ATTEMPT"]), "step": step, "rank": rank, "items": items}
    with open(f"{os.environ['RECORD']}.{rank}", "a") as file:
        file.write(json.dumps(line) + "\n")


def _die(where, step):
    if os.environ.get("KILL") == f"{where} {step}":
        os.kill(os.getpid(), signal.SIGKILL)


def _patch(Trainer):
    training_step, save = Trainer.training_step, Trainer._save_optimizer_and_scheduler

    @functools.wraps(training_step)
    def recorded(self, model, inputs, *args, **more):
        _record(self, inputs)
        loss = training_step(self, model, inputs, *args, **more)
        _die("step", self.state.global_step + 1)
        return loss

    @functools.wraps(save)
    def killed(self, *args, **more):
        _die("save", self.state.global_step)
        return save(self, *args, **more)

    Trainer.training_step, Trainer._save_optimizer_and_scheduler = recorded, killed


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _patch(module.Trainer)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RECORD"):
    sys.meta_path.insert(0, _Finder())
