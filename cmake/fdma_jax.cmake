# libfdma_jax: the operations as targets of XLA, for flash_dmattn.jax. It needs one header of jaxlib, at
# build time alone. FDMA_JAX=AUTO builds it where Python finds jaxlib, or FDMA_JAX_INCLUDE_DIR the header.

set(FDMA_JAX AUTO CACHE STRING "libfdma_jax, the operations for JAX: ON, OFF, or AUTO where jaxlib is")
set_property(CACHE FDMA_JAX PROPERTY STRINGS AUTO ON OFF)
if(NOT FDMA_JAX OR WIN32 OR FDMA_SANITIZE OR FDMA_FUZZ)
  return()
endif()
if(CMAKE_CROSSCOMPILING AND NOT FDMA_JAX_INCLUDE_DIR)
  return()
endif()

if(NOT FDMA_JAX_INCLUDE_DIR)
  foreach(python IN ITEMS "${PROJECT_SOURCE_DIR}/.venv/bin/python" python3)
    execute_process(
      COMMAND "${python}" -c "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"
      OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      list(APPEND jax_hints "${jaxlib}/include")
    endif()
  endforeach()
endif()
find_path(FDMA_JAX_INCLUDE_DIR xla/ffi/api/c_api.h
          HINTS ${jax_hints}
          DOC "the folder of xla/ffi/api/c_api.h: jax.ffi.include_dir()"
          NO_CMAKE_FIND_ROOT_PATH)
if(NOT FDMA_JAX_INCLUDE_DIR)
  if(NOT FDMA_JAX STREQUAL "AUTO")
    message(FATAL_ERROR "FDMA_JAX: xla/ffi/api/c_api.h was not found: set FDMA_JAX_INCLUDE_DIR to what "
                        "jax.ffi.include_dir() says")
  endif()
  message(STATUS "No jaxlib: without libfdma_jax")
  return()
endif()

add_library(fdma_jax SHARED "${PROJECT_SOURCE_DIR}/src/jax/jax.c")
set_target_properties(fdma_jax PROPERTIES
  C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}"
  BUILD_RPATH "$ORIGIN"
  INSTALL_RPATH "$ORIGIN")
target_include_directories(fdma_jax SYSTEM PRIVATE "${FDMA_JAX_INCLUDE_DIR}")
target_link_libraries(fdma_jax PRIVATE fdma_shared fdma_flags)
if(FDMA_LINKS_nodelete) # as libfdma itself
  target_link_options(fdma_jax PRIVATE "-Wl,-z,nodelete")
endif()
