# Compiles sources of CUDA as C++, for the emulated device of tests/emulator. It needs only the
# headers of the toolkit.

enable_language(CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
find_package(CUDAToolkit REQUIRED)
if(NOT FDMA_CUDA_ARCHITECTURES)
  set(FDMA_CUDA_ARCHITECTURES "80;90")
endif()

set(emulator "${PROJECT_SOURCE_DIR}/tests/emulator")
set(emulated_includes "${emulator}" "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
set(emulated_options -O2 -mavx2 -mfma -mf16c -fno-extern-tls-init -fno-strict-aliasing)

add_library(fdma_emulator STATIC "${emulator}/emulator.cpp" "${emulator}/runtime.cpp")
set_target_properties(fdma_emulator PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(fdma_emulator PRIVATE "${emulator}")
target_include_directories(fdma_emulator SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
target_compile_options(fdma_emulator PRIVATE ${emulated_options} -Wall -Wextra -Wno-attributes)
if(FDMA_WERROR)
  target_compile_options(fdma_emulator PRIVATE -Werror)
endif()
target_link_libraries(fdma_emulator PUBLIC Threads::Threads stdc++ m)
set(fdma_cuda_runtime fdma_emulator)

# As in fdma_nvcc.cmake; CODE does not matter.
function(fdma_add_cuda name source code)
  set_source_files_properties("${source}" PROPERTIES LANGUAGE CXX)
  add_library(${name} OBJECT ${source})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${name} PRIVATE ${emulated_includes})
  target_include_directories(${name} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(${name} PRIVATE ${ARGN})
  target_compile_options(${name} PRIVATE ${emulated_options} -w -x c++ -include cuda_runtime.h)
  foreach(kind fdma_shared fdma_static)
    target_sources(${kind} PRIVATE $<TARGET_OBJECTS:${name}>)
  endforeach()
endfunction()
