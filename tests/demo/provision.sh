# What each worker does before it is of use: unpack packages, write its program, byte-compile what was unpacked, start.
# $1 is the program's source.
set -e
mkdir -p /opt/packages /work/notes
for package in /srv/packages/*.deb; do
    dpkg-deb -x "$package" /opt/packages
done
printf '%s' "$1" > /work/worker.py
i=0
while [ $i -lt 20 ]; do
    echo "note $i of the parent" > /work/notes/$i.txt
    i=$((i + 1))
done
export PYTHONPATH=/opt/packages/usr/lib/python3/dist-packages
python3 -m compileall -q /opt/packages || true
exec python3 -u /work/worker.py
