#!/usr/bin/env bash
# Train under the deepspeed launcher, and stop in time.
#
#   one node              DATA=data.yaml RUN_DIR=/shared/runs/first ./deepspeed.sh [FLAGS OF THE TRAINING ...]
#   several, by ssh       on one of them: HOSTFILE=hosts.txt ./deepspeed.sh ...    (lines such as: node1 slots=8)
#   several, without ssh  on every node: NNODES=2 NODE_RANK=0 (or 1 ...) MASTER_ADDR=node-0 ./deepspeed.sh ...
#
# TERM, USR1, INT (Ctrl-C) or HUP to this script: all ranks on all nodes save at the end of their step, and everything
# ends with status 0. Run the same command again to continue, also with other numbers of nodes and ranks.
set -euo pipefail

# ==== settings: edit here, or set them in the environment =============================================================
RUN_DIR=${RUN_DIR:-runs/deepspeed}        # checkpoints and records; several nodes: on storage that all share
DATA=${DATA:-data.yaml}                   # what to train on
PYTHON=${PYTHON:-python}                  # the Python that megaresume is installed in
PROCS_PER_NODE=${PROCS_PER_NODE:-auto}    # ranks on a node; auto: as many as there are GPUs, 1 without
HOSTFILE=${HOSTFILE:-}                    # several nodes: their names and slots, as DeepSpeed reads them
NNODES=${NNODES:-1}                       # several nodes without HOSTFILE: how many
NODE_RANK=${NODE_RANK:-}                  # several nodes without ssh: which of them this one is, from 0
MASTER_ADDR=${MASTER_ADDR:-}              # several nodes: node 0, as the others reach it; by ssh DeepSpeed finds it
MASTER_PORT=${MASTER_PORT:-}              # several nodes: a port on node 0 that nobody else uses; default 29500
MAX_RESTARTS=${MAX_RESTARTS:-0}           # starts again after a failure, each from the last checkpoint

# What is trained. Flags given to this script come last, and win. Instead of the reference program, a Megatron script:
#   TRAIN=(-m megaresume.run pretrain_gpt.py --megaresume-data "$DATA" ...your flags...)
TRAIN=(
  -m megaresume.training --megaresume-data "$DATA"
  --num-layers 12 --hidden-size 768 --num-attention-heads 12
  --micro-batch-size 8 --global-batch-size 64 --train-iters 10000
  --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --lr-warmup-fraction 0.01
  --zero-stage 1 --save-interval 500
  # --bf16                                # on GPUs
)

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # threads of one rank on CPUs
# Where a node has several networks, the one that the ranks are to use (`ip addr` shows their names):
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# ==== nothing below needs editing =====================================================================================

STOP_FILE=$RUN_DIR/stop
FLAGS=(
  --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints"
  --exit-signal-handler --megaresume-stop-file "$STOP_FILE"
  --megaresume-log-samples "$RUN_DIR/samples.jsonl"
  --megaresume-elastic
)

launch_command() { # sets COMMAND
  local place=() hosts
  if [[ $HOSTFILE && ! $NODE_RANK ]]; then
    place=(--hostfile "$HOSTFILE" --master_port "${MASTER_PORT:-29500}")
    if [[ $MASTER_ADDR ]]; then place+=(--master_addr "$MASTER_ADDR"); fi
  elif [[ $HOSTFILE || $NNODES != 1 ]]; then
    hosts=$HOSTFILE
    if [[ ! $hosts ]]; then
      # Without ssh the names mean nothing: only how many lines there are, and how many ranks each.
      hosts=$(mktemp)
      # shellcheck disable=SC2064  # the name as it is now
      trap "rm -f '$hosts'" EXIT
      local node
      for ((node = 0; node < NNODES; node++)); do echo "node$node slots=$PROCS_PER_NODE"; done >"$hosts"
    fi
    place=(
      --hostfile "$hosts" --no_ssh --node_rank "$NODE_RANK"
      --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}"
    )
  else
    # A port of this process's own: two runs on one machine must not meet.
    place=(--hostfile /dev/null --master_port "${MASTER_PORT:-$((10000 + $$ % 20000))}")
    # DeepSpeed takes the GPUs of CUDA_VISIBLE_DEVICES only if no number is given.
    if [[ ! ${CUDA_VISIBLE_DEVICES:-} ]]; then place+=(--num_gpus "$PROCS_PER_NODE"); fi
  fi
  COMMAND=("$PYTHON" -m deepspeed.launcher.runner "${place[@]}")
  # What follows -m is a module to Python, and what follows --module to DeepSpeed.
  if [[ ${TRAIN[0]} == -m ]]; then TRAIN[0]=--module; fi
}

# ---- from here to the end of this part, torchrun.sh and deepspeed.sh are the same ------------------------------------
say() { echo "$(date +%FT%T) [${0##*/}, node ${NODE_RANK:-0}] $*"; }

