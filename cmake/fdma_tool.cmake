# The fdma command: one folder per subcommand, and common/, which they share.

file(GLOB tool_sources CONFIGURE_DEPENDS tools/*.c tools/*/*.c)
list(FILTER tool_sources EXCLUDE REGEX "/tools/gates/")
if(NOT tool_sources)
  return()
endif()

add_executable(fdma_tool ${tool_sources} src/core/signatures.c) # which fdma check walks
set_target_properties(fdma_tool PROPERTIES
  OUTPUT_NAME fdma
  RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}"
  BUILD_RPATH "$ORIGIN"
  INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
target_include_directories(fdma_tool PRIVATE tools tests src)
target_link_libraries(fdma_tool PRIVATE fdma_shared fdma_flags fdma_isas Threads::Threads m)

if(fdma_has_cuda)
  target_link_libraries(fdma_tool PRIVATE ${fdma_cuda_runtime})
  target_compile_definitions(fdma_tool PRIVATE FDMA_HAVE_CUDA=1)
endif()

if(TARGET fdma_cjson)
  target_link_libraries(fdma_tool PRIVATE fdma_cjson)
else()
  message(NOTICE "cJSON not found: the fdma command cannot read safetensors files")
endif()
