# fdma_cjson: the target to link for reading the headers of safetensors files, where cJSON is found.

find_path(CJSON_INCLUDE_DIR cjson/cJSON.h)
find_library(CJSON_LIBRARY cjson)
mark_as_advanced(CJSON_INCLUDE_DIR CJSON_LIBRARY)
if(CJSON_INCLUDE_DIR AND CJSON_LIBRARY)
  add_library(fdma_cjson INTERFACE)
  target_include_directories(fdma_cjson SYSTEM INTERFACE "${CJSON_INCLUDE_DIR}")
  target_link_libraries(fdma_cjson INTERFACE "${CJSON_LIBRARY}")
  target_compile_definitions(fdma_cjson INTERFACE FDMA_HAVE_CJSON=1)
endif()
