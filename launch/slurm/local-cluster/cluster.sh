#!/usr/bin/env bash
# A real Slurm cluster on one machine, for testing: slurmctld, some slurmd, munge. For root, for any user, in CI; no
# systemd, no database, nothing in /etc.
#
#     cluster.sh start                 start it; when it runs already, nothing happens
#     eval "$(cluster.sh env)"         from here on sinfo, sbatch, srun ... in this shell mean this cluster
#     cluster.sh status                its mode and its nodes; exit status 1 when it is not running
#     cluster.sh exec n2 CMD ...       run CMD inside node n2
#     cluster.sh kill-node n2          cut its power: every process of the node dies at once, unannounced
#     cluster.sh kill-slurmd n2        kill only its slurmd; its jobs live on
#     cluster.sh start-node n2         switch it on again, or start its slurmd again
#     cluster.sh stop                  end all jobs and all daemons; nothing is left but the logs
#
# Two partitions over all nodes: `batch` (default), and `urgent`, whose jobs take the nodes of batch jobs away:
# `sbatch -p urgent ...` preempts as a busy cluster does.
#
# Two modes:
#   ns     every node is a set of namespaces (network, processes, host name, mounts, /dev/shm) with a cable to a bridge:
#          own name, own address, own process table. Needs root, or a user namespace with its capabilities.
#   flat   every node is a slurmd on a port of 127.0.0.1; all have this machine's name and address. Needs nothing.
set -uo pipefail

# ---------------------------------------------------------------- settings: each can come from the environment
# Where everything of the cluster lives. At most 80 characters: a Unix socket lies in it.
CLUSTER_ROOT=${CLUSTER_ROOT:-${XDG_RUNTIME_DIR:-/tmp}/megaresume-slurm-$UID}
# ns, flat, or auto: ns where it can be had.
CLUSTER_MODE=${CLUSTER_MODE:-auto}
# Nodes are called n1, n2, ...
CLUSTER_NODES=${CLUSTER_NODES:-4}
# CPUs and MB of memory that every node says it has: they may be more than this machine's.
CLUSTER_CPUS=${CLUSTER_CPUS:-4}
CLUSTER_MEMORY=${CLUSTER_MEMORY:-16000}
# "GPUs" that every node says it has: they are counted and handed out, but there is no device behind them.
CLUSTER_GPUS=${CLUSTER_GPUS:-4}
# 0 to 99: a second cluster beside the first needs another CLUSTER_ROOT and another number. The next four follow from it.
CLUSTER_ID=${CLUSTER_ID:-0}
CLUSTER_NETWORK=${CLUSTER_NETWORK:-10.231.$((100 + CLUSTER_ID))}
CLUSTER_BRIDGE=${CLUSTER_BRIDGE:-mrslurm$CLUSTER_ID}
CLUSTER_CONTROLLER_PORT=${CLUSTER_CONTROLLER_PORT:-$((16800 + CLUSTER_ID))}
CLUSTER_NODE_PORT=${CLUSTER_NODE_PORT:-$((17000 + 100 * CLUSTER_ID))}
# Seconds. A requeued job starts again this much later, and a step's credential must reach its node within it.
CLUSTER_CRED_EXPIRE=${CLUSTER_CRED_EXPIRE:-5}
# Seconds without an answer until a node counts as down.
CLUSTER_NODE_TIMEOUT=${CLUSTER_NODE_TIMEOUT:-10}
# Seconds between SIGTERM and SIGKILL when a job is ended, and between a preemption's signal and its end.
CLUSTER_KILL_WAIT=${CLUSTER_KILL_WAIT:-15}
CLUSTER_PREEMPT_GRACE=${CLUSTER_PREEMPT_GRACE:-30}
# Further lines of slurm.conf.
CLUSTER_CONF=${CLUSTER_CONF:-}
# ---------------------------------------------------------------- nothing below needs editing

SELF=$(readlink -f "${BASH_SOURCE[0]}")
RUN=$CLUSTER_ROOT/run LOGS=$CLUSTER_ROOT/log
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$CLUSTER_ROOT/slurm.conf
# Later commands take the settings that the cluster was started with.
SETTINGS=$RUN/settings
STARTED_WITH=(CLUSTER_MODE CLUSTER_NODES CLUSTER_NETWORK CLUSTER_BRIDGE CLUSTER_CONTROLLER_PORT CLUSTER_NODE_PORT)

