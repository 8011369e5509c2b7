#!/usr/bin/env bash
# A real Slurm of two nodes on this machine, for tests of what `sbatch` is given. As root, on Debian:
#   apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge
#   slurm_local.sh start DIR     configuration, state and logs in DIR (absolute); `sinfo` then shows n1 and n2
#   slurm_local.sh stop DIR      ends the processes that this DIR's start made, by their ids
# SLURM_CONF=DIR/slurm.conf must be exported for sbatch, srun, squeue, scancel.
set -euo pipefail
what=${1:?start or stop}; dir=${2:?a folder}
pids() { cat "$dir"/*.pid 2>/dev/null || true; }
case $what in
stop) for p in $(pids); do kill "$p" 2>/dev/null || true; done; exit 0 ;;
start) ;;
*) echo "start or stop" >&2; exit 2 ;;
esac
mkdir -p "$dir"/state "$dir"/spool-n1 "$dir"/spool-n2 /run/munge
cat > "$dir/slurm.conf" <<C
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
ReturnToService=2
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/ctld.log
SlurmdLogFile=$dir/slurmd-%n.log
NodeName=n[1-2] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
C
export SLURM_CONF="$dir/slurm.conf"
if ! munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then
  [ -f /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 2>/dev/null
  chown munge: /etc/munge/munge.key /run/munge; chmod 400 /etc/munge/munge.key
  su -s /bin/bash munge -c "/usr/sbin/munged --pid-file /run/munge/autoshard-test.pid"
  cp /run/munge/autoshard-test.pid "$dir/munged.pid"
fi
slurmctld; slurmd -N n1; slurmd -N n2
for _ in $(seq 30); do sinfo -h -o %t 2>/dev/null | grep -q idle && { sinfo; exit 0; }; sleep 1; done
tail -5 "$dir"/*.log >&2; exit 1
