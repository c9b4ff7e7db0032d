# cmake -D NM=... -D LEFT_OUT=tcp -D OBJECTS=... -D OTHERS=... -D PROGRAM=.../registries -P without.cmake
#
# OBJECTS are those of the transport's folder, OTHERS all others of the product but the registry. Fails if one of the
# others needs a symbol that only the folder has, so that the product could not be linked without it; then runs the
# tests of the registry in PROGRAM without that transport.
cmake_minimum_required(VERSION 3.22)

# The names that the objects define (T: text, D, B and R: data; a template's or an inline function's, W, is in each
# object that uses it), or with UNDEFINED, those that they need.
function(symbols_of result which)
  set(objects ${ARGN})
  list(FILTER objects INCLUDE REGEX "[.]o$")  # a precompiled header is among them, too
  execute_process(COMMAND ${NM} ${which} ${objects} OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
  set(kinds TDBR)
  if(which STREQUAL "--undefined-only")
    set(kinds U)
  endif()
  string(REGEX MATCHALL " [${kinds}] [^\n]+" lines "${listing}")
  list(TRANSFORM lines REPLACE "^ . " "")
  list(REMOVE_DUPLICATES lines)
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()

symbols_of(defined --defined-only ${OBJECTS})
symbols_of(needed --undefined-only ${OTHERS})
list(LENGTH defined num_defined)
list(LENGTH needed num_needed)
if(num_defined EQUAL 0 OR num_needed EQUAL 0)
  message(FATAL_ERROR "${NM} found ${num_defined} symbols of ${LEFT_OUT} and ${num_needed} that others need")
endif()
foreach(symbol IN LISTS defined)
  if(symbol IN_LIST needed)
    message(SEND_ERROR "without transports/${LEFT_OUT} nothing defines ${symbol}, which other objects need")
  endif()
endforeach()
message("${num_needed} symbols that others need: none of the ${num_defined} of ${LEFT_OUT}")

set(ENV{KVXFER_TEST_WITHOUT} ${LEFT_OUT})
execute_process(COMMAND ${PROGRAM} --file test_registry COMMAND_ERROR_IS_FATAL ANY)