say() { echo "cluster.sh: $*" >&2; }
die() { say "ERROR: $*"; exit 1; }
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$SELF"; }

nodes() { seq -f 'n%.0f' "$CLUSTER_NODES"; }
number() { echo "${1#n}"; }
namespaces() { [ "$CLUSTER_MODE" = ns ]; }
known_node() { nodes | grep -qx -- "${1:-}" || die "no node '${1:-}'; there are: $(nodes | xargs)"; }

# wait_for SECONDS COMMAND ...: until it succeeds.
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.05
  done
}

# ---------------------------------------------------------------- processes
# There are no pid files: every daemon carries this cluster and its own name in its environment, whatever happened since.

# Ids of the processes that have all of these NAME=VALUE in their environment.
processes_with() {
  local found=(/proc/[0-9]*/environ) entry
  for entry in "$@"; do
    mapfile -t found < <(grep -lszxF -- "$entry" "${found[@]}" /dev/null)
  done
  printf '%s\n' "${found[@]}" | grep -oE '[0-9]+' | sort -n
}
daemon() { processes_with "CLUSTER_DAEMON=$1" "CLUSTER_DAEMON_OF=$CLUSTER_ROOT"; }
daemons() { processes_with "CLUSTER_DAEMON_OF=$CLUSTER_ROOT"; }
running() { [ -n "$(daemon "$1")" ]; }

# slurmstepd overwrites the beginning of its environment: it is known by its log.
stepds() {
  find /proc/[0-9]*/fd -lname "$LOGS/slurmd.${1:-*}.log*" 2>/dev/null | cut -d / -f 3 | sort -un
}

# Ids of the processes of jobs: of one node, or of all.
tasks() {
  local file
  stepds "$@"
  for file in $(processes_with "SLURM_CONF=$SLURM_CONF" ${1:+"SLURMD_NODENAME=$1"}); do
    grep -qsz '^SLURMD_NODENAME=' "/proc/$file/environ" && echo "$file"
  done
}

# background NAME COMMAND ...: a daemon in a session of its own.
background() {
  local name=$1
  shift
  CLUSTER_DAEMON=$name CLUSTER_DAEMON_OF=$CLUSTER_ROOT setsid -- "$@" </dev/null >>"$LOGS/$name.out" 2>&1 9>&- &
  disown
  wait_for 10 running "$name" || die "$name did not start: $(tail -n 3 "$LOGS/$name.out")"
}

