# Flags of all targets, and the one way to add an instruction set.

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)

add_library(fdma_flags INTERFACE)
target_compile_options(fdma_flags INTERFACE -Wall -Wextra -Wconversion -Wshadow)
if(WIN32 AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
  # gcc checks formats as of msvcrt, which is not used. INFINITY of the headers is a double.
  target_compile_options(fdma_flags INTERFACE -Wno-format -Wno-format-extra-args -Wno-float-conversion)
endif()
if(FDMA_WERROR)
  target_compile_options(fdma_flags INTERFACE -Werror)
endif()

if(FDMA_SANITIZE)
  list(JOIN FDMA_SANITIZE "," sanitizers)
  target_compile_options(fdma_flags INTERFACE
    -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  target_link_options(fdma_flags INTERFACE -fsanitize=${sanitizers})
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    # gcc places 64-byte vectors wrongly in the frames that detect use after return (its bug 110027).
    target_compile_options(fdma_flags INTERFACE "SHELL:--param asan-use-after-return=0")
  endif()
endif()
if(FDMA_FUZZ)
  target_compile_options(fdma_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# FDMA_HAVE_NAME of each instruction set that the library is built for.
add_library(fdma_isas INTERFACE)

# fdma_add_isa(NAME FLAG...): src/cpu/isa/NAME.c, compiled with its own flags, and FDMA_HAVE_NAME.
function(fdma_add_isa name)
  set(source "${PROJECT_SOURCE_DIR}/src/cpu/isa/${name}.c")
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${ARGN}")
  target_sources(fdma_objects PRIVATE "${source}")
  string(TOUPPER ${name} upper_name)
  target_compile_definitions(fdma_isas INTERFACE FDMA_HAVE_${upper_name}=1)
endfunction()
