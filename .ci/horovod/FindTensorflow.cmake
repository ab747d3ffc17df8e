# Horovod 0.28.1 on TensorFlow 2.18 to 2.21, without a patch of its sources: Horovod's own search for TensorFlow, and
# then what its list of sources (horovod/tensorflow/CMakeLists.txt, whose scope this is) needs with newer releases.
include("${PROJECT_SOURCE_DIR}/cmake/Modules/FindTensorflow.cmake")

# Includes headers of XLA's that have moved since TensorFlow 2.19. What it defines is for GPUs under XLA alone, and only
# where HOROVOD_ENABLE_XLA_OPS asks for it: ringtrain never does.
set_source_files_properties("${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc" PROPERTIES HEADER_FILE_ONLY TRUE)
