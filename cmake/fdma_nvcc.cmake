# Compiles sources of CUDA with nvcc.

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
fdma_known_architectures(known "${CMAKE_CUDA_COMPILER}")
fdma_present_architectures(present)
fdma_wanted_architectures(FDMA_CUDA_ARCHITECTURES "${FDMA_CUDA_ARCHITECTURES}" "${present}" ${known})
message(STATUS "CUDA backend: CUDA ${CUDAToolkit_VERSION}, architectures ${FDMA_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "") # the C++ library is not used
set(CMAKE_CUDA_RUNTIME_LIBRARY None)       # fdma_cuda_runtime
set(fdma_cuda_runtime CUDA::cudart_static)

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
