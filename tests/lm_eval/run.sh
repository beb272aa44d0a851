#!/bin/sh
# Runs the tests of the command for lm-eval in a virtual environment of its own, which has the packages
# of .venv, too. It is made if it is not there (some minutes, 200 MB).
set -eu
cd "$(dirname "$0")/../.."
venv=${FDMA_LM_EVAL_VENV:-build/lm_eval}
wanted=$(sha256sum <tests/lm_eval/requirements.txt)
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$venv"
    .venv/bin/python -m venv "$venv"
    echo "lm_eval: making $venv"
    shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$shared" >"$own/shared.pth"
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
        -r tests/lm_eval/requirements.txt
    echo "$wanted" >"$venv/stamp"
fi
export FDMA_LIBRARY="$PWD/build/libfdma.so" PYTHONPATH="$PWD/python"
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/lm_eval
