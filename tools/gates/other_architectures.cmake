# cmake -DBUILT=CAPABILITIES -P other_architectures.cmake: prints, of the compute capabilities that a
# release has code for, those that are not in the list BUILT.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/fdma_architectures.cmake")

fdma_known_architectures(known nvcc)
fdma_choose_architectures(others ${known})
list(REMOVE_ITEM others ${BUILT})
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${others}")
