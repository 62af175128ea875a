#!/usr/bin/env bash
# Builds an image without a Docker engine, on Debian or Ubuntu with buildah and debootstrap, and runs it:
#   sudo apt-get install buildah debootstrap
#   sudo docker/build-local.sh                     # the runtime image, its self-check and the demo
#   sudo docker/build-local.sh --target test       # the image with the tests; runs docker/ci.sh in it
#   sudo docker/build-local.sh --cuda              # the same with the CUDA image; needs no GPU
# Steps run in a chroot, so neither namespaces nor a daemon are needed. Nothing is left behind, but what --keep names.
# pip's index, certificate and local wheels, and Horovod's wheels in the user's cache, are those of this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=runtime file=docker/Dockerfile.cpu keep="" base="" suite="" args=() command=()
usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit "${1:-2}"; }
while [ $# -gt 0 ]; do
  case $1 in
    --target) target=${2:?--target takes runtime, builder or test}; shift 2 ;;
    --cuda) file=docker/Dockerfile.cuda; shift ;;
    --base) base=${2:?--base takes a folder made by debootstrap}; shift 2 ;;
    --suite) suite=${2:?--suite takes a release, such as bookworm}; shift 2 ;;
    --keep) keep=${2:?--keep takes a folder}; shift 2 ;;
    --build-arg) args+=(--build-arg "${2:?--build-arg takes NAME=VALUE}"); shift 2 ;;
    --) shift; command=("$@"); break ;;
    -h | --help) usage 0 ;;
    *) echo "docker/build-local.sh: unknown argument $1" >&2; usage ;;
  esac
done
fail() { echo "docker/build-local.sh: $*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || fail "needs root, for chroots and the files' owners: sudo docker/build-local.sh"
for program in buildah debootstrap; do
  command -v "$program" >/dev/null || fail "$program is missing: apt-get install buildah debootstrap"
done

pip_setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }
links=${PIP_FIND_LINKS:-$(pip_setting find-links)}
index=${PIP_INDEX_URL:-$(pip_setting index-url)}
# The CPU image names an index itself: without it, another one may offer the torch with CUDA.
extra=""
[ "$file" = docker/Dockerfile.cpu ] || extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting extra-index-url)}
secret() { fail "$1 has a user name or password, which the image's history would keep"; }
case $links$index$extra in *@*) secret "PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" ;; esac
for arg in "${args[@]}"; do
  case $arg in PIP_*=*@*) secret "--build-arg ${arg%%=*}" ;; esac
done

scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/hvc-image.XXXXXX")
# Everything of ours lies below one folder: no image or container of the user is touched.
store=${keep:-$scratch/store}
bud() { buildah --root "$store/storage" --runroot "$scratch/run" --storage-driver "$driver" "$@"; }
finish() {
  status=$?
  [ -z "${container:-}" ] || bud rm "$container" >/dev/null 2>&1 || true
  # A chroot that was interrupted may have left something mounted: then nothing is removed.
  if grep -q " $scratch/" /proc/mounts; then
    echo "docker/build-local.sh: something is still mounted below $scratch, which stays" >&2
  else
    rm -rf "$scratch"
  fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM
mkdir -p "$store"

# vfs copies everything for every image: it is for where overlays cannot be mounted, as in many containers.
driver=vfs trial=$scratch/trial
mkdir -p "$trial"/{lower,upper,work,mounted}
options=lowerdir=$trial/lower,upperdir=$trial/upper,workdir=$trial/work
if mount -t overlay overlay -o "$options" "$trial/mounted" 2>/dev/null; then
  umount "$trial/mounted"
  driver=overlay
fi

step() { echo "== $(date +%T) $*"; }

make_base() {
  if [ -z "$base" ]; then
    step "a base system by debootstrap"
    suite=${suite:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
    base=$scratch/base
    debootstrap --variant=minbase "$suite" "$base" >"$scratch/debootstrap.log" || { tail "$scratch/debootstrap.log"; exit 1; }
  fi
  container=$(bud from scratch)
  bud add --quiet "$container" "$base" / >/dev/null
  bud commit --quiet --rm "$container" localhost/hvc-base >/dev/null
  container=""
}
# A new base, even of the same files, would be the end of every layer that --keep has kept.
if [ -n "$base$suite" ] || ! bud inspect --type image localhost/hvc-base >/dev/null 2>&1; then
  make_base
fi

# As this machine has it configured: packages come from where they come from here.
mounts=()
add() { [ ! -e "$1" ] || mounts+=(--volume "$1:$2:$3"); }
certificate=${PIP_CERT:-$(pip_setting cert)}
add "${certificate:-/nowhere}" /run/pip-ca.crt ro
case $links in /*) add "$links" "$links" ro ;; esac
args=(--build-arg "PIP_FIND_LINKS=$links" --build-arg "PIP_INDEX_URL=$index" "${args[@]}")
[ -z "$extra" ] || args=(--build-arg "PIP_EXTRA_INDEX_URL=$extra" "${args[@]}")
for url in $index $extra; do  # the pages of an index in a folder point to files beside that folder
  case $url in
    file:///*/*) folder=$(dirname "${url#file://}"); add "$folder" "$folder" ro ;;
    file:*) fail "an index in a folder should lie in a folder of its own, as file:///srv/pypi/simple, got $url" ;;
  esac
done
[ -z "$certificate" ] || args+=(--build-arg PIP_CERT=/run/pip-ca.crt)
# A copy, because the image's user must be able to write there.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/horovod-compress/wheels
mkdir -p "$scratch/cache/horovod-compress/wheels" "$cache"
cp -a "$cache/." "$scratch/cache/horovod-compress/wheels/"
chown -R 1001 "$scratch/cache"
add "$scratch/cache" /mnt/cache rw
args+=(--build-arg XDG_CACHE_HOME=/mnt/cache)

# buildah's chroot has a host name of its own that nothing resolves, and Horovod's Gloo crashes on such a name.
names=(--uts host --add-host "$(uname -n):127.0.0.1")

tag=localhost/horovod-compress:$target
[ "$file" = docker/Dockerfile.cpu ] || tag+=-cuda
step "$file, stage $target"
[ -z "$keep" ] || args+=(--layers)  # every step is an image then, and what has not changed is not done again
bud bud --isolation chroot --network host "${names[@]}" --build-arg BASE=localhost/hvc-base "${args[@]}" "${mounts[@]}" \
  --target "$target" --file "$file" --tag "$tag" .
step "built: layers, the newest first"
bud inspect --type image --format '{{range .OCIv1.History}}{{println .CreatedBy}}{{end}}' "$tag" \
  | cut -c1-110
bud images

container=$(bud from "${names[@]}" "$tag")
in_image() { bud run --isolation chroot --user trainer "$container" -- "$@"; }
if [ ${#command[@]} -gt 0 ]; then
  step "${command[*]}"
  in_image "${command[@]}"
elif [ "$target" = test ]; then
  step "docker/ci.sh"
  in_image docker/ci.sh
else
  step "the self-check"
  in_image /opt/horovod-compress/docker/self_check.sh
  step "the demo as documented"
  in_image python /opt/horovod-compress/examples/demo.py --quick
fi
step "all well"
