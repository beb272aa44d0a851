# fdma_choose_architectures(VARIABLE KNOWN...): the default compute capabilities among those that
# nvcc knows. Code for the newest is also kept as PTX, for later devices.
function(fdma_choose_architectures variable)
  set(chosen "")
  foreach(capability 80 90 100 120)
    if(capability IN_LIST ARGN)
      list(APPEND chosen ${capability})
    endif()
  endforeach()
  set(${variable} "${chosen}" PARENT_SCOPE)
endfunction()

# fdma_known_architectures(VARIABLE NVCC): the capabilities that this nvcc compiles for.
function(fdma_known_architectures variable nvcc)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE listed
                  RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "${nvcc} --list-gpu-arch fails: ${failed}")
  endif()
  string(REGEX MATCHALL "[0-9]+" known "${listed}")
  set(${variable} "${known}" PARENT_SCOPE)
endfunction()
