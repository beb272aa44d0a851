# libfdma_ort: operators for ONNX Runtime over libfdma. It needs one header of ONNX Runtime, at
# build time alone; tools/setup.sh tests fetches it.

option(FDMA_ORT "build libfdma_ort, the operators for ONNX Runtime" OFF)
if(NOT FDMA_ORT)
  return()
endif()

find_path(FDMA_ORT_INCLUDE_DIR onnxruntime_c_api.h
          HINTS "${PROJECT_SOURCE_DIR}/build/onnxruntime/include"
          PATH_SUFFIXES onnxruntime onnxruntime/core/session
          DOC "the folder of onnxruntime_c_api.h"
          NO_CMAKE_FIND_ROOT_PATH)
if(NOT FDMA_ORT_INCLUDE_DIR)
  message(FATAL_ERROR "FDMA_ORT: onnxruntime_c_api.h was not found: set FDMA_ORT_INCLUDE_DIR to its folder, "
                      "or run tools/setup.sh tests")
endif()

file(GLOB ort_sources CONFIGURE_DEPENDS src/ort/*.c)
add_library(fdma_ort SHARED ${ort_sources})
set_target_properties(fdma_ort PROPERTIES
  C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}"
  BUILD_RPATH "$ORIGIN"
  INSTALL_RPATH "$ORIGIN")
target_include_directories(fdma_ort PRIVATE src)
target_include_directories(fdma_ort SYSTEM PRIVATE "${FDMA_ORT_INCLUDE_DIR}")
target_link_libraries(fdma_ort PRIVATE fdma_shared fdma_flags)
if(FDMA_LINKS_nodelete) # as libfdma itself
  target_link_options(fdma_ort PRIVATE "-Wl,-z,nodelete")
endif()
