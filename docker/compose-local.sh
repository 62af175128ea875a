#!/usr/bin/env bash
# Does what docker/compose.yaml does, without an engine: four hosts made on this machine, each with a network, a name,
# processes and a file system of its own, and docker/compose_host.sh in each. Needs root, sshd and `make setup` before:
#   sudo apt-get install openssh-server iproute2
#   sudo docker/compose-local.sh                        # trains under horovodrun, through ssh
#   sudo LAUNCHER=torchrun docker/compose-local.sh      # under torchrun
# Hosts see this machine's files and keep their own changes in memory. Nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD names=(rank0 rank1 rank2 rank3) tag=hvc$$ python=$PWD/.venv/bin
fail() { echo "docker/compose-local.sh: $*" >&2; exit 2; }
[ "$(id -u)" = 0 ] || fail "needs root, for namespaces: sudo docker/compose-local.sh"
[ -x "$python/horovodrun" ] || fail "there is no .venv with Horovod: make setup"
[ -x "${SSHD:=/usr/sbin/sshd}" ] || fail "sshd is missing: apt-get install openssh-server, or name it in SSHD"

scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/hvc-hosts.XXXXXX") servers=()
finish() {
  status=$?
  [ ${#servers[@]} = 0 ] || kill "${servers[@]}" 2>/dev/null || true
  wait
  for net in switch "${names[@]}"; do ip netns delete "$tag-$net" 2>/dev/null || true; done
  rm -rf --one-file-system "$scratch"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# One bridge, in a network of its own: nothing of this machine's is touched, and hosts reach nobody else.
ip netns add "$tag-switch"
ip -n "$tag-switch" link add name bridge type bridge
ip -n "$tag-switch" link set bridge up
echo "127.0.0.1 localhost" >"$scratch/hosts"
for i in "${!names[@]}"; do
  net=$tag-${names[i]}
  ip netns add "$net"
  ip -n "$tag-switch" link add name "port$i" type veth peer name eth0 netns "$net"
  ip -n "$tag-switch" link set "port$i" master bridge up
  ip -n "$net" addr add "10.77.0.$((i + 1))/24" dev eth0
  ip -n "$net" link set eth0 up
  ip -n "$net" link set lo up
  echo "10.77.0.$((i + 1)) ${names[i]}" >>"$scratch/hosts"
done
mkdir "$scratch/keys" && chmod 777 "$scratch/keys"

# The files are this machine's beneath what the host writes, which ends with it. Its user is not root, as in the image.
inside() {
  set -eu
  name=$1 scratch=$2 root=$3; shift 3
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 tmpfs /mnt
  mkdir /mnt/upper /mnt/work /mnt/root
  mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
  for folder in dev sys; do mount --rbind "/$folder" "/mnt/root/$folder"; done
  mount -t tmpfs -o mode=1777,size=1g tmpfs /mnt/root/dev/shm
  mount -t proc proc /mnt/root/proc
  mkdir -p /mnt/root/keys /mnt/root/run/sshd /mnt/root/opt
  mount --bind "$scratch/keys" /mnt/root/keys
  hostname "$name"
  cp "$scratch/hosts" /mnt/root/etc/hosts
  cp "$SSHD" /mnt/root/usr/sbin/sshd 2>/dev/null || [ "$SSHD" -ef /usr/sbin/sshd ]
  ln -sfn "$root" /mnt/root/opt/horovod-compress
  id trainer >/dev/null 2>&1 || useradd --root /mnt/root --create-home --shell /bin/bash trainer
  # Python may lie in the home of who made .venv, which no other user may enter.
  for folder in "$root" "$(realpath "$root/.venv")" "$(realpath "$root/.venv/bin/python")"; do
    while [ "$folder" != / ]; do chmod a+x "/mnt/root$folder"; folder=$(dirname "$folder"); done
  done
  exec chroot --userspec=trainer:trainer /mnt/root env -i HOME=/home/trainer USER=trainer \
    PATH="/opt/horovod-compress/.venv/bin:/usr/bin:/bin" LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}" \
    LAUNCHER="${LAUNCHER:-horovodrun}" TRAIN_ARGS="${TRAIN_ARGS:-}" /opt/horovod-compress/docker/compose_host.sh "$@"
}
export -f inside
export SSHD
host() {
  local name=$1; shift
  ip netns exec "$tag-$name" unshare --mount --uts --ipc --pid --fork --kill-child \
    bash -c 'inside "$@"' inside "$name" "$scratch" "$root" "$@"
}

for name in "${names[@]:1}"; do
  host "$name" serve >"$scratch/$name.log" 2>&1 &
  servers+=($!)
done
host "${names[0]}" lead "${names[@]}" || { tail -n 20 "$scratch"/*.log >&2; exit 1; }