refuse() { # WHAT [WHAT TO DO]
  say "refused: $1" >&2
  [[ $# -lt 2 ]] || say "  action: $2" >&2
  exit 2
}

# Prints the processes below process $1.
# shellcheck disable=SC2317  # called by a trap, which shellcheck does not follow
below() {
  local child
  for child in $(pgrep -P "$1"); do
    echo "$child"
    below "$child"
  done
}

STOPPED_BY=
# shellcheck disable=SC2317
on_signal() {
  if [[ $STOPPED_BY ]]; then
    say "$1 came: changes nothing, the ranks have been told"
    return 0 # without the 0 it would be the status of what the signal interrupted
  fi
  STOPPED_BY=$1
  say "$1 came: all ranks save at the end of their step, then this script ends"
  # For ranks that do not listen yet, and for those on other nodes. Removed by the run when it has saved.
  touch "$STOP_FILE" || say "the stop file $STOP_FILE cannot be created: ranks that still start will miss the signal"
  # The launcher would die of the signal, and its ranks with it: it was started so that it ignores it.
  local process
  if [[ $LAUNCHER ]]; then
    for process in $(below "$LAUNCHER"); do kill -USR1 "$process" 2>/dev/null || true; done
  fi
}

# Waits for process $1, however many signals come meanwhile; its status is in STATUS.
wait_for() {
  while true; do
    STATUS=0
    wait "$1" || STATUS=$?
    # Over 128 may be this process's own death by a signal, or a signal to this script while it waited.
    if ((STATUS <= 128)) || ! kill -0 "$1" 2>/dev/null; then break; fi
  done
  if ((STATUS > 128)); then
    local again=0
    wait "$1" || again=$?
    ((again == 127)) || STATUS=$again # 127: nothing is left to wait for, so it was its own
  fi
}

# Runs "$@", which a terminal's Ctrl-C and a signal to the whole group do not reach; its status is in STATUS.
run_ranks() {
  (
    trap '' USR1
    exec setsid "$@"
  ) &
  LAUNCHER=$!
  wait_for "$LAUNCHER"
  LAUNCHER=
}

LAUNCHER=
command -v "$PYTHON" >/dev/null || refuse "there is no PYTHON=$PYTHON" "set PYTHON to the one of your environment"
"$PYTHON" -c 'import megaresume' || refuse "PYTHON=$PYTHON has no megaresume" "set PYTHON to the one that has it"
[[ -f $DATA ]] || refuse "there is no DATA=$DATA (in $PWD)" "set DATA to your data.yaml"
[[ $NNODES =~ ^[0-9]+(:[0-9]+)?$ ]] || refuse "NNODES=$NNODES is neither a number nor MIN:MAX"
[[ ${NODE_RANK:-0} =~ ^[0-9]+$ ]] || refuse "NODE_RANK=$NODE_RANK is not a number"
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || refuse "MAX_RESTARTS=$MAX_RESTARTS is not a number"
if [[ $PROCS_PER_NODE == auto ]]; then
  PROCS_PER_NODE=$( (nvidia-smi -L 2>/dev/null || true) | grep -c ^GPU || true)
  if [[ $PROCS_PER_NODE == 0 ]]; then PROCS_PER_NODE=1; fi
fi
[[ $PROCS_PER_NODE =~ ^[1-9][0-9]*$ ]] || refuse "PROCS_PER_NODE=$PROCS_PER_NODE is not a number of ranks"
mkdir -p "$RUN_DIR" || refuse "RUN_DIR=$RUN_DIR cannot be created"

# DeepSpeed compiles at the start where it finds a ninja that is not that of its own environment.
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH
export PATH PYTHONUNBUFFERED=1
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE # of a job around this one

# What a stop that came too late for the last attempt has left would stop this one.
if [[ ${NODE_RANK:-0} == 0 ]]; then rm -f "$STOP_FILE"; fi
trap 'on_signal TERM' TERM
trap 'on_signal USR1' USR1
trap 'on_signal INT' INT
trap 'on_signal HUP' HUP
# ---- end of what torchrun.sh and deepspeed.sh share ------------------------------------------------------------------

[[ ! $HOSTFILE || -f $HOSTFILE ]] || refuse "there is no HOSTFILE=$HOSTFILE" "lines such as: node1 slots=8"
if [[ $NNODES != 1 && ! $HOSTFILE && ! $NODE_RANK ]]; then
  refuse "NNODES=$NNODES, and neither HOSTFILE nor NODE_RANK" "one of the two: with ssh, or on every node without"
fi
if [[ $NODE_RANK && ($HOSTFILE || $NNODES != 1) && ! $MASTER_ADDR ]]; then
  refuse "NODE_RANK without MASTER_ADDR" "MASTER_ADDR=address-of-node-0, the same on all nodes"
fi
launch_command
say "start: ${HOSTFILE:-$NNODES node(s)}, $PROCS_PER_NODE rank(s) on each, MAX_RESTARTS=$MAX_RESTARTS, RUN_DIR=$RUN_DIR"
for ((attempt = 0; ; attempt++)); do
  run_ranks "${COMMAND[@]}" "${TRAIN[@]}" "${FLAGS[@]}" "$@"
  if ((STATUS == 0 || attempt == MAX_RESTARTS)) || [[ $STOPPED_BY ]]; then break; fi
  say "failed: status $STATUS; restart $((attempt + 1)) of $MAX_RESTARTS from the last checkpoint"
done

if ((STATUS != 0)); then
  say "failed: status $STATUS${STOPPED_BY:+, after $STOPPED_BY}; the same command goes on from the last checkpoint"
elif [[ $STOPPED_BY ]]; then
  say "stopped by $STOPPED_BY: the ranks have saved and ended; the same command goes on from there"
else
  say "ended with status 0: the run is over, or a flag has ended it"
fi
exit "$STATUS"
