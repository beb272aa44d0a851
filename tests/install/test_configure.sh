#!/bin/sh
# Configures the project without options, as a user does: with Makefiles, and with CUDA if nvcc and
# a driver are found. As a part of another project it has no CUDA, and does not set the build type.
#   test_configure.sh CMAKE SOURCE_DIRECTORY
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" -S "$2" -B "$scratch" -G "Unix Makefiles"
[ -e "$scratch/Makefile" ]
# Nothing is built, so ctest says that in a few lines and does not search for every program.
said=$("$(dirname "$1")/ctest" --test-dir "$scratch" -N 2>&1 || true)
echo "$said" | grep "No test is built: cmake --build $scratch"
[ "$(echo "$said" | wc -l)" -lt 20 ]

mkdir "$scratch/outer"
cat >"$scratch/outer/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(outer LANGUAGES C)
set(before CMAKE_BUILD_TYPE CMAKE_C_STANDARD CMAKE_C_EXTENSIONS CMAKE_C_FLAGS CMAKE_MODULE_PATH
           BUILD_SHARED_LIBS BUILD_TESTING CMAKE_POSITION_INDEPENDENT_CODE)
foreach(variable IN LISTS before)
  set(before_${variable} "${${variable}}")
endforeach()
include(FetchContent)
FetchContent_Declare(fdma SOURCE_DIR "${INNER}")
FetchContent_MakeAvailable(fdma)
foreach(variable IN LISTS before)
  if(NOT "${${variable}}" STREQUAL "${before_${variable}}")
    message(FATAL_ERROR "the subproject sets ${variable} to '${${variable}}'")
  endif()
endforeach()
if(fdma_has_cuda OR TARGET fdma_tool)
  message(FATAL_ERROR "CUDA or the command is built")
endif()
foreach(target fdma::fdma fdma::fdma_static)
  if(NOT TARGET ${target})
    message(FATAL_ERROR "no target ${target}")
  endif()
endforeach()
get_directory_property(options COMPILE_OPTIONS)
if(options)
  message(FATAL_ERROR "the subproject sets the options '${options}'")
endif()
get_directory_property(has_cuda DIRECTORY "${INNER}" DEFINITION fdma_has_cuda)
if(has_cuda)
  message(FATAL_ERROR "a subproject builds the CUDA backend")
endif()
END
"$1" -S "$scratch/outer" -B "$scratch/outer/build" -G "Unix Makefiles" "-DINNER=$(cd "$2" && pwd)"
