#!/usr/bin/env bash
# Checks and measures Octavo on a GPU; --dry does the same on CPU with tiny shapes.
# Needs torch >= 2.11, triton >= 3.6 and transformers; small pure dependencies that are missing are
# installed into a folder of their own, nothing else on the machine is changed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
extra=${GPU_CHECK_PACKAGES:-$root/build/gpu_check}
# Else `python -m` puts the working directory first, whose kernels/ and config/ hide other packages.
export PYTHONSAFEPATH=1
export PYTHONPATH="$root/.src:$extra${PYTHONPATH:+:$PYTHONPATH}"
missing=$("$python" - <<'PROBE'
from importlib.util import find_spec
print(*[name for name in ("numba", "pydantic", "safetensors", "jinja2") if find_spec(name) is None])
PROBE
)
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # several names
    "$python" -m pip install --quiet --target "$extra" $missing || {
        echo "missing: $missing; where there is no network, put them into $extra before" >&2
        exit 2
    }
fi
case " $* " in
# Without a GPU the sweep over tiles runs in Triton's interpreter.
*" --dry "*) export TRITON_INTERPRET=1 ;;
esac
exec "$python" -m octavo.loadtest.gpu.check "$@"
