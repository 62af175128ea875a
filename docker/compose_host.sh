#!/usr/bin/env bash
# One host of docker/compose.yaml: makes its keys, meets the others in the folder of keys, and serves or starts the job.
#   compose_host.sh serve
#   compose_host.sh lead HOST...
set -euo pipefail
keys=${KEYS:-/keys} port=${PORT:-2222} name=$(hostname)
mkdir -p ~/.ssh "$keys/hosts" && chmod 700 ~/.ssh

# Each host has a key of its own, which is published before anyone connects: so host keys can be checked.
[ -f ~/.ssh/host_key ] || ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/host_key
echo "[$name]:$port $(cut -d' ' -f1,2 ~/.ssh/host_key.pub)" >"$keys/hosts/$name.new"

wait_for() {
  for _ in $(seq 600); do [ -e "$1" ] && return; sleep 0.1; done
  echo "compose_host.sh: $name waited 60 s for $1" >&2
  exit 1
}

# Without Horovod: torchrun starts the ranks of its own host, so it runs on each. The first that fails ends the others.
torchrun_on() {
  local lead=$1 node=0 jobs=() host code
  for host; do
    run=(torchrun --nnodes $# --node-rank $node --master-addr "$lead" --nproc-per-node 1
      /opt/horovod-compress/examples/minimal_ddp.py)
    if [ $node = 0 ]; then "${run[@]}" & else ssh "$host" "${run[@]}" & fi
    jobs+=($!) node=$((node + 1))
  done
  while [ ${#jobs[@]} -gt 0 ]; do  # not wait -n, which misses what ended before
    for node in "${!jobs[@]}"; do
      if kill -0 "${jobs[node]}" 2>/dev/null; then continue; fi
      code=0 && wait "${jobs[node]}" || code=$?
      unset "jobs[node]"
      [ $code = 0 ] || { kill "${jobs[@]}" 2>/dev/null || true; return $code; }
    done
    sleep 0.2
  done
}

case ${1:-} in
  serve)
    wait_for "$keys/lead.pub"
    cp "$keys/lead.pub" ~/.ssh/authorized_keys && chmod 600 ~/.ssh/authorized_keys
    mv "$keys/hosts/$name.new" "$keys/hosts/$name"
    # Not as root: its own port, its own key, and nobody but the leading host.
    exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h ~/.ssh/host_key -o PidFile=none -o PasswordAuthentication=no \
      -o KbdInteractiveAuthentication=no -o UsePAM=no -o SetEnv="PATH=$PATH"
    ;;
  lead)
    shift
    [ -f ~/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/id_ed25519
    cp ~/.ssh/id_ed25519.pub "$keys/lead.pub.new" && mv "$keys/lead.pub.new" "$keys/lead.pub"
    mv "$keys/hosts/$name.new" "$keys/hosts/$name"
    for host; do wait_for "$keys/hosts/$host"; done
    cat "$keys"/hosts/* >~/.ssh/known_hosts
    printf 'Host *\n  Port %s\n  StrictHostKeyChecking yes\n  BatchMode yes\n' "$port" >~/.ssh/config
    # horovodrun's own command accepts any host key, and a command's options win over a configuration: leave that one out.
    mkdir -p ~/bin
    cat >~/bin/ssh <<'END'
#!/usr/bin/env bash
kept=()
while [ $# -gt 0 ]; do
  if [ "$1" = -o ] && [ "$2" = StrictHostKeyChecking=no ]; then shift 2; else kept+=("$1"); shift; fi
done
exec /usr/bin/ssh "${kept[@]}"
END
    chmod +x ~/bin/ssh
    export PATH=~/bin:$PATH
    hosts=$(printf '%s:1,' "$@")
    [ "${LAUNCHER:-horovodrun}" != torchrun ] || { torchrun_on "$@"; exit; }
    exec horovodrun -np $# -H "${hosts%,}" -p "$port" \
      python /opt/horovod-compress/examples/train.py --task text --method marsit ${TRAIN_ARGS:-}
    ;;
  *) echo "compose_host.sh: expected serve or lead HOST..., got ${1:-nothing}" >&2; exit 2 ;;
esac
