#!/bin/bash
# Runs hosts with their own names, addresses and processes on this machine for as long as a command runs: to try programs
# on several hosts, and the loss of one.
#
#   tools/cluster/cluster.sh FOLDER COUNT COMMAND...
#
# Needs root, iproute2 and util-linux. The hosts a01, a02, ... are kernel namespaces that share files, cores and memory with
# this machine; a bridge connects them with the desk, where COMMAND runs. Other processes do not see them or their names.
# All processes on the hosts end with COMMAND. The script creates FOLDER with
#
#   enter HOST COMMAND      runs COMMAND there as ssh would: the setting `ssh` of `terakoya launch hosts`; works from anywhere
#   link HOST down|up       disconnects the host's cable from the switch, so that packets are lost silently; connects it again
#   hosts                   the hosts' names, one a line
set -euo pipefail
test $# -ge 3 || { sed -n '5p' "$0"; exit 2; }
for program in ip unshare nsenter setpriv; do
  command -v $program > /dev/null || { echo "$program is not installed: apt-get install iproute2 util-linux" >&2; exit 3; }
done
test "$(id -u)" = 0 || { echo "needs root" >&2; exit 3; }
if [ -z "${TERAKOYA_CLUSTER_INSIDE:-}" ]; then  # the desk: a private network and private mounts
  export TERAKOYA_CLUSTER_INSIDE=1
  exec unshare --mount --net bash "$0" "$@"
fi
unset TERAKOYA_CLUSTER_INSIDE
mkdir -p "$1"
folder=$(realpath "$1")
count=$2
shift 2
names=$(seq -f 'a%02g' "$count")

address() { echo "10.77.0.$((10#${1#a}))"; }
{
  echo "127.0.0.1 localhost"
  echo "10.77.0.254 desk"
  for name in $names; do echo "$(address "$name") $name"; done
} > "$folder/etc-hosts"
mount --bind "$folder/etc-hosts" /etc/hosts
if [ -e /etc/nsswitch.conf ]; then  # there is no name server
  { grep -v '^hosts:' /etc/nsswitch.conf || true; echo "hosts: files"; } > "$folder/etc-nsswitch.conf"
  mount --bind "$folder/etc-nsswitch.conf" /etc/nsswitch.conf
fi
echo "$names" > "$folder/hosts"

ip link set lo up
ip link add switch type bridge
ip address add 10.77.0.254/24 dev switch
ip link set switch up
echo $$ > "$folder/desk.pid"
anchors=()
trap 'kill -KILL "${anchors[@]}" 2> /dev/null' EXIT
for name in $names; do
  setpriv --pdeathsig KILL unshare --mount --net --uts --pid --fork --kill-child --mount-proc sleep infinity &
  anchor=$!
  anchors+=("$anchor")
  disown $anchor  # the shell must not report its death
  echo "$anchor" > "$folder/$name.pid"
  until nsenter --target $anchor --mount --pid=/proc/$anchor/ns/pid_for_children test -d /proc/1 2> /dev/null \
    && [ "$(readlink /proc/$anchor/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
  ip link add "to-$name" type veth peer name eth0 netns $anchor
  ip link set "to-$name" master switch up
  nsenter --target $anchor --net --uts sh -c "
    hostname $name; ip link set lo up; ip address add $(address "$name")/24 dev eth0; ip link set eth0 up"
done

cat > "$folder/enter" << END
#!/bin/bash
# enter HOST COMMAND: runs COMMAND on HOST with the variables of a fresh login.
pid=\$(cat "$folder/\${1##*@}.pid") || exit 255
host=(--uts --pid=/proc/\$pid/ns/pid_for_children)
if [ "\$1" = desk ]; then host=(); fi
shift
exec nsenter --target \$pid --mount --net "\${host[@]}" \\
  env --ignore-environment HOME="\$HOME" PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 bash -c "\$*"
END
cat > "$folder/link" << END
#!/bin/bash
# link HOST down|up
exec nsenter --target \$(cat "$folder/desk.pid") --net ip link set "to-\$1" "\$2"
END
chmod +x "$folder/enter" "$folder/link"
touch "$folder/ready"
"$@"
