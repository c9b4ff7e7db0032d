# The kernels once more, as NVRTC compiles them: their PTX, translated to C++ (native/gpu/DESIGN.md), under the tests that run
# their source. A test of copies runs for each architecture, since each has its own PTX.
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

# NAME is made of sources (.cu or .ptx) for an architecture.
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
  # -O1: a kernel has thousands of registers. -w: what is written here is not for readers.
  target_compile_options(${name} PRIVATE -O1 -g0 -w -fno-strict-aliasing -ffp-contract=off)
endfunction()

# The translator itself: kernels by hand, right and wrong.
foreach(kernels_by_hand instructions planted)
  add_translated_kernels(ptx_${kernels_by_hand} sm_90a ${ptx_folder}/${kernels_by_hand}.ptx)
  add_executable(test_ptx_${kernels_by_hand} ${ptx_folder}/test_${kernels_by_hand}.cpp)
  target_include_directories(test_ptx_${kernels_by_hand} BEFORE PRIVATE
    ${CMAKE_CURRENT_BINARY_DIR}/ptx/ptx_${kernels_by_hand} ${CMAKE_CURRENT_SOURCE_DIR}/emulated)
  target_link_libraries(test_ptx_${kernels_by_hand} PRIVATE ${test_libraries} ptx_${kernels_by_hand})
  add_test(NAME test_ptx_${kernels_by_hand} COMMAND test_ptx_${kernels_by_hand})
endforeach()
