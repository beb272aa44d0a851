#!/bin/sh
# Checks the format of all C and Python, and lints Python; --fix corrects what can be corrected.
set -u
cd "$(dirname "$0")/../.." || exit 1
bin=.venv/bin

python_parts=
for part in benchmarks examples python research tests tools; do
    [ -d "$part" ] && python_parts="$python_parts $part"
done

c_files() {
    find include src tools tests examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \) -print0
}

if [ "$(c_files | tr -cd '\0' | wc -c)" = 0 ]; then
    echo "format: no C files"
    exit 1
fi
if [ "${1:-}" = --fix ]; then
    c_files | xargs -0 "$bin/clang-format" -i
    # shellcheck disable=SC2086 # a list of directories
    "$bin/ruff" format --quiet $python_parts && "$bin/ruff" check --fix $python_parts
    exit
fi

failed=0
c_files | xargs -0 "$bin/clang-format" --dry-run -Werror || failed=1
# shellcheck disable=SC2086
"$bin/ruff" format --check $python_parts || failed=1
# shellcheck disable=SC2086
"$bin/ruff" check $python_parts || failed=1
exit $failed
