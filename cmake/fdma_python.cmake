# flash_dmattn._native: direct calls of the Python package in C. It is optional: where Python's
# headers are missing, the package's calls take PyTorch's dispatcher. Against the stable ABI one file
# works with every CPython from 3.8 on, so it does not matter which one CMake finds.

option(FDMA_PYTHON "build _native, the extension module of the Python package, where Python.h is"
       ${PROJECT_IS_TOP_LEVEL})
# A program cannot load a module with sanitizers that it was not built with.
if(NOT FDMA_PYTHON OR WIN32 OR FDMA_SANITIZE OR FDMA_FUZZ)
  return()
endif()
# The stable ABI is the same in all systems whose long has 64 bits, so for one of them the headers of
# this machine serve; only for a wheel, which says for which system it is.
if(CMAKE_CROSSCOMPILING AND NOT SKBUILD)
  return()
endif()

set(CMAKE_C_STANDARD 11) # a wheel around a library that is built already has no other settings
set(CMAKE_C_STANDARD_REQUIRED ON)
set(stable_abi Py_LIMITED_API=0x03080000)
find_package(Python 3.8 QUIET COMPONENTS Interpreter Development.Module)
if(Python_Development.Module_FOUND) # of an interpreter without the GIL it refuses the stable ABI
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_INCLUDES ${Python_INCLUDE_DIRS})
  set(CMAKE_REQUIRED_DEFINITIONS -D${stable_abi})
  check_c_source_compiles("#include <Python.h>\nint main(void) { return 0; }" FDMA_COMPILES_PYTHON)
  unset(CMAKE_REQUIRED_INCLUDES)
  unset(CMAKE_REQUIRED_DEFINITIONS)
endif()
if(NOT FDMA_COMPILES_PYTHON)
  message(STATUS "No usable Python.h: without the extension module of the Python package")
  return()
endif()

file(GLOB python_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/python/*.c")
set(module MODULE)
if(APPLE) # Python loads both kinds there, and zig links no bundles
  set(module SHARED)
endif()
add_library(fdma_python ${module} ${python_sources})
set_target_properties(fdma_python PROPERTIES
  OUTPUT_NAME _native
  PREFIX ""
  SUFFIX .abi3.so
  C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
target_compile_definitions(fdma_python PRIVATE ${stable_abi})
target_link_libraries(fdma_python PRIVATE Python::Module)
if(TARGET fdma_flags)
  target_link_libraries(fdma_python PRIVATE fdma_flags)
endif()
if(SKBUILD)
  install(TARGETS fdma_python LIBRARY DESTINATION .)
endif()
