# cmake -P test_architectures.cmake: tests which architectures are built, given those that nvcc
# knows.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/fdma_architectures.cmake")

function(expect wanted)
  fdma_choose_architectures(chosen ${ARGN})
  if(NOT chosen STREQUAL wanted)
    message(SEND_ERROR "of ${ARGN} it chooses '${chosen}', want '${wanted}'")
  endif()
endfunction()

expect("80;90" 50 52 60 61 70 72 75 80 86 87 89 90) # CUDA 12.4
expect("80;90;100;120" 50 70 75 80 86 87 89 90 100 101 120) # CUDA 12.8
expect("80;90;100;120" 75 80 86 87 88 89 90 100 103 110 120 121) # CUDA 13.0

function(expect_wanted wanted asked present)
  fdma_wanted_architectures(found "${asked}" "${present}" ${ARGN})
  if(NOT found STREQUAL wanted)
    message(SEND_ERROR "asked for '${asked}', with '${present}', it takes '${found}', want '${wanted}'")
  endif()
endfunction()

set(known 75 80 86 90 100 120)
expect_wanted("90" "" "90" ${known})
expect_wanted("80;90" "" "80;90" ${known})
expect_wanted("80;90;100;120" "" "" ${known})
expect_wanted("80;90;100;120" "" "75;103" ${known})
expect_wanted("80;90;100;120" all "90" ${known})
expect_wanted("86;90" "86;90" "90" ${known})

# Two GPUs of one kind beside another one, as nvidia-smi lists them.
set(FDMA_NVIDIA_SMI "${CMAKE_CURRENT_BINARY_DIR}/smi_of_three")
file(WRITE "${FDMA_NVIDIA_SMI}" "#!/bin/sh\nprintf '9.0\\n8.0\\n9.0\\n'\n")
file(CHMOD "${FDMA_NVIDIA_SMI}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
fdma_present_architectures(present)
file(REMOVE "${FDMA_NVIDIA_SMI}")
if(NOT present STREQUAL "80;90")
  message(SEND_ERROR "it finds '${present}', want '80;90'")
endif()

# An nvcc that knows three architectures.
set(nvcc "${CMAKE_CURRENT_BINARY_DIR}/nvcc_of_three")
file(WRITE "${nvcc}" "#!/bin/sh\n[ \"$1\" = --list-gpu-arch ] && printf 'compute_80\\ncompute_89\\ncompute_90\\n'\n")
file(CHMOD "${nvcc}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
fdma_known_architectures(known "${nvcc}")
file(REMOVE "${nvcc}")
if(NOT known STREQUAL "80;89;90")
  message(SEND_ERROR "it reads '${known}', want '80;89;90'")
endif()
