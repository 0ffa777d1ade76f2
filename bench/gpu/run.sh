#!/bin/sh
# Measures modulm on the GPU of this machine, in at most 9 minutes, correctness first:
#
#   bench/gpu/run.sh [--out FOLDER] [--sections a,b] [--budget SECONDS]   on a GPU
#   bench/gpu/run.sh --dry-run                                            tiny shapes in Triton's interpreter
#
# Needs a Python (PYTHON, or python3) with torch, triton and what modulm depends on; wheels in .whl/
# of the repository are installed into a folder of their own if they are there. Nothing is installed
# of modulm itself: its packages are announced to Python by metadata made here.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
if [ -d "$here/.whl" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$place/site" "$here"/.whl/*.whl
fi
"$python" "$here/bench/gpu/announce.py" "$here" "$place/modulm"
case " $* " in *" --dry-run "*) TRITON_INTERPRET=1; export TRITON_INTERPRET ;; esac
PYTHONPATH="$(cat "$place/modulm/paths"):$place/modulm:$place/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
status=0
timeout 540 "$python" "$here/bench/gpu/measure.py" "$@" || status=$?
exit $status
