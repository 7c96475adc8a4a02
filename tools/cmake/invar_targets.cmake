# One way to declare each kind of target, so that flags live here only.

add_library(invar_flags INTERFACE)
set(invar_cxx "$<COMPILE_LANGUAGE:CXX>")
target_compile_options(invar_flags INTERFACE
  "$<${invar_cxx}:-Wall;-Wextra;-Wshadow;-Wconversion;-Wnon-virtual-dtor;-Woverloaded-virtual>"
  # Not -Wconversion, which the host code that nvcc makes does not pass. fmt 9 takes nvcc for a compiler without constexpr.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter;-DFMT_USE_CONSTEXPR=1;--expt-relaxed-constexpr;--expt-extended-lambda>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(invar_flags INTERFACE "$<${invar_cxx}:-Wno-restrict>") # false alarms on std::string, GCC bug 105329
endif()
if(INVAR_WARNINGS_AS_ERRORS)
  target_compile_options(invar_flags INTERFACE "$<${invar_cxx}:-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # FMA everywhere: a multiply-add has one result on every machine that can run the binary.
  target_compile_options(invar_flags INTERFACE "$<${invar_cxx}:-march=x86-64-v3>")
endif()
if(INVAR_SANITIZE)
  target_compile_options(invar_flags INTERFACE
    "$<${invar_cxx}:-fsanitize=${INVAR_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  target_link_options(invar_flags INTERFACE -fsanitize=${INVAR_SANITIZE})
else()
  # What a damaged file could still do to the stack or to a buffer ends the program. The sanitizers have checks of their own.
  target_compile_options(invar_flags INTERFACE "$<${invar_cxx}:-fstack-protector-strong>"
    "$<$<AND:${invar_cxx},$<CONFIG:Release>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>")
endif()
# Addresses are random, and the tables of the linker are read-only once the program starts.
target_compile_options(invar_flags INTERFACE "$<${invar_cxx}:-fPIE>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIE>")
target_link_options(invar_flags INTERFACE -pie -Wl,-z,relro,-z,now)

# Programs find libraries beside themselves: tools/bundle puts them there. As RPATH, so that those find theirs too.
set(CMAKE_BUILD_RPATH "$ORIGIN/lib")
add_link_options(-Wl,--disable-new-dtags)

# invar_library(NAME SOURCES a.cpp ... DEPENDS core ... [PRIVATE third::party ...]): one folder of lib/.
function(invar_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_library(invar_${name} STATIC ${arg_SOURCES})
  target_include_directories(invar_${name} PUBLIC ${CMAKE_SOURCE_DIR}/lib)
  list(TRANSFORM arg_DEPENDS PREPEND invar_)
  target_link_libraries(invar_${name} PUBLIC ${arg_DEPENDS} PRIVATE invar_flags ${arg_PRIVATE})
endfunction()

# invar_executable(NAME SOURCES ... DEPENDS ... [PRIVATE ...])
function(invar_executable name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  list(TRANSFORM arg_DEPENDS PREPEND invar_)
  target_link_libraries(${name} PRIVATE invar_flags ${arg_DEPENDS} ${arg_PRIVATE})
endfunction()
