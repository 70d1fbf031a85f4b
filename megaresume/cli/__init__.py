"""The program ``megaresume``: main.py finds the command; errors become messages without a traceback.

The questions about a run are in `megaresume.runs`, and ``run`` is `megaresume.run`. Here are the other commands:

groups.py          the commands by task, for --help; welcome.py: what is said without a command
new.py, starts/    starting points for each trainer; completion.py: for bash and zsh
prepare.py         corpora; prepare_chat.py: conversations, prepare_shards.py: tar shards
patch.py           Megatron's scripts, edited
convert.py         a checkpoint for other ranks
demo.py, smoke.py  the main job on this machine, and on a cluster
"""
