# Files that `cmake --install` installs. A Python wheel has them inside the package flash_dmattn, and
# in its folder of programs a script that runs the command.

include(CMakePackageConfigHelpers)

# A library that is built with glibc 2.34 or later, or by zig, may be linked with an earlier glibc,
# whose threads are in a library of their own.
set(fdma_thread_libs "${CMAKE_THREAD_LIBS_INIT}")
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(fdma_thread_libs -pthread)
endif()

# Targets that `cmake --install` needs.
add_custom_target(fdma_installed DEPENDS fdma_shared fdma_static)

install(FILES include/fdma.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS fdma_shared EXPORT fdma LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
# With CUDA kernels it links against the static runtime of this machine's toolkit, so wheels lack it.
if(NOT SKBUILD OR NOT fdma_has_cuda)
  separate_arguments(private_libs UNIX_COMMAND "${fdma_thread_libs} ${fdma_private_libs}")
  target_link_libraries(fdma_static INTERFACE "$<INSTALL_INTERFACE:${private_libs}>")
  install(TARGETS fdma_static EXPORT fdma ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
if(TARGET fdma_tool)
  add_dependencies(fdma_installed fdma_tool)
  install(TARGETS fdma_tool RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  if(SKBUILD_SCRIPTS_DIR)
    install(PROGRAMS python/run_fdma.py DESTINATION "${SKBUILD_SCRIPTS_DIR}" RENAME fdma)
  endif()
endif()
if(TARGET fdma_texts AND NOT SKBUILD)
  add_dependencies(fdma_installed fdma_texts)
  set(texts "${PROJECT_BINARY_DIR}/texts")
  set(data "${CMAKE_INSTALL_DATAROOTDIR}")
  install(FILES "${texts}/fdma.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
  install(FILES "${texts}/bash/fdma" DESTINATION "${data}/bash-completion/completions")
  install(FILES "${texts}/zsh/_fdma" DESTINATION "${data}/zsh/site-functions")
  install(FILES "${texts}/fish/fdma.fish" DESTINATION "${data}/fish/vendor_completions.d")
endif()
if(NOT SKBUILD)
  install(FILES LICENSE CHANGELOG.md DESTINATION "${CMAKE_INSTALL_DOCDIR}")
elseif(FDMA_LICENSES) # a folder of licences of other code that is linked in
  install(DIRECTORY "${FDMA_LICENSES}/" DESTINATION "${SKBUILD_METADATA_DIR}/licenses")
endif()
foreach(adapter ort jax)
  if(TARGET fdma_${adapter})
    add_dependencies(fdma_installed fdma_${adapter})
    install(TARGETS fdma_${adapter} LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endforeach()

cmake_path(SET package_dir NORMALIZE "${CMAKE_INSTALL_LIBDIR}/cmake/fdma") # LIBDIR may be "."
install(EXPORT fdma NAMESPACE fdma:: FILE fdma-targets.cmake DESTINATION "${package_dir}")
file(WRITE "${PROJECT_BINARY_DIR}/fdma-config.cmake"
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/fdma-targets.cmake\")\n")
set(compatibility SameMajorVersion)
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
endif()
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fdma-config-version.cmake"
                                 COMPATIBILITY ${compatibility})
install(FILES "${PROJECT_BINARY_DIR}/fdma-config.cmake"
              "${PROJECT_BINARY_DIR}/fdma-config-version.cmake"
        DESTINATION "${package_dir}")

# Paths are relative to the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(cmake/fdma.pc.in "${PROJECT_BINARY_DIR}/fdma.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/fdma.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
