# Builds kvxfer's Python module with this transport in it, without a change in kvxfer's tree:
#
#   pip install /path/of/kvxfer -C cmake.define.CMAKE_PROJECT_kvxfer_INCLUDE=$PWD/into_kvxfer.cmake
function(add_procmem)
  kvxfer_transport(procmem FOLDER ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/procmem)
  get_property(transports GLOBAL PROPERTY kvxfer_transports)
  set(registry ${CMAKE_CURRENT_BINARY_DIR}/registry_with_procmem.cpp)
  kvxfer_registry(${registry} ${transports} procmem)
  target_sources(_native PRIVATE ${registry} $<TARGET_OBJECTS:kvxfer_transport_procmem>)
endfunction()
# When all of kvxfer's own lines have run.
cmake_language(DEFER CALL add_procmem)
