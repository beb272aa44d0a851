# examples/context_parallel.c. Its ranks are CUDA devices where NCCL and the CUDA runtime are found
# and everywhere, for the test, a loop on the CPU.

set(NCCL_ROOT "" CACHE PATH "the folder of NCCL, with include/nccl.h and lib/libnccl.so, for examples/context_parallel.c")
find_path(FDMA_NCCL_INCLUDE_DIR nccl.h
          HINTS "${NCCL_ROOT}" ENV NCCL_ROOT PATHS /usr/local/cuda PATH_SUFFIXES include)
find_library(FDMA_NCCL_LIBRARY NAMES nccl libnccl.so.2 # which is all that NVIDIA's wheel has
             HINTS "${NCCL_ROOT}" ENV NCCL_ROOT PATHS /usr/local/cuda PATH_SUFFIXES lib lib64)
mark_as_advanced(FDMA_NCCL_INCLUDE_DIR FDMA_NCCL_LIBRARY)

set(context_parallel "${PROJECT_SOURCE_DIR}/examples/context_parallel.c")
add_executable(context_parallel "${context_parallel}")
set_target_properties(context_parallel PROPERTIES
  RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples"
  LINKER_LANGUAGE C)
target_link_libraries(context_parallel PRIVATE fdma_shared fdma_flags m)

set(without "")
if(NOT fdma_has_cuda OR FDMA_CUDA STREQUAL "EMULATED")
  set(without "the CUDA backend is not built")
elseif(NOT FDMA_NCCL_INCLUDE_DIR OR NOT FDMA_NCCL_LIBRARY)
  set(without "nccl.h or libnccl was not found, set NCCL_ROOT")
endif()
if(without)
  message(STATUS "examples/context_parallel.c: devices are skipped, only --cpu works: ${without}")
else()
  target_include_directories(context_parallel SYSTEM PRIVATE
    "${FDMA_NCCL_INCLUDE_DIR}" ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(context_parallel PRIVATE "${FDMA_NCCL_LIBRARY}" ${fdma_cuda_runtime})
  target_compile_definitions(context_parallel PRIVATE FDMA_HAVE_NCCL=1)
  add_test(NAME context_parallel_cuda COMMAND context_parallel)
  list(APPEND context_parallel_tests context_parallel_cuda)
  set_tests_properties(context_parallel_cuda PROPERTIES
    SKIP_REGULAR_EXPRESSION "no CUDA device: ;one CUDA device: ")
endif()

# Ranks and tokens: one rank; pieces longer than the window; shorter ones; and pieces of single
# tokens.
foreach(ranks_tokens 1,500 2,5000 3,1000 8,200 8,36)
  string(REPLACE "," ";" arguments "${ranks_tokens}")
  string(REPLACE "," "_" name "context_parallel_${ranks_tokens}")
  add_test(NAME ${name} COMMAND context_parallel --cpu ${arguments})
  list(APPEND context_parallel_tests ${name})
endforeach()
set_tests_properties(${context_parallel_tests} PROPERTIES TIMEOUT 300)

# examples/lm, built where cJSON is found, which reads the model files. Its products are compiled
# for the CPU of this machine, so it is not installed.

if(NOT TARGET fdma_cjson OR WIN32)
  message(STATUS "examples/lm: left out, cJSON was not found")
  return()
endif()
file(GLOB lm_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/lm/*.c")
set(lm_common "")
foreach(name arrays json_tree nearest options progress random sample safetensors safetensors_file text timing)
  list(APPEND lm_common "${PROJECT_SOURCE_DIR}/tools/common/${name}.c")
endforeach()
add_executable(lm ${lm_sources} ${lm_common})
set_target_properties(lm PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples")
target_include_directories(lm PRIVATE "${PROJECT_SOURCE_DIR}/tools")
target_link_libraries(lm PRIVATE fdma_shared fdma_flags fdma_cjson m)
target_compile_options(lm PRIVATE -O3 -ffp-contract=fast)
check_c_compiler_flag(-march=native FDMA_COMPILES_native)
if(FDMA_COMPILES_native)
  target_compile_options(lm PRIVATE -march=native)
endif()
find_package(OpenMP COMPONENTS C)
if(OpenMP_C_FOUND)
  target_link_libraries(lm PRIVATE OpenMP::OpenMP_C)
else()
  target_compile_options(lm PRIVATE -fopenmp-simd)
endif()

set(lm_model "${PROJECT_SOURCE_DIR}/examples/lm/model.safetensors")
if(EXISTS "${lm_model}") # tests/python/test_lm.py has random models
  add_test(NAME lm COMMAND lm "${lm_model}" --prompt "The " --bytes 300)
endif()
