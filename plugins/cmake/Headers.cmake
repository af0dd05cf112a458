# Headers of the runtimes. They are taken at configure time into the build folder, checked by hash, and never committed.
# -DONNXRUNTIME_INCLUDE_DIR, -DTENSORRT_INCLUDE_DIR and -DORTPLUGINS_CUDA_INCLUDE_DIR name a folder to use instead.

set(ORTPLUGINS_DEB_SHA256_amd64 14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08)

# Unpacks Debian's libonnxruntime-dev into `into`, from the mirror that apt already uses, without touching apt's sources.
function(ortplugins_fetch_onnxruntime into)
  find_program(APT_GET apt-get)
  find_program(DPKG_DEB dpkg-deb)
  set(advice "Pass -DONNXRUNTIME_INCLUDE_DIR=DIR, the folder with onnxruntime_c_api.h of ONNX Runtime 1.21.")
  if(NOT APT_GET OR NOT DPKG_DEB)
    message(FATAL_ERROR "ONNX Runtime's headers are taken from Debian's libonnxruntime-dev, but this system has no apt. ${advice}")
  endif()
  execute_process(COMMAND "${APT_GET}" indextargets --format "$(REPO_URI)" "Created-By: Packages" OUTPUT_VARIABLE repositories)
  string(REGEX MATCH "[^\n]*/debian/?\n" mirror "${repositories}\n")
  string(STRIP "${mirror}" mirror)
  if(NOT mirror)
    message(FATAL_ERROR "apt is set up with no Debian mirror to take libonnxruntime-dev from. ${advice}")
  endif()
  message(STATUS "ortplugins: fetching libonnxruntime-dev (trixie) for its headers")
  set(apt "${CMAKE_CURRENT_BINARY_DIR}/apt")
  file(MAKE_DIRECTORY "${apt}/lists/partial" "${apt}/cache/archives/partial")
  file(WRITE "${apt}/sources.list" "deb ${mirror} trixie main\n")
  set(options -q -o "Dir::Etc::sourcelist=${apt}/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::Lists=${apt}/lists"
      -o "Dir::Cache=${apt}/cache" -o APT::Sandbox::User=root -o APT::Architecture=amd64 -o APT::Architectures=amd64)
  execute_process(COMMAND "${APT_GET}" ${options} update RESULT_VARIABLE failed OUTPUT_QUIET)
  if(NOT failed)
    execute_process(COMMAND "${APT_GET}" ${options} download libonnxruntime-dev WORKING_DIRECTORY "${apt}" RESULT_VARIABLE failed OUTPUT_QUIET)
  endif()
  file(GLOB deb "${apt}/libonnxruntime-dev_*.deb")
  if(failed OR NOT deb)
    message(FATAL_ERROR "apt could not download libonnxruntime-dev from ${mirror}. ${advice}")
  endif()
  file(SHA256 "${deb}" hash)
  if(NOT hash STREQUAL ORTPLUGINS_DEB_SHA256_amd64)
    message(FATAL_ERROR "libonnxruntime-dev has hash ${hash}, expected ${ORTPLUGINS_DEB_SHA256_amd64}. ${advice}")
  endif()
  execute_process(COMMAND "${DPKG_DEB}" -x "${deb}" "${into}.part" COMMAND_ERROR_IS_FATAL ANY)
  file(RENAME "${into}.part" "${into}")
  file(REMOVE_RECURSE "${apt}")
endfunction()

# Sets `result` to the folder of onnxruntime_c_api.h.
function(ortplugins_onnxruntime_headers result)
  if(NOT ONNXRUNTIME_INCLUDE_DIR)
    set(tree "${CMAKE_CURRENT_BINARY_DIR}/onnxruntime-headers")
    if(NOT EXISTS "${tree}")
      ortplugins_fetch_onnxruntime("${tree}")
    endif()
    set(ONNXRUNTIME_INCLUDE_DIR "${tree}/usr/include/onnxruntime")
  endif()
  if(NOT EXISTS "${ONNXRUNTIME_INCLUDE_DIR}/onnxruntime_c_api.h")
    message(FATAL_ERROR "ONNXRUNTIME_INCLUDE_DIR=${ONNXRUNTIME_INCLUDE_DIR} has no onnxruntime_c_api.h")
  endif()
  set(${result} "${ONNXRUNTIME_INCLUDE_DIR}" PARENT_SCOPE)
