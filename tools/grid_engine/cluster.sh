#!/bin/bash
# Runs a Grid Engine cluster of two hosts, a01 and a02, on this machine for as long as a command runs, to try submitted
# jobs.
#
#   tools/grid_engine/cluster.sh FOLDER COMMAND...
#
# Needs root and Debian's packages (apt-get install gridengine-master gridengine-exec gridengine-client iproute2
# util-linux). Creates FOLDER for its files; FOLDER/bin has qsub, qstat, qdel, qacct and qhost that work from anywhere. The
# parallel environment `hosts` gives whole hosts, a slot each.
set -euo pipefail
test $# -ge 2 || { sed -n '5p' "$0"; exit 2; }
library=/usr/lib/gridengine  # the programs themselves: those on the PATH read another cluster's settings
for program in $library/sge_qmaster $library/sge_execd $library/qsub; do
  test -x $program || {
    echo "$program is not installed: apt-get install gridengine-master gridengine-exec gridengine-client" >&2; exit 3; }
done
test "$(id -u)" = 0 || { echo "needs root" >&2; exit 3; }
if [ -z "${TERAKOYA_GRID_ENGINE_INSIDE:-}" ]; then
  export TERAKOYA_GRID_ENGINE_INSIDE=1
  mkdir -p "$1"
  exec "$(dirname "$0")/../cluster/cluster.sh" "$1/hosts" 2 unshare --uts bash "$0" "$@"
fi
unset TERAKOYA_GRID_ENGINE_INSIDE
folder=$(realpath "$1")
shift
hostname desk  # as the addresses' file has it
root=$folder/root
mkdir -p "$root/default/common" "$folder"/{master,spool,tmp-a01,tmp-a02}
for each in bin lib util utilbin; do ln -sfn "/var/lib/gridengine/$each" "$root/$each"; done
cat > "$folder/settings.sh" << END
export SGE_ROOT=$root SGE_CELL=default SGE_ARCH=$(/usr/share/gridengine/util/arch)
export SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445 PATH=$library:\$PATH
END
source "$folder/settings.sh"
sed -e 's/^admin_user.*/admin_user none/' -e 's/^spooling_method.*/spooling_method classic/' \
  -e 's/^spooling_lib.*/spooling_lib libspoolc/' \
  -e "s|^spooling_params.*|spooling_params $root/default/common;$folder/master|" \
  -e "s|^qmaster_spool_dir.*|qmaster_spool_dir $folder/master|" -e "s|^binary_path.*|binary_path $library|" \
  /usr/share/gridengine/default-bootstrap > "$root/default/common/bootstrap"
echo desk > "$root/default/common/act_qmaster"
sed -e "s|^execd_spool_dir.*|execd_spool_dir $folder/spool|" -e 's/^m\(in_[ug]id\).*/m\1 0/' \
  -e 's/^load_report_time.*/load_report_time 00:00:02/' -e 's/^max_unheard.*/max_unheard 00:00:15/' \
  -e 's/^reschedule_unknown.*/reschedule_unknown 00:00:15/' \
  -e 's/^execd_params.*/execd_params ENABLE_ADDGRP_KILL=TRUE/' \
  /usr/share/gridengine/default-configuration > "$folder/configuration"
$library/spoolinit classic libspoolc "$root/default/common;$folder/master" init
$library/spooldefaults configuration "$folder/configuration"
$library/spooldefaults complexes /usr/share/gridengine/util/resources/centry
$library/spooldefaults usersets /usr/share/gridengine/util/resources/usersets
$library/spooldefaults managers root
stop() {
  set +e
  for host in a01 a02; do "$folder/hosts/enter" $host "kill \$(cat $folder/spool/$host/execd.pid)"; done
  kill "$(cat "$folder/master/qmaster.pid")"
}
trap stop EXIT
sge_qmaster
for _ in $(seq 60); do qconf -sh > "$folder/answer" 2>&1 && break; sleep 0.5; done
qconf -as desk > /dev/null
cat > "$folder/hosts.pe" << END
pe_name hosts
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule 1
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary TRUE
qsort_args NONE
END
qconf -Ap "$folder/hosts.pe"
for host in a01 a02; do
  qconf -ah $host
  qconf -as $host  # jobs submit those that continue them
  "$folder/hosts/enter" $host "source $folder/settings.sh; sge_execd"
done
qconf -sq | sed -e 's/^qname .*/qname work.q/' -e 's/^hostlist .*/hostlist a01 a02/' -e 's/^pe_list .*/pe_list hosts/' \
  -e 's/^slots .*/slots 1/' -e 's/^shell .*/shell \/bin\/bash/' -e 's/^rerun .*/rerun TRUE/' \
  -e 's/^notify .*/notify 00:01:00/' \
  -e "s|^tmpdir .*|tmpdir $folder/tmp-a01,[a02=$folder/tmp-a02]|" -e 's/^load_thresholds .*/load_thresholds NONE/' > "$folder/queue"
qconf -Aq "$folder/queue"
qconf -ssconf | sed -e 's/^schedule_interval.*/schedule_interval 0:0:1/' > "$folder/scheduler"
qconf -Msconf "$folder/scheduler"
for _ in $(seq 60); do [ "$(qstat -f | grep -c ' lx-amd64 *$')" = 2 ] && break; sleep 0.5; done
mkdir -p "$folder/bin"
for program in qsub qstat qdel qacct qhost; do
  cat > "$folder/bin/$program" << END
#!/bin/bash
source $folder/settings.sh
exec nsenter --target \$(cat $folder/master/qmaster.pid) --mount --net --uts --wd="\$PWD" $library/$program "\$@"
END
  chmod +x "$folder/bin/$program"
done
qhost
export PATH=$folder/bin:$PATH
"$@"
