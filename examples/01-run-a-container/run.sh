#!/bin/sh
# Runs containers in microVMs with nothing but ctr. Needs the image localhost/busybox:1 (or set IMAGE).
set -eu
image=${IMAGE:-localhost/busybox:1}
id=example-$$

in_vm() {
    ctr run --rm --runtime io.containerd.ramet.v2 --snapshotter ramet "$@"
}

echo "kernel of the host: $(uname -r)"
echo "kernel in the container: $(in_vm "$image" "$id-a" uname -r)"
echo hi | in_vm "$image" "$id-b" sh -c 'read word; echo "read from stdin: $word"'
