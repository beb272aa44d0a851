# The CUDA backend, built where nvcc and a driver are found unless FDMA_CUDA says otherwise. Each source of
# src/cuda is compiled once, or once for each head_dim, into an object with code for every
# architecture.

include(fdma_architectures)

# The ptxas of CUDA 12.8 still serialises the wgmma of backward/sm90, which nvcc_strict.sh refuses.
set(fdma_least_cuda 12.9)
set(FDMA_CUDA AUTO CACHE STRING "build the CUDA backend: AUTO (where nvcc and a driver are found, unless as a subproject), ON, OFF, or EMULATED: for the emulator of tests/emulator, which needs CUDA's headers")
set(FDMA_CUDA_ARCHITECTURES "" CACHE STRING
    "compute capabilities to include code for, the last also as PTX; empty: for this machine's GPUs; all, or no GPU: 80;90;100;120 as far as nvcc knows them")
set_property(CACHE FDMA_CUDA PROPERTY STRINGS AUTO ON OFF EMULATED)

set(fdma_has_cuda OFF)
set(fdma_private_libs "")
if(FDMA_CUDA STREQUAL "AUTO" AND NOT CMAKE_CROSSCOMPILING AND PROJECT_IS_TOP_LEVEL)
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  check_language(CUDA)
  find_library(fdma_driver libcuda.so.1 PATHS /usr/lib/wsl/lib)
  if(CMAKE_CUDA_COMPILER AND NOT fdma_driver) # would compile for minutes although there is no device
    message(NOTICE "nvcc is found, but no NVIDIA driver: building without CUDA kernels; "
                   "set FDMA_CUDA=ON to build them all the same")
  elseif(CMAKE_CUDA_COMPILER)
    set(fdma_has_cuda ON)
  endif()
elseif(FDMA_CUDA AND NOT FDMA_CUDA STREQUAL "AUTO")
  set(fdma_has_cuda ON)
endif()
if(NOT fdma_has_cuda)
  target_sources(fdma_objects PRIVATE src/cuda/absent.c)
  return()
endif()

if(FDMA_CUDA STREQUAL "EMULATED")
  include(fdma_emulator)
else()
  include(fdma_nvcc)
endif()

target_sources(fdma_objects PRIVATE src/cuda/cuda.c)
target_link_libraries(fdma_objects PRIVATE ${fdma_cuda_runtime})
target_compile_definitions(fdma_objects PRIVATE FDMA_HAVE_CUDA=1)
target_compile_definitions(fdma_static INTERFACE $<BUILD_INTERFACE:FDMA_HAVE_CUDA=1>) # for tests

foreach(kind fdma_shared fdma_static)
  target_link_libraries(${kind} PRIVATE $<BUILD_INTERFACE:${fdma_cuda_runtime}>)
  # Made before CUDA was enabled; without this the Makefile generators refuse them.
  set_target_properties(${kind} PROPERTIES LINKER_LANGUAGE C CUDA_ARCHITECTURES OFF)
endforeach()

# Libraries that a program needs to link libfdma.a without CMake.
set(fdma_private_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lpthread -ldl -lrt")

foreach(source device/sequences score/score score/score_backward select/sm80 select/fused select/rules
               merge/merge probabilities/probabilities rotate/rotate plan/plan plan/lists plan/kept_keys plan/backward decode/evict decode/store
               adapt/adapt)
  string(MAKE_C_IDENTIFIER ${source} name)
  fdma_add_cuda(fdma_cuda_${name} src/cuda/${source}.cu "${FDMA_CUDA_ARCHITECTURES}")
endforeach()
foreach(head_dim 64 96 128 192 256)
  fdma_add_cuda(fdma_cuda_decode_d${head_dim} src/cuda/decode/decode.cu
                "${FDMA_CUDA_ARCHITECTURES}" FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_cached_d${head_dim} src/cuda/decode/cached.cu
                "${FDMA_CUDA_ARCHITECTURES}" FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_forward_sm80_d${head_dim} src/cuda/forward/sm80/forward.cu
                "${FDMA_CUDA_ARCHITECTURES}" FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_backward_sm80_d${head_dim} src/cuda/backward/sm80/backward.cu
                "${FDMA_CUDA_ARCHITECTURES}" FDMA_HEAD_DIM=${head_dim})
endforeach()

# Clusters came with 9.0; wgmma is an instruction of 9.0 alone. A kernel without code for a device
# stays in the table and reports the device as missing.
set(cluster_code "${FDMA_CUDA_ARCHITECTURES}")
list(FILTER cluster_code EXCLUDE REGEX "^[78]")
if(NOT cluster_code) # nvcc without an architecture would compile for one of its own choice
  set(cluster_code 90)
endif()
fdma_add_cuda(fdma_cuda_select_sm90 src/cuda/select/sm90.cu "${cluster_code}")
fdma_add_cuda(fdma_cuda_top_sm90 src/cuda/select/top.cu "${cluster_code}")
foreach(head_dim 64 128 256)
  fdma_add_cuda(fdma_cuda_cached_sm90_d${head_dim} src/cuda/decode/cached_sm90.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_forward_sm90_d${head_dim} src/cuda/forward/sm90/forward.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_forward_sm90_host_d${head_dim} src/cuda/forward/sm90/host.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
endforeach()
foreach(head_dim 64 128 256)
  fdma_add_cuda(fdma_cuda_backward_sm90_d${head_dim} src/cuda/backward/sm90/backward.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
endforeach()
