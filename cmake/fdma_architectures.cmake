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

# fdma_present_architectures(VARIABLE): the capabilities of the GPUs of this machine.
function(fdma_present_architectures variable)
  set(present "")
  find_program(FDMA_NVIDIA_SMI nvidia-smi)
  if(FDMA_NVIDIA_SMI)
    execute_process(COMMAND "${FDMA_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE listed RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" present "${listed}")
      list(TRANSFORM present REPLACE "\\." "")
      list(REMOVE_DUPLICATES present)
      list(SORT present COMPARE NATURAL)
    endif()
  endif()
  set(${variable} "${present}" PARENT_SCOPE)
endfunction()

# fdma_wanted_architectures(VARIABLE ASKED PRESENT KNOWN...): the capabilities to compile for. ASKED
# names them; "all" stands for the default ones, and "" for the PRESENT ones that nvcc knows, or for all
# if there are none.
function(fdma_wanted_architectures variable asked present)
  set(wanted "${asked}")
  if(asked STREQUAL "")
    foreach(capability IN LISTS present)
      if(capability IN_LIST ARGN AND NOT capability LESS 80)
        list(APPEND wanted ${capability})
      endif()
    endforeach()
  endif()
  if(NOT wanted OR asked STREQUAL "all")
    fdma_choose_architectures(wanted ${ARGN})
  endif()
  set(${variable} "${wanted}" PARENT_SCOPE)
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
