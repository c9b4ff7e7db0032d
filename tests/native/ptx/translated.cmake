# The kernels as NVRTC compiles them: their PTX, translated to C++ (native/gpu/DESIGN.md), runs under the same tests
# as their source.
find_program(KVXFER_NVRTC_PYTHON python3 DOC "A Python with cuda-bindings and NVRTC: kernels run as PTX")
set(translate ${CMAKE_COMMAND} -E env PYTHONPATH=${PROJECT_SOURCE_DIR} PYTHONDONTWRITEBYTECODE=1
  ${KVXFER_NVRTC_PYTHON} -m tests.native.ptx)
execute_process(COMMAND ${translate} --check RESULT_VARIABLE failed ERROR_VARIABLE why OUTPUT_QUIET)
if(failed)
  string(REGEX REPLACE "\n.*" "" why "${why}")
  message(STATUS "tests of the kernels' PTX are left out: ${why} (`make native-test` installs it)")
  return()
endif()

file(GLOB example_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/native/gpu/examples/*.cu)
file(GLOB_RECURSE kernel_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/native/gpu/*.cuh
  ${PROJECT_SOURCE_DIR}/native/gpu/*.h ${PROJECT_SOURCE_DIR}/native/gpu/rtc/* ${PROJECT_SOURCE_DIR}/native/include/*)
file(GLOB translator CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.py)
set(ptx_folder ${CMAKE_CURRENT_LIST_DIR})

# Translates sources (.cu or .ptx) for an architecture into the library NAME.
function(add_translated_kernels name architecture)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/ptx/${name})
  set(made "")
  foreach(source IN LISTS ARGN)
    get_filename_component(stem ${source} NAME_WE)
    list(APPEND made ${out}/${stem}.cpp)
  endforeach()
  add_custom_command(OUTPUT ${made}
    COMMAND ${translate} ${out} --architecture ${architecture} ${ARGN}
    DEPENDS ${ARGN} ${kernel_headers} ${translator}
    COMMENT "Translating PTX for ${architecture}")
  add_library(${name} OBJECT ${made})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulated ${CMAKE_CURRENT_SOURCE_DIR}
    $<TARGET_PROPERTY:kvxfer_core,INTERFACE_INCLUDE_DIRECTORIES>)
  # -O1: a kernel has thousands of registers. -w: generated code is not for readers.
  target_compile_options(${name} PRIVATE -O1 -g0 -w -fno-strict-aliasing -ffp-contract=off)
endfunction()

# Adds TEST with translated kernels instead of emulated ones.
function(add_translated_test test name)
  if(NOT TARGET ${test})
    return()
  endif()
  add_executable(${test}_${name} $<TARGET_OBJECTS:${test}>)
  target_link_libraries(${test}_${name} PRIVATE ${test_libraries} ${ARGN})
  add_test(NAME ${test}_${name} COMMAND ${test}_${name})
endfunction()

# Builds TEST again from its source. It includes kernels, and gets their declarations here.
function(add_test_of_linked_kernels test name)
  if(NOT TARGET ${test})
    return()
  endif()
  add_executable(${test}_${name} ${test}.cpp)
  target_include_directories(${test}_${name} BEFORE PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/ptx/${name}/linked
    ${ptx_folder}/linked ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  target_compile_options(${test}_${name} PRIVATE -Wno-unknown-pragmas)
  target_link_libraries(${test}_${name} PRIVATE ${test_libraries} ${ARGN})
  add_dependencies(${test}_${name} ${name})
  add_test(NAME ${test}_${name} COMMAND ${test}_${name})
endfunction()

# Tests of the translator itself: hand-written kernels, right and wrong.
foreach(kernels_by_hand instructions planted)
  add_translated_kernels(ptx_${kernels_by_hand} sm_90a ${ptx_folder}/${kernels_by_hand}.ptx)
  add_executable(test_ptx_${kernels_by_hand} ${ptx_folder}/test_${kernels_by_hand}.cpp)
  target_include_directories(test_ptx_${kernels_by_hand} BEFORE PRIVATE
    ${CMAKE_CURRENT_BINARY_DIR}/ptx/ptx_${kernels_by_hand} ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  target_link_libraries(test_ptx_${kernels_by_hand} PRIVATE ${test_libraries} ptx_${kernels_by_hand})
  add_test(NAME test_ptx_${kernels_by_hand} COMMAND test_ptx_${kernels_by_hand})
endforeach()

# Which kernels run in which build, so that all of them take two cores about two minutes. Plain: all kernels, since a
# compiler's mistake shows without sanitizers, and each architecture has its own PTX. TSan: kernels whose threads pass
# data to each other, for one architecture; instructions that order memory are the same for all. ASan: only the tests
# above, since ptx/cta.h checks shared memory and parameters anyway, and the source's tests check global memory.
if(KVXFER_SANITIZE MATCHES "address")
  return()
endif()
set(kernels ${PROJECT_SOURCE_DIR}/native/gpu)
set(of_examples ${example_sources} ${ptx_folder}/device_functions.cu)
add_translated_kernels(sm_90a sm_90a ${kernels}/copy_vectors.cu ${kernels}/litmus.cu ${kernels}/convert.cu
  ${of_examples})
add_translated_kernels(sm_90a_bulk sm_90a ${kernels}/copy_bulk.cu)
add_translated_test(test_gpu_copy sm_90a sm_90a sm_90a_bulk)
add_translated_test(test_gpu_litmus sm_90a sm_90a)
foreach(test test_gpu_stores test_gpu_bulk_stores test_gpu_commands test_gpu_triggers)
  add_test_of_linked_kernels(${test} sm_90a sm_90a)
endforeach()
if(KVXFER_SANITIZE)
  return()
endif()
add_translated_test(test_gpu_convert sm_90a sm_90a)
add_translated_test(test_gpu_packed sm_90a sm_90a)
add_translated_kernels(sm_80 sm_80 ${kernels}/copy_vectors.cu ${kernels}/litmus.cu)
add_translated_test(test_gpu_copy sm_80 sm_80 sm_90a_bulk)  # sm_80 has no bulk copies
add_translated_test(test_gpu_litmus sm_80 sm_80)
add_translated_kernels(sm_100a sm_100a ${kernels}/copy_vectors.cu ${kernels}/litmus.cu ${kernels}/copy_bulk.cu)
foreach(test test_gpu_copy test_gpu_litmus)
  add_translated_test(${test} sm_100a sm_100a)
endforeach()
