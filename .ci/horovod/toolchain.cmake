# CMake's settings for compiling Horovod (see .ci/setup). No debug information: it takes a third of the time, and 58 MB.
# Horovod uses std::logic_error and fixed-width integers without including what declares them; newer GCCs mind.
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG" CACHE STRING "")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG -include cstdint -include stdexcept" CACHE STRING "")
# With NCCL (make setup GPU=1) its library is found at run time in the package beside Horovod's.
set(CMAKE_BUILD_RPATH "$ORIGIN/../../nvidia/nccl/lib" CACHE STRING "")
# Horovod looks for TensorFlow by FindTensorflow.cmake: by the one beside this file, before its own.
list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
