#!/usr/bin/env bash
# Train under torchrun, and stop in time.
#
#   one node        DATA=data.yaml RUN_DIR=/shared/runs/first ./torchrun.sh [FLAGS OF THE TRAINING ...]
#   several nodes   on every node: NNODES=2 NODE_RANK=0 (or 1 ...) MASTER_ADDR=address-of-node-0 ./torchrun.sh ...
#
# TERM, USR1, INT (Ctrl-C) or HUP to this script: all ranks on all nodes save at the end of their step, and everything
# ends with status 0. Run the same command again to continue, also with other numbers of nodes and ranks.
set -euo pipefail

# ==== settings: edit here, or set them in the environment =============================================================
RUN_DIR=${RUN_DIR:-runs/torchrun}         # checkpoints and records; several nodes: on storage that all share
DATA=${DATA:-data.yaml}                   # what to train on
PYTHON=${PYTHON:-python}                  # the Python that megaresume is installed in
PROCS_PER_NODE=${PROCS_PER_NODE:-auto}    # ranks on a node; auto: as many as there are GPUs, 1 without
NNODES=${NNODES:-1}                       # nodes; MIN:MAX, for example 1:3: continues with fewer, and takes in more
NODE_RANK=${NODE_RANK:-0}                 # which of the nodes this one is, from 0
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}     # several nodes: node 0, as the others reach it
MASTER_PORT=${MASTER_PORT:-29500}         # several nodes: a port on node 0 that nobody else uses; the same on all nodes
MAX_RESTARTS=${MAX_RESTARTS:-0}           # restarts in place after a failure, each from the last checkpoint
# With MIN:MAX or MAX_RESTARTS on several nodes: a node that has been silent for 3 times 5 s is lost, and the others wait
# 30 s for it or another one before they go on.
RENDEZVOUS=${RENDEZVOUS:-keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=30}

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
  local rendezvous
  if [[ $NNODES == 1 ]]; then
    rendezvous=(--standalone --local-addr 127.0.0.1)
  elif [[ $NNODES != *:* && $MAX_RESTARTS == 0 ]]; then
    # Every node knows its place: nothing has to be agreed on, and the port of the ranks is known.
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  else
    local address=$MASTER_ADDR
    if [[ $NODE_RANK != 0 ]]; then
      # Any node may come to be the first: the others must find it by an address, not by a name that they may not know.
      address=$("$PYTHON" -c 'if True:
        import socket, sys
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((sys.argv[1], 9))  # sends nothing
            print(way.getsockname()[0])' "$MASTER_ADDR") || refuse "MASTER_ADDR=$MASTER_ADDR is not known here"
    fi
    # While node 0 hosts the meeting point, whoever leaves or joins is noticed and all ranks start again in place.
    rendezvous=(
      --nnodes "$NNODES" --local-addr "$address"
      --rdzv-backend c10d --rdzv-id megaresume --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
      --rdzv-conf "is_host=$((NODE_RANK == 0)),$RENDEZVOUS"
    )
  fi
  if [[ $NNODES == *:* || $MAX_RESTARTS != 0 ]]; then
    # Otherwise ranks that are restarted in place would find the addresses of those before them in the agents' store, or
    # look for it on a first node that is gone. Where none are, the agents' store has its port already; one that torchrun
    # finds for the ranks may be taken by the time they bind it.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  fi
  COMMAND=(
    "$PYTHON" -m torch.distributed.run "${rendezvous[@]}"
    --nproc-per-node "$PROCS_PER_NODE" --max-restarts "$MAX_RESTARTS"
  )
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

launch_command
say "start: $NNODES node(s), $PROCS_PER_NODE rank(s) on each, MAX_RESTARTS=$MAX_RESTARTS, RUN_DIR=$RUN_DIR"
run_ranks "${COMMAND[@]}" "${TRAIN[@]}" "${FLAGS[@]}" "$@"

if ((STATUS != 0)); then
  say "failed: status $STATUS${STOPPED_BY:+, after $STOPPED_BY}; the same command goes on from the last checkpoint"
elif [[ $STOPPED_BY ]]; then
  say "stopped by $STOPPED_BY: the ranks have saved and ended; the same command goes on from there"
else
  say "ended with status 0: the run is over, or a flag has ended it"
fi
exit "$STATUS"
