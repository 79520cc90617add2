#!/bin/bash
# Runs a Slurm cluster of two nodes, n1 and n2, on this machine for as long as a command runs, to try submitted jobs.
#
#   tools/slurm/cluster.sh FOLDER COMMAND...
#
# Needs root and Debian's slurm-wlm and munge (apt-get install slurm-wlm munge). Creates FOLDER for its files; only
# processes inside can resolve the nodes' names. Partitions: low and high; jobs of low are requeued when a job of high
# needs their nodes.
set -euo pipefail
test $# -ge 2 || { sed -n '4p' "$0"; exit 2; }
for program in slurmctld slurmd sbatch munged unshare; do
  command -v $program > /dev/null || { echo "$program is not installed: apt-get install slurm-wlm munge" >&2; exit 3; }
done
test "$(id -u)" = 0 || { echo "needs root" >&2; exit 3; }
if [ -z "${TERAKOYA_SLURM_INSIDE:-}" ]; then  # the mounts below are private
  export TERAKOYA_SLURM_INSIDE=1
  exec unshare --mount bash "$0" "$@"
fi
mkdir -p "$1"/{state,log}
folder=$(realpath "$1")
shift
host=$(hostname -s)
{ cat /etc/hosts; echo "127.0.0.1 n1 n2 $host"; } > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
cores=$(nproc)
munge=$(mktemp -d /tmp/terakoya-munge.XXXXXX)  # munge must reach it, and a socket's path must be short
cat > "$folder/slurm.conf" << END
ClusterName=terakoya
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket,cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdTimeout=20
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5,requeue_setup_env_fail
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd-%n
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free) CPUs=$cores RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free) CPUs=$cores RealMemory=4000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
END
export SLURM_CONF="$folder/slurm.conf"

# munge authenticates requests; it runs as the user munge with its own key and socket
dd if=/dev/urandom of="$munge/key" bs=128 count=1 status=none
chown -R munge: "$munge"
chmod 0755 "$munge"
chmod 0400 "$munge/key"
stop() {
  set +e
  for file in "$folder"/{slurmd-n1,slurmd-n2,slurmctld}.pid "$munge/pid"; do
    test -e "$file" && kill "$(cat "$file")" 2> /dev/null
  done
  rm -rf "$munge"
}
trap stop EXIT
setpriv --reuid munge --regid munge --clear-groups munged --key-file="$munge/key" \
  --socket="$munge/socket" --pid-file="$munge/pid" --log-file="$munge/log" --seed-file="$munge/seed" --force
slurmctld -c
slurmd -N n1
slurmd -N n2
for _ in $(seq 60); do
  test "$(sinfo --noheader --format=%T --partition=low 2> /dev/null)" = idle && break
  sleep 0.5
done
sinfo
"$@"
