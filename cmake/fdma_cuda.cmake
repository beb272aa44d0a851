# The CUDA backend, built where nvcc is found unless FDMA_CUDA says otherwise. Each source of
# src/cuda is compiled once, or once for each head_dim, into an object with code for every
# architecture.

include(fdma_architectures)

# sm_90a, whose instructions the tuned kernels use, came with CUDA 12.0.
set(fdma_least_cuda 12.0)
set(FDMA_CUDA AUTO CACHE STRING "build the CUDA backend: AUTO (where nvcc is found, and in pip builds a driver too), ON or OFF")
set(FDMA_CUDA_ARCHITECTURES "" CACHE STRING
    "compute capabilities to include code for, the last also as PTX; empty: those of 80;90;100;120 that nvcc knows")
set_property(CACHE FDMA_CUDA PROPERTY STRINGS AUTO ON OFF)

set(fdma_has_cuda OFF)
set(fdma_private_libs "")
if(FDMA_CUDA STREQUAL "AUTO" AND NOT CMAKE_CROSSCOMPILING)
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  check_language(CUDA)
  find_library(fdma_driver libcuda.so.1 PATHS /usr/lib/wsl/lib)
  if(CMAKE_CUDA_COMPILER AND SKBUILD AND NOT fdma_driver) # would compile for minutes although there is no device
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

set(CMAKE_CUDA_ARCHITECTURES OFF) # each target below names its own
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(CUDAToolkit_VERSION VERSION_LESS fdma_least_cuda)
  message(FATAL_ERROR "the CUDA backend needs CUDA ${fdma_least_cuda} or later, this is "
                      "${CUDAToolkit_VERSION}: install a later one, or configure with -DFDMA_CUDA=OFF")
endif()
if(NOT FDMA_CUDA_ARCHITECTURES)
  fdma_known_architectures(known "${CMAKE_CUDA_COMPILER}")
  fdma_choose_architectures(FDMA_CUDA_ARCHITECTURES ${known})
endif()
message(STATUS "CUDA backend: CUDA ${CUDAToolkit_VERSION}, architectures ${FDMA_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "") # the C++ library is not used
set(CMAKE_CUDA_RUNTIME_LIBRARY None)       # named below

target_sources(fdma_objects PRIVATE src/cuda/cuda.c)
target_link_libraries(fdma_objects PRIVATE CUDA::cudart_static)
target_compile_definitions(fdma_objects PRIVATE FDMA_HAVE_CUDA=1)
target_compile_definitions(fdma_static INTERFACE FDMA_HAVE_CUDA=1) # tests depend on it

set(nvcc_strict "${PROJECT_SOURCE_DIR}/cmake/nvcc_strict.sh")
if(FDMA_WERROR)
  list(APPEND nvcc_strict --no-spills)
endif()

# fdma_add_cuda(NAME SOURCE CODE DEFINITION...): one object, with code for each capability in CODE,
# such as "80;90" or "90a".
function(fdma_add_cuda name source code)
  add_library(${name} OBJECT ${source})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CUDA_VISIBILITY_PRESET hidden
    CXX_VISIBILITY_PRESET hidden
    CUDA_COMPILER_LAUNCHER "${nvcc_strict}")
  target_include_directories(${name} PRIVATE include src)
  target_compile_definitions(${name} PRIVATE ${ARGN})
  list(GET FDMA_CUDA_ARCHITECTURES -1 newest)
  foreach(capability IN LISTS code)
    target_compile_options(${name} PRIVATE
      "SHELL:-gencode=arch=compute_${capability},code=sm_${capability}")
    if(capability STREQUAL newest)
      target_compile_options(${name} PRIVATE
        "SHELL:-gencode=arch=compute_${capability},code=compute_${capability}")
    endif()
  endforeach()
  target_compile_options(${name} PRIVATE
    -Xcompiler=-Wall,-Wextra,-Wno-unused-function,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics -Xptxas=-v,--warn-on-spills)
  if(FDMA_WERROR)
    target_compile_options(${name} PRIVATE -Werror=all-warnings)
  endif()
  foreach(kind fdma_shared fdma_static)
    target_sources(${kind} PRIVATE $<TARGET_OBJECTS:${name}>)
  endforeach()
endfunction()

foreach(kind fdma_shared fdma_static)
  target_link_libraries(${kind} PRIVATE $<BUILD_INTERFACE:CUDA::cudart_static>)
  # Made before CUDA was enabled; without this the Makefile generators refuse them.
  set_target_properties(${kind} PROPERTIES LINKER_LANGUAGE C CUDA_ARCHITECTURES OFF)
endforeach()

# What a program that links libfdma.a without CMake needs.
set(fdma_private_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lpthread -ldl -lrt")

foreach(source device/sequences score/score score/score_backward select/sm80/select select/rules select/slots
               lists/lists merge/merge plan/plan plan/lists plan/backward decode/evict decode/store
               decode/copy streams/carried streams/used)
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
fdma_add_cuda(fdma_cuda_select_sm90 src/cuda/select/sm90/select.cu "${cluster_code}")
foreach(head_dim 64 128 256)
  fdma_add_cuda(fdma_cuda_cached_sm90_d${head_dim} src/cuda/decode/cached_sm90.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
  fdma_add_cuda(fdma_cuda_forward_sm90_d${head_dim} src/cuda/forward/sm90/forward.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
endforeach()
foreach(head_dim 64 128 256)
  fdma_add_cuda(fdma_cuda_backward_sm90_d${head_dim} src/cuda/backward/sm90/backward.cu "90a"
                FDMA_HEAD_DIM=${head_dim})
endforeach()
