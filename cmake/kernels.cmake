# Target jax_fa3_kernels: every kernel and its launch, as a static library. nvcc sees no XLA and no
# Python header, so that one library serves the wheels of all Pythons: the first build keeps it
# (JAX_FA3_KERNELS_OUTPUT), the others link it (JAX_FA3_KERNELS_LIBRARY).
#
# Beside the library lies <library>.sources, a digest of what it was built from: a library from
# other sources is refused.

file(GLOB_RECURSE jax_fa3_kernel_files CONFIGURE_DEPENDS
     "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu" "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cuh"
     "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.h")
list(SORT jax_fa3_kernel_files)
set(jax_fa3_cuda_sources ${jax_fa3_kernel_files})
list(FILTER jax_fa3_cuda_sources INCLUDE REGEX "\\.cu$")

if(JAX_FA3_KERNELS_LIBRARY)
  if(NOT EXISTS "${JAX_FA3_KERNELS_LIBRARY}")
    message(FATAL_ERROR "jax_fa3: JAX_FA3_KERNELS_LIBRARY must be a libjax_fa3_kernels.a; "
                        "${JAX_FA3_KERNELS_LIBRARY} does not exist.")
  endif()
  execute_process(
    COMMAND "${CMAKE_COMMAND}" "-DFILES=${jax_fa3_kernel_files}"
            "-DCOMPARE=${JAX_FA3_KERNELS_LIBRARY}.sources"
            -P "${CMAKE_CURRENT_LIST_DIR}/source_digest.cmake"
    RESULT_VARIABLE differs OUTPUT_QUIET ERROR_QUIET)
  if(differs)
    message(FATAL_ERROR "jax_fa3: ${JAX_FA3_KERNELS_LIBRARY} was not built from the sources in "
                        "cuda/; build it again with JAX_FA3_KERNELS_OUTPUT.")
  endif()
  add_library(jax_fa3_kernels STATIC IMPORTED)
  set_target_properties(jax_fa3_kernels PROPERTIES IMPORTED_LOCATION "${JAX_FA3_KERNELS_LIBRARY}")
  return()
endif()

# Every ptxas report is kept, and a serialised wgmma or an ignored setmaxnreg fails the build.
if(NOT JAX_FA3_PTXAS_LOG_DIR)
  set(JAX_FA3_PTXAS_LOG_DIR "${CMAKE_BINARY_DIR}/ptxas")
endif()
file(MAKE_DIRECTORY "${JAX_FA3_PTXAS_LOG_DIR}")
if(NOT JAX_FA3_KERNELS_OUTPUT)
  set(JAX_FA3_KERNELS_OUTPUT "${CMAKE_BINARY_DIR}")
endif()
add_library(jax_fa3_kernels STATIC ${jax_fa3_cuda_sources})
target_include_directories(jax_fa3_kernels PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_compile_options(jax_fa3_kernels PRIVATE -lineinfo --ptxas-options=-v
                       "-Xcompiler=-Wall,-Wno-unknown-pragmas,-fvisibility-inlines-hidden")
set_target_properties(jax_fa3_kernels PROPERTIES
  ARCHIVE_OUTPUT_DIRECTORY "${JAX_FA3_KERNELS_OUTPUT}"
  CUDA_RUNTIME_LIBRARY Static
  CUDA_SEPARABLE_COMPILATION OFF
  CUDA_VISIBILITY_PRESET hidden
  CUDA_COMPILER_LAUNCHER
    "sh;${CMAKE_CURRENT_SOURCE_DIR}/scripts/nvcc_logged.sh;${JAX_FA3_PTXAS_LOG_DIR}")
# The assembler writes the code that runs, so bug reports name it beside nvcc.
find_program(JAX_FA3_PTXAS ptxas HINTS "${CUDAToolkit_BIN_DIR}" NO_DEFAULT_PATH)
if(JAX_FA3_PTXAS)
  execute_process(COMMAND "${JAX_FA3_PTXAS}" --version OUTPUT_VARIABLE jax_fa3_ptxas_says)
  if(jax_fa3_ptxas_says MATCHES "V([0-9.]+)")
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/cuda/common/build_info.cu" PROPERTIES
      COMPILE_DEFINITIONS "JAX_FA3_PTXAS_VERSION=\"${CMAKE_MATCH_1}\"")
  endif()
endif()
add_custom_command(TARGET jax_fa3_kernels POST_BUILD
  COMMAND "${CMAKE_COMMAND}" "-DFILES=${jax_fa3_kernel_files}"
          "-DWRITE=$<TARGET_FILE:jax_fa3_kernels>.sources"
          -P "${CMAKE_CURRENT_LIST_DIR}/source_digest.cmake"
  VERBATIM)