end_processes() {
  [ $# = 0 ] || kill -KILL "$@" 2>/dev/null
}

# Whether there are none left. They are killed each time: some may have been started while the others were looked up.
# None twice: a slurmstepd that has just started has overwritten its environment, and not yet opened its log.
all_gone() {
  local left look
  for look in first second; do
    [ "$look" = first ] || sleep 0.2
    left=$(daemons; tasks)
    # shellcheck disable=SC2086  # one word a process
    end_processes $left
    [ -z "$left" ] || return 1
  done
}

# ---------------------------------------------------------------- configuration

node_lines() {
  local name address
  for name in $(nodes); do
    if namespaces; then
      address="NodeAddr=$CLUSTER_NETWORK.$(number "$name") Port=$CLUSTER_NODE_PORT"
    else
      address="NodeHostName=$(hostname) NodeAddr=127.0.0.1 Port=$((CLUSTER_NODE_PORT + $(number "$name")))"
    fi
    echo "NodeName=$name $address CPUs=$CLUSTER_CPUS RealMemory=$CLUSTER_MEMORY Gres=gpu:$CLUSTER_GPUS State=UNKNOWN"
  done
}

# Names are never looked up: every host has its address beside it.
controller_address() { if namespaces; then echo "$CLUSTER_NETWORK.254"; else echo 127.0.0.1; fi; }

slurm_conf() {
  cat <<END
ClusterName=local
SlurmctldHost=$(hostname)($(controller_address))
SlurmctldPort=$CLUSTER_CONTROLLER_PORT
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$RUN/munge.socket,cred_expire=$CLUSTER_CRED_EXPIRE

StateSaveLocation=$CLUSTER_ROOT/state
SlurmdSpoolDir=$CLUSTER_ROOT/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.%n.pid
SlurmctldLogFile=$LOGS/slurmctld.log
SlurmdLogFile=$LOGS/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# The history of jobs, as there is no database for sacct.
JobCompType=jobcomp/filetxt
JobCompLoc=$LOGS/jobs.txt
AccountingStorageType=accounting_storage/none

# No control groups: a container rarely has them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
# Each start begins with an empty queue: ids from the clock, so that none comes twice in logs that are appended to.
FirstJobId=$(($(date +%s) % 800000 + 100000))
MaxJobId=60000000
MinJobAge=3600

# A node that was set down stays down until it is resumed; one that did not answer comes back by itself.
ReturnToService=1
JobRequeue=1
SlurmctldTimeout=10
SlurmdTimeout=$CLUSTER_NODE_TIMEOUT
TCPTimeout=5
MessageTimeout=20
KillWait=$CLUSTER_KILL_WAIT
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0

# A preempted job gets the signal that it asked for with --signal, then its grace time, and is then requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=DEFAULT Nodes=n[1-$CLUSTER_NODES] MaxTime=INFINITE State=UP
PartitionName=batch Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$CLUSTER_PREEMPT_GRACE
PartitionName=urgent Default=NO PriorityTier=10 PreemptMode=OFF

$(node_lines)
$CLUSTER_CONF
END
  # Where 127.0.0.1 is the only address, the C library resolves no IPv4 address at all, unless IPv6 is asked for too.
  if ! namespaces && [ -z "$(hostname -I 2>/dev/null | tr -d ' \n')" ]; then
    echo "CommunicationParameters=EnableIPv6"
  fi
}

gres_conf() {
  local gpu file
  mkdir -p "$CLUSTER_ROOT/gpus"
  for ((gpu = 0; gpu < CLUSTER_GPUS; gpu++)); do
    file=$CLUSTER_ROOT/gpus/gpu$gpu
    # Any file passes for a device, at the price of a complaint in the log; a user may not make a real one.
    [ -e "$file" ] || mknod "$file" c 1 3 2>/dev/null || : >"$file"
  done
  ((CLUSTER_GPUS == 0)) || echo "NodeName=n[1-$CLUSTER_NODES] Name=gpu File=$CLUSTER_ROOT/gpus/gpu[0-$((CLUSTER_GPUS - 1))]"
}

hosts() {
  local name
  echo "127.0.0.1 localhost"
  echo "$(controller_address) $(hostname)"
  for name in $(nodes); do echo "$CLUSTER_NETWORK.$(number "$name") $name"; done
}

write_configuration() {
  slurm_conf >"$SLURM_CONF"
  gres_conf >"$CLUSTER_ROOT/gres.conf"
  # slurmd always loads such a plugin, and this one asks nothing of the machine as long as nobody asks it for anything.
  echo "CgroupPlugin=cgroup/v1" >"$CLUSTER_ROOT/cgroup.conf"
  hosts >"$CLUSTER_ROOT/hosts"
  # Without a name server a name that is not known fails at once, instead of after 20 seconds.
  : >"$CLUSTER_ROOT/resolv.conf"
  [ -e "$CLUSTER_ROOT/munge.key" ] || (umask 077 && head -c 1024 /dev/urandom >"$CLUSTER_ROOT/munge.key")
  local setting
  for setting in "${STARTED_WITH[@]}"; do printf '%s=%q\n' "$setting" "${!setting}"; done >"$SETTINGS"
}

# ---------------------------------------------------------------- nodes

can_have_namespaces() {
  local probe=${CLUSTER_BRIDGE}t
  unshare --net --uts --ipc --mount --pid --fork --mount-proc \
    sh -c 'hostname n1 && ip link set lo up && mount -t tmpfs none /dev/shm' >/dev/null 2>&1 || return 1
  ip link add "$probe" type bridge 2>/dev/null && ip link del "$probe" &&
    ip link add "${probe}0" type veth peer name "${probe}1" 2>/dev/null && ip link del "${probe}0"
}

cable() { echo "${CLUSTER_BRIDGE}n$(number "$1")"; }  # its end at the bridge
plug() { echo "${CLUSTER_BRIDGE}e$(number "$1")"; }   # its end in the node, until that calls it eth0
has_link() { ip link show "$1" >/dev/null 2>&1; }

# Process 1 of a node, as this machine numbers it: the last number in NSpid is the one inside.
node_init() {
  local pid
  for pid in $(daemon "$1"); do
    grep -qsE '^NSpid:.*\s[0-9]+\s+1$' "/proc/$pid/status" && echo "$pid" && return
  done
  return 1
}

node_slurmd() {
  local pid
  for pid in $(daemon "$1"); do
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = slurmd ] && echo "$pid"
  done
}

