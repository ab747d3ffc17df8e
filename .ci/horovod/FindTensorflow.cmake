# Horovod 0.28.1 on TensorFlow 2.18 to 2.22, without a patch of its sources: Horovod's own search for TensorFlow, and
# then what its list of sources (horovod/tensorflow/CMakeLists.txt, whose scope this is) needs with newer releases.
include("${PROJECT_SOURCE_DIR}/cmake/Modules/FindTensorflow.cmake")

# Includes headers of XLA's that have moved since TensorFlow 2.19. What it defines is for GPUs under XLA alone, and only
# where HOROVOD_ENABLE_XLA_OPS asks for it: ringtrain never does.
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc" PROPERTIES HEADER_FILE_ONLY TRUE)

if(HAVE_CUDA)
    if(Tensorflow_VERSION VERSION_GREATER_EQUAL "2.21")
        list(APPEND TF_SOURCES "${CMAKE_CURRENT_LIST_DIR}/gpu_stream.cc")
    endif()
    # libtensorflow_framework exports CUDA's whole runtime: stand-ins that load libcudart.so.12. Linked as Horovod does,
    # after TensorFlow, the compiler's static runtime would be left out, and CUDA 12's would load what CUDA 13's made:
    # where the driver is too old for that, kernels do not run, and Horovod does not notice. Linked first and whole, the
    # compiler's own runtime refuses such a driver at the first call.
    list(APPEND LINKER_LIBS -Wl,--whole-archive cudart_static -Wl,--no-whole-archive)
endif()
