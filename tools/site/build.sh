#!/bin/sh
# Builds the site in build/site/html: the selection page's WebAssembly module, then every page of
# mkdocs.yml. It needs the library in build/, and what `tools/setup.sh site` installs.
# A warning is an error.
set -eu
cd "$(dirname "$0")/../.."
module=build/site/selection.wasm
mkdir -p build/site

# The library without the kernels of any ISA: the reference computes the selection. malloc() and
# output are not used, but snprintf() of messages imports the writing of files.
clang --target=wasm32-wasi -Oz -std=c11 -Iinclude -Isrc -include tools/site/wasm/sizes.h \
    -Dfdma_cpu_scalar=fdma_cpu_absent -D_Thread_local= -ffunction-sections -fdata-sections \
    -mbulk-memory -nostartfiles -Wl,--no-entry,--gc-sections,--strip-all \
    -Wl,--export=select_keys,--export=score_address,--export=expiry_address,--export=slot_address \
    tools/site/wasm/selection.c src/fdma.c src/core/*.c src/reference/*.c src/cpu/*.c \
    src/cpu/isa/absent.c src/cuda/absent.c -o "$module"
# A page that is opened from disk may not read other files: the module is a script.
printf 'const selectionModule = "%s";\n' "$(base64 -w 0 "$module")" >"$module.js"

python=${PYTHON:-.venv/bin/python}
FDMA_LIBRARY="${FDMA_LIBRARY:-$PWD/build/libfdma.so}" PYTHONPATH=python:tools \
    "$python" tools/site/site_pages.py
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict
