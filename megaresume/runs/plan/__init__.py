"""A resume planned without a GPU: which checkpoint it loads, what happens to the data, and where the run ends.

    start.py    what the new launch says; what it does not say is as it was
      |         which checkpoint is loaded, on which ranks       Run.choose, hosts.deepspeed.load_rules
      |         -> `Launch`, which all others ask
    data.py     what of the data config changed                  stream.changes
    gain.py     what balanced ranks gain                         stream.batches, dealing
    guarded.py  Megatron's own datasets                          hosts.megatron.guard.compare
      |
    dry_run.py  last step, epochs left, the end of the stream    stream.batches, stream.changes
                `dry_run` -> `DryRun`: a verdict, and findings with the flags that solve them
    command.py  ``megaresume plan DIR``; with ``--mtbf``, interval.py: how often to save, from what the ledger recorded

Every rule is the one that the real resume asks; this package only brings them together. It imports neither torch nor
DeepSpeed nor Megatron, and the compiled planner only for streams that have an end, and for balanced ranks.
"""

from megaresume.runs.plan.dry_run import DryRun, dry_run
from megaresume.runs.plan.start import Finding, Flags

__all__ = ["DryRun", "Finding", "Flags", "dry_run"]
