"""Plans a resume without a GPU: which checkpoint it loads, what happens to the data, and where the run ends.

    start.py    the new launch's flags; defaults are as they were when the checkpoint was saved
      |         which checkpoint is loaded, on which ranks       Run.choose, hosts.deepspeed.load_rules
      |         -> `Launch`, used by all others
    data.py     what changed in the data config                  stream.changes
    gain.py     what balanced ranks gain                         stream.batches, dealing
    guarded.py  Megatron's own datasets                          hosts.megatron.guard.compare
      |
    dry_run.py  last step, epochs left, the end of the stream    stream.batches, stream.changes
                `dry_run` -> `DryRun`: a verdict, and findings with the flags that solve them
    command.py  ``megaresume plan DIR``; with ``--mtbf``, interval.py: how often to save, by the times in the ledger

Every rule is that of the real resume; this package only combines them. It imports neither torch nor DeepSpeed nor
Megatron, and the compiled planner only for streams that end and for balanced ranks.
"""

from megaresume.runs.plan.dry_run import DryRun, dry_run
from megaresume.runs.plan.start import Finding, Flags

__all__ = ["DryRun", "Finding", "Flags", "dry_run"]