in_node() {
  local name=$1 init
  shift
  if namespaces; then
    init=$(node_init "$name") || die "$name is switched off; cluster.sh start-node $name"
    nsenter --target "$init" --net --uts --ipc --mount --pid -- "$@"
  else
    SLURMD_NODENAME=$name "$@"
  fi
}

# Runs as process 1 of a node. It outlives slurmd, so that killing slurmd is not a power cut.
boot() {
  local name=$1
  hostname "$name"
  mount --bind "$CLUSTER_ROOT/hosts" /etc/hosts
  mount --bind "$CLUSTER_ROOT/resolv.conf" /etc/resolv.conf
  mount -t tmpfs tmpfs /dev/shm
  mount -t sysfs sysfs /sys 2>/dev/null # so that /sys/class/net shows the node's own interfaces
  ip link set lo up
  wait_for 30 has_link "$(plug "$name")" || die "no cable"
  ip link set "$(plug "$name")" name eth0
  ip addr add "$CLUSTER_NETWORK.$(number "$name")/24" dev eth0
  ip link set eth0 up
  ip route add default via "$CLUSTER_NETWORK.254"
  slurmd -D -N "$name" &
  sleep infinity &
  while :; do wait; done
}

start_namespace_node() {
  local name=$1 clock=()
  ip link del "$(cable "$name")" 2>/dev/null
  ip link add "$(cable "$name")" type veth peer name "$(plug "$name")" || die "cannot lay a cable to $name"
  ip link set "$(cable "$name")" master "$CLUSTER_BRIDGE" up
  # A boot time of its own, where the kernel can: slurmctld then sees that a node has rebooted, and loses its job at once.
  if unshare --time --boottime -1 --fork true 2>/dev/null; then
    clock=(--time --boottime "-$(($(cut -d. -f1 /proc/uptime) - 1))")
  fi
  background "$name" unshare --net --uts --ipc --mount --pid "${clock[@]}" --fork --kill-child --mount-proc \
    bash "$SELF" __boot "$name"
  wait_for 10 node_init "$name" >/dev/null || die "$name did not boot: $(tail -n 3 "$LOGS/$name.out")"
  ip link set "$(plug "$name")" netns "$(node_init "$name")" || die "cannot plug the cable into $name"
}

start_node() {
  local name=$1
  mkdir -p "$CLUSTER_ROOT/spool/$name"
  [ -z "$(node_slurmd "$name")" ] || return 0
  if namespaces && node_init "$name" >/dev/null; then
    background "$name" nsenter --target "$(node_init "$name")" --net --uts --ipc --mount --pid -- slurmd -D -N "$name"
  elif namespaces; then
    start_namespace_node "$name"
  else
    background "$name" slurmd -D -N "$name"
  fi
}

kill_node() {
  if namespaces; then
    end_processes "$(node_init "$1")" # and the kernel ends all others of the namespace
  else
    # shellcheck disable=SC2046  # one word a process
    end_processes $(daemon "$1") $(tasks "$1")
  fi
  # They die one after the other: who switched it on meanwhile would find a slurmd, and start none.
  wait_for 20 is_off "$1" || die "processes of $1 do not die: $(daemon "$1" | xargs)"
}

is_off() { ! running "$1" && { namespaces || [ -z "$(tasks "$1")" ]; }; }

# ---------------------------------------------------------------- the cluster

nodes_in_state() { timeout 20 sinfo --noheader --Node --partition batch "$@" --format %N 2>/dev/null | sort -u | wc -l; }
all_nodes_answer() { [ "$(nodes_in_state --responding)" = "$CLUSTER_NODES" ]; }
all_nodes_idle() { [ "$(nodes_in_state --states idle)" = "$CLUSTER_NODES" ]; }
idle_or_broken() { all_nodes_idle || ! running slurmctld; }

# One start or stop at a time.
lock() {
  mkdir -p "$CLUSTER_ROOT" || die "cannot make $CLUSTER_ROOT"
  exec 9>"$CLUSTER_ROOT/lock" || die "cannot write to $CLUSTER_ROOT"
  flock 9
}

