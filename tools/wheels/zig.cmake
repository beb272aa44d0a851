# Toolchain: the C compiler that PyPI's package ziglang brings. FDMA_ZIG in the environment is its
# path, FDMA_ZIG_TARGET a target of it such as x86_64-linux-gnu.2.28: the glibc that the result needs.

set(zig "$ENV{FDMA_ZIG}")
set(target "$ENV{FDMA_ZIG_TARGET}")
string(REGEX MATCH "^[^-]*" CMAKE_SYSTEM_PROCESSOR "${target}")
# Named for another machine alone, so that CMake runs what it compiles for this one.
if(target MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
elseif(target MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
elseif(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  set(CMAKE_SYSTEM_NAME Linux)
endif()

set(CMAKE_C_COMPILER "${zig}" cc -target "${target}")
set(CMAKE_C_ARCHIVE_CREATE "\"${zig}\" ar qc <TARGET> <OBJECTS>")
set(CMAKE_C_ARCHIVE_FINISH "\"${zig}\" ranlib <TARGET>")