endfunction()

# Downloads `requirement` (NAME==VERSION) with pip, checks the wheel's hash, and unpacks those of its files that match
# `pattern` into `into`.
function(ortplugins_unpack_wheel requirement sha256 pattern into advice)
  message(STATUS "ortplugins: fetching the wheel ${requirement} for its headers")
  set(wheels "${into}.wheel")
  file(REMOVE_RECURSE "${wheels}")
  # Without PYTHONPATH, by which pip hides itself from the builds that it starts.
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONPATH "${Python_EXECUTABLE}" -m pip download -q --no-deps
                          --disable-pip-version-check --only-binary=:all: -d "${wheels}" "${requirement}"
                  RESULT_VARIABLE failed ERROR_VARIABLE errors)
  file(GLOB wheel "${wheels}/*.whl")
  if(failed OR NOT wheel)
    message(FATAL_ERROR "pip could not download ${requirement}: ${errors}. ${advice}")
  endif()
  file(SHA256 "${wheel}" hash)
  if(NOT hash STREQUAL sha256)
    message(FATAL_ERROR "${requirement} has hash ${hash}, expected ${sha256}. ${advice}")
  endif()
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${into}" PATTERNS "${pattern}")
  file(REMOVE_RECURSE "${wheels}")
endfunction()

# Sets `result` to the folder of NvInfer.h, taken from the headers in the wheel kernel-lens.
function(ortplugins_tensorrt_headers result)
  if(NOT TENSORRT_INCLUDE_DIR)
    set(tree "${CMAKE_CURRENT_BINARY_DIR}/tensorrt-headers")
    if(NOT EXISTS "${tree}")
      ortplugins_unpack_wheel(kernel-lens==2.0.1 07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0
                              "kernel_lens/include/tensorrt/*" "${tree}.part"
                              "Pass -DTENSORRT_INCLUDE_DIR=DIR, the folder with NvInfer.h of TensorRT 10 or 11.")
      file(RENAME "${tree}.part" "${tree}")
    endif()
    set(TENSORRT_INCLUDE_DIR "${tree}/kernel_lens/include/tensorrt")
  endif()
  if(NOT EXISTS "${TENSORRT_INCLUDE_DIR}/NvInfer.h")
    message(FATAL_ERROR "TENSORRT_INCLUDE_DIR=${TENSORRT_INCLUDE_DIR} has no NvInfer.h")
  endif()
  set(${result} "${TENSORRT_INCLUDE_DIR}" PARENT_SCOPE)
endfunction()

# Sets `result` to the folder of cuda_runtime_api.h: of the CUDA toolkit if there is one, else from its wheels.
function(ortplugins_cuda_headers result)
  find_path(ORTPLUGINS_CUDA_INCLUDE_DIR cuda_runtime_api.h
            HINTS ${CUDAToolkit_INCLUDE_DIRS} "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
  set(found "${ORTPLUGINS_CUDA_INCLUDE_DIR}")
  if(NOT found)
    set(tree "${CMAKE_CURRENT_BINARY_DIR}/cuda-headers")
    if(NOT EXISTS "${tree}")
      set(advice "Pass -DORTPLUGINS_CUDA_INCLUDE_DIR=DIR, the folder with cuda_runtime_api.h of CUDA 12 or 13.")
      ortplugins_unpack_wheel(nvidia-cuda-runtime==13.0.96 7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
                              "nvidia/cu13/include/*" "${tree}.part" "${advice}")
      ortplugins_unpack_wheel(nvidia-cuda-crt==13.0.88 2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
                              "nvidia/cu13/include/*" "${tree}.part" "${advice}")
      file(RENAME "${tree}.part" "${tree}")
    endif()
    set(found "${tree}/nvidia/cu13/include")
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()