start() {
  lock
  local wanted_mode=$CLUSTER_MODE wanted_nodes=$CLUSTER_NODES
  load_settings
  if running slurmctld && running munged && all_nodes_answer; then
    say "already running: $CLUSTER_NODES nodes, mode $CLUSTER_MODE"
    return 0
  fi
  end_everything
  CLUSTER_MODE=$wanted_mode CLUSTER_NODES=$wanted_nodes
  check_settings
  rm -rf "$CLUSTER_ROOT"/{state,spool,run,log}
  mkdir -p "$CLUSTER_ROOT"/{state,spool,run,log}
  chmod 755 "$CLUSTER_ROOT" "$RUN"
  write_configuration
  background munged munged -F --force --key-file="$CLUSTER_ROOT/munge.key" --socket="$RUN/munge.socket" \
    --pid-file="$RUN/munged.pid" --log-file="$LOGS/munged.log" --seed-file="$RUN/munged.seed"
  wait_for 30 test -S "$RUN/munge.socket" || die "munged does not answer: $(tail -n 3 "$LOGS"/munged.{out,log})"
  if namespaces; then
    ip link add "$CLUSTER_BRIDGE" type bridge || die "cannot make the bridge $CLUSTER_BRIDGE; another CLUSTER_ID?"
    ip addr add "$CLUSTER_NETWORK.254/24" dev "$CLUSTER_BRIDGE"
    ip link set "$CLUSTER_BRIDGE" up
  fi
  background slurmctld slurmctld -D
  local name
  for name in $(nodes); do start_node "$name"; done
  if ! wait_for 120 idle_or_broken || ! all_nodes_idle; then
    running slurmctld && sinfo --Node --long >&2
    tail -n 5 "$LOGS"/*.out >&2
    end_everything
    die "the nodes did not become idle; logs in $LOGS, and their ends above. 'Address already in use' is another" \
      "cluster: set CLUSTER_ID"
  fi
  say "running: $CLUSTER_NODES nodes, mode $CLUSTER_MODE; now: eval \"\$($0 env)\""
}

check_settings() {
  local program
  for program in slurmctld slurmd srun munged; do
    command -v "$program" >/dev/null || die "$program not found; install it by ${SELF%/*}/install.sh"
  done
  [ "${#CLUSTER_ROOT}" -le 80 ] || die "CLUSTER_ROOT has ${#CLUSTER_ROOT} characters, at most 80: $CLUSTER_ROOT"
  case $CLUSTER_MODE in
    auto) if can_have_namespaces; then CLUSTER_MODE=ns; else CLUSTER_MODE=flat; fi ;;
    ns) can_have_namespaces || die "mode ns needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN), ip and unshare; or flat" ;;
    flat) ;;
    *) die "CLUSTER_MODE=$CLUSTER_MODE: ns, flat or auto" ;;
  esac
  if [ "$(id -u)" = 0 ] && grep -qs deny /proc/self/setgroups; then
    die "root of a user namespace that may not change groups: Slurm refuses. Run all of it under:" \
      "unshare -U --map-user=1000 --map-group=1000 --keep-caps"
  fi
}

# Also what an interrupted start, or a removed CLUSTER_ROOT, has left.
end_everything() {
  local name
  wait_for 20 all_gone || die "processes that do not die: $(daemons | xargs)"
  if namespaces || has_link "$CLUSTER_BRIDGE"; then
    for name in $(nodes); do ip link del "$(cable "$name")"; done 2>/dev/null
    ip link del "$CLUSTER_BRIDGE" 2>/dev/null
  fi
  rm -rf "$RUN"
}

stop() {
  [ -d "$CLUSTER_ROOT" ] || { say "not running"; return 0; }
  lock
  load_settings
  end_everything
  say "stopped; logs in $LOGS"
}

status() {
  running slurmctld || { say "not running"; exit 1; }
  say "mode $CLUSTER_MODE, $SLURM_CONF"
  sinfo --Node --partition batch --format '%N %T %C %E'
}

load_settings() {
  # shellcheck disable=SC1090  # written by write_configuration
  [ ! -e "$SETTINGS" ] || . "$SETTINGS"
}

[ "${1:-}" = start ] || load_settings
case ${1:-} in
  start | stop | status) "$1" ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  exec) known_node "${2:-}" && in_node "${@:2}" ;;
  kill-node) known_node "${2:-}" && kill_node "$2" ;;
  kill-slurmd) known_node "${2:-}" && end_processes "$(node_slurmd "$2")" ;;
  start-node) known_node "${2:-}" && start_node "$2" ;;
  __boot) boot "$2" ;;
  -h | --help | help) usage ;;
  *) usage >&2 && exit 2 ;;
esac
