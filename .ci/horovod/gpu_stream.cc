// What TensorFlow 2.18 to 2.20 export for GPUs and 2.21 does not: Horovod (horovod/tensorflow/mpi_ops.cc) declares it
// itself, so that the lack shows only at import, as an undefined symbol. FindTensorflow.cmake adds this file.
#include <cuda_runtime.h>

#include "xla/stream_executor/stream.h"

namespace stream_executor::gpu {

cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}

}  // namespace stream_executor::gpu
