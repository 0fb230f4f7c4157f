#!/bin/sh
# A running container becomes an image, and the image runs as forks. Needs localhost/busybox:1 (or set IMAGE).
set -eu
image=${IMAGE:-localhost/busybox:1}
id=example-$$
warm=localhost/example-$$:warm
scratch=$(mktemp -d)

in_vm() {
    ctr run --rm --runtime io.containerd.ramet.v2 --snapshotter ramet "$@"
}
cleanup() {
    exec 3>&- || true
    wait || true
    ctr images rm --sync "$warm" >/dev/null 2>&1 || true
    rm -r "$scratch"
}
trap cleanup EXIT

# The parent numbers the lines that it reads. It is given one and then waits for the next.
mkfifo "$scratch/in"
in_vm "$image" "$id" sh -c 'n=0; while read line; do n=$((n+1)); echo "$n $line"; done' <"$scratch/in" >"$scratch/out" &
exec 3>"$scratch/in"
echo parent >&3
until grep -q '1 parent' "$scratch/out"; do sleep 0.2; done

ramet checkpoint "$id" "$warm"

# Each fork goes on in the middle of the parent's read, with its own input.
echo "fork 1: $(echo one | in_vm "$warm" "$id-1")"
echo "fork 2: $(echo two | in_vm "$warm" "$id-2")"

# The parent never noticed.
echo itself >&3
until grep -q '2 itself' "$scratch/out"; do sleep 0.2; done
echo "parent: $(tail -n 1 "$scratch/out")"
