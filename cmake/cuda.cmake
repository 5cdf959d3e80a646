# Sets ENTWINE_CUDA_FOUND, and says in one message why the CUDA part is left out.
set(ENTWINE_CUDA_FOUND FALSE)
set(missing "")

# check_language looks on PATH only; the toolkit's installer does not put nvcc there.
if(NOT ENTWINE_WITH_CUDA STREQUAL "OFF" AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(nvcc NAMES nvcc PATHS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin NO_CACHE)
  if(nvcc)
    set(CMAKE_CUDA_COMPILER "${nvcc}")
  endif()
endif()

if(ENTWINE_WITH_CUDA STREQUAL "OFF")
  set(missing "ENTWINE_WITH_CUDA is OFF; set it to AUTO or ON")
else()
  # Architecture flags are set by hand below, as sm_90a has no PTX to fall back on.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(missing "nvcc was not found; install the CUDA toolkit 12.8 or newer, or set CUDA_HOME")
  endif()
endif()

if(NOT missing)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(missing "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; install the CUDA toolkit 12.8 or newer")
  endif()
endif()

if(NOT missing)
  ask_python(cutlass_dir "
import importlib.util, pathlib
spec = importlib.util.find_spec('cutlass_library')
print(pathlib.Path(spec.origin).parent / 'source' if spec and spec.origin else '')")
  if(NOT EXISTS "${cutlass_dir}/include/cutlass/cutlass.h")
    set(missing "the CUTLASS headers were not found; run `pip install --no-deps nvidia-cutlass`")
  endif()
endif()

if(NOT missing)
  set(ENTWINE_CUDA_FOUND TRUE)
  message(STATUS "entwine_jax: with the CUDA part (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, sm_90a).")
elseif(ENTWINE_WITH_CUDA STREQUAL "ON")
  message(FATAL_ERROR "entwine_jax: the CUDA part cannot be built: ${missing}.")
else()
  message(STATUS "entwine_jax: CPU build, all calls run as plain lax: ${missing}.")
endif()

# Compiles a target's .cu files for Hopper, with nothing of CUDA left to find at run time.
function(entwine_use_cuda target)
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES OFF CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    # The static runtime finds the driver by itself: no libcuda or libcudart.so is linked.
    CUDA_RUNTIME_LIBRARY Static)
  target_include_directories(${target} SYSTEM PRIVATE
    "${cutlass_dir}/include" "${cutlass_dir}/tools/util/include"
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(${target} PRIVATE
    ENTWINE_CUDA=1 ENTWINE_NVCC_VERSION="${CMAKE_CUDA_COMPILER_VERSION}")
  # ptxas -v: registers and shared memory of every kernel stand in the build log.
  # NDEBUG: CUTLASS's device assertions cost registers that the kernels need.
  # 2908: CUTLASS captures `this` by copy, which C++20 deprecates.
  set(cuda_options -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -O3 -DNDEBUG
      -Xptxas=-v -diag-suppress=2908)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
endfunction()
