"""Faults that mutate.py plants in what programs around the library meet: structs, threads, caches
with missing pages, files."""

from __future__ import annotations

from fault import Fault

# fmt: off
LIBRARY = [
    Fault("reserved words of tensors are not checked", "src/core/tensor.c",
          "FDMA_TRY(fdma_check_reserved(name, tensor->reserved, sizeof tensor->reserved));", "",
          ("test_errors_tensors",)),
    Fault("reserved words of tables are not checked", "src/core/operations.c",
          "FDMA_TRY(check_table_form(\"table_in\", in));", "",
          ("test_errors_tensors",)),
    Fault("structs of any size are read", "src/core/operations.c",
          "size < 8192", "size > 0",
          ("test_errors",)),
    Fault("a workspace's message does not name the threads", "src/fdma.c",
          "alone.exec.threads = 1;", "",
          ("test_workspace",)),
    Fault("a cancelled thread leaves its job to the workers", "src/cpu/parallel.c",
          "pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);", "",
          ("test_parallel",)),
    Fault("a quota of a CPU and a half is one CPU", "src/cpu/parallel.c",
          " + (quota[0] % quota[1] > 0)", "",
          ("test_parallel",)),
    Fault("quotas of the cgroups above do not count", "src/cpu/parallel.c",
          "end = strrchr(folder + root, '/');", "end = NULL;",
          ("test_parallel",)),
    Fault("the gradient of bias_carried is overwritten", "src/cpu/backward/tile.h",
          "adds_dbias(problem, j) ? *to + sum : sum", "sum",
          ("test_stream_attention",)),
    Fault("the reference overwrites the gradient of bias_carried", "src/reference/kernels.h",
          "sums->dbias[j], adds_dbias(problem, j)", "sums->dbias[j], false",
          ("test_stream_attention",)),
    Fault("NaN of an empty row beside a sink is passed on", "src/cpu/backward/tile.h",
          "return is_empty_row(problem, rows->b, h, row / problem->group);", "return false;",
          ("test_empty_rows",)),
    Fault("NaN in dout of an empty row reaches dsink_logit", "src/cpu/backward/backward.h",
          "delta = -dlse_of_row(problem, b, i, h);", "delta -= dlse_of_row(problem, b, i, h);",
          ("test_empty_rows",)),
    Fault("after a lost sink the first rows are the sinks", "src/cpu/decode/cached.h",
          "return newest < least ? least : newest_position(live, rows - sinks, 0);",
          "return least;",
          ("test_cache_pages",)),
    Fault("numbers of a header may be fractions", "tools/common/safetensors.c",
          "digits < end ||", "digits > end ||",
          ("pytest test_safetensors_files.py",)),
    Fault("the output may replace the input", "tools/attend/attend.c",
          "is_same_file(options.out, options.file)", "false",
          ("pytest test_attend.py -k input",)),
]
