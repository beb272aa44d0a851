# The fdma command: one folder per subcommand, and common/, which they share.

file(GLOB tool_sources CONFIGURE_DEPENDS tools/*.c tools/*/*.c)
list(FILTER tool_sources EXCLUDE REGEX "/tools/gates/")
if(NOT TARGET fdma_cjson) # whose folders are described in JSON
  list(FILTER tool_sources EXCLUDE REGEX "/tools/(generate|tokenizer)/|/json_tree\\.c$")
endif()
# Loops of products are added and multiplied in one instruction where there is one.
set_source_files_properties("${PROJECT_SOURCE_DIR}/tools/generate/product.c" PROPERTIES
  COMPILE_OPTIONS "-O3;-ffp-contract=fast")
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
target_link_libraries(fdma_tool PRIVATE fdma_shared fdma_flags fdma_isas Threads::Threads ${CMAKE_DL_LIBS} m)

if(fdma_has_cuda)
  target_link_libraries(fdma_tool PRIVATE ${fdma_cuda_runtime})
  target_compile_definitions(fdma_tool PRIVATE FDMA_HAVE_CUDA=1)
endif()

if(TARGET fdma_cjson)
  target_link_libraries(fdma_tool PRIVATE fdma_cjson)
else()
  message(NOTICE "cJSON not found: the fdma command cannot read safetensors files")
endif()

# The manual page and what completes command lines, which the command prints itself.
if(NOT CMAKE_CROSSCOMPILING)
  set(texts "${PROJECT_BINARY_DIR}/texts")
  set(fdma_texts "${texts}/fdma.1" "${texts}/bash/fdma" "${texts}/zsh/_fdma" "${texts}/fish/fdma.fish")
  add_custom_command(
    OUTPUT ${fdma_texts}
    COMMAND ${CMAKE_COMMAND} -E make_directory "${texts}/bash" "${texts}/zsh" "${texts}/fish"
    COMMAND fdma_tool man >"${texts}/fdma.1"
    COMMAND fdma_tool completion bash >"${texts}/bash/fdma"
    COMMAND fdma_tool completion zsh >"${texts}/zsh/_fdma"
    COMMAND fdma_tool completion fish >"${texts}/fish/fdma.fish"
    DEPENDS fdma_tool)
  add_custom_target(fdma_texts ALL DEPENDS ${fdma_texts})
endif()
