"""The program ``megaresume``: one file a command, which reads flags, asks the room that knows, and prints.

main.py            finds the command; errors become messages without a traceback
flags.py           what several commands read alike, and the packages that they need
prepare.py         corpora; prepare_chat.py: conversations, prepare_shards.py: tar shards
stream.py          what a stream holds
patch.py           Megatron's scripts, edited; ``run`` runs them with hooks: `megaresume.run`
inspect.py, latest.py, doctor.py, convert.py           checkpoints
trace.py, verify.py, report.py, plan.py                runs; plan_interval.py: how often to save
demo.py, smoke.py  the main job on this machine, and on a cluster
"""
