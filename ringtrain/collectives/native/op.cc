// TensorFlow's operations for sums and gathers, and the functions that Python calls to join a node's ranks.

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "sums.h"
#include "tensorflow.h"
#include "transport.h"

namespace ringtrain {

// A recorded sum: times of call, match and end in nanoseconds since 1970.
struct Event {
  int64_t meaning, bytes, begun, met, ended;
};

namespace {

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

struct Status {
  TF_Status* const status = TF_NewStatus();
  ~Status() { TF_DeleteStatus(status); }
  bool is_ok() const { return TF_GetCode(status) == TF_OK; }
};

struct Tensor {
  TF_Tensor* tensor = nullptr;
  Tensor() = default;
  Tensor(Tensor&& other) : tensor(std::exchange(other.tensor, nullptr)) {}
  ~Tensor() {
    if (tensor != nullptr) TF_DeleteTensor(tensor);
  }
  std::byte* data() const { return static_cast<std::byte*>(TF_TensorData(tensor)); }
};

// Never freed: tensors may be in its memory.
struct Group {
  std::unique_ptr<Transport> transport;
  std::mutex mutex;
  // Last shared results: until the next sum of the same name, TensorFlow must not reuse their memory, as it does with
  // tensors without other references.
  std::unordered_map<uint64_t, std::vector<Tensor>> kept;
  bool is_recording = false;
  std::vector<Event> events;
};

std::mutex groups_mutex;
std::vector<Group*>& groups = *new std::vector<Group*>;  // never destroyed: operations may run during exit

Group* find_group(int64_t number) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  return number >= 0 && number < static_cast<int64_t>(groups.size()) ? groups[number] : nullptr;
}

Type type_of(TF_DataType type) {
  switch (type) {
    case TF_HALF:
      return Type::kHalf;
    case TF_BFLOAT16:
      return Type::kBfloat16;
    case TF_FLOAT:
      return Type::kFloat;
    case TF_DOUBLE:
      return Type::kDouble;
    case TF_INT32:
      return Type::kInt32;
    default:  // the only other type
      return Type::kInt64;
  }
}

// FNV-1a by 64-bit words; not against attackers.
uint64_t mix(uint64_t digest, uint64_t value) { return (digest ^ value) * 0x100000001b3u; }

// A sum of tensors, or a gather of each rank's pieces.
class Kernel {
 public:
  Kernel(TF_OpKernelConstruction* construction, bool gathers) : gathers_(gathers) {
    const Status status;
    unsigned char may_share = 0;
    const auto get = [&](const char* name, int64_t* value) {
      if (status.is_ok()) TF_OpKernelConstruction_GetAttrInt64(construction, name, value, status.status);
    };
    const auto get_list = [&](const char* name, std::vector<int64_t>* values) {
      int32_t length = 0, size = 0;
      if (status.is_ok()) TF_OpKernelConstruction_GetAttrSize(construction, name, &length, &size, status.status);
      values->resize(std::max(length, 0));
      if (status.is_ok())
        TF_OpKernelConstruction_GetAttrInt64List(construction, name, values->data(), length, status.status);
    };
    get("group", &group_);
    get("meaning", &meaning_);
    if (gathers_) {
      get_list("ranks", &ranks_);
      get_list("dims", &dims_);
      get_list("begins", &begins_);
    } else {
      get("num_scaled", &num_scaled_);
      get("scale", &scale_);
    }
    if (status.is_ok()) TF_OpKernelConstruction_GetAttrBool(construction, "may_share", &may_share, status.status);
    if (!status.is_ok()) TF_OpKernelConstruction_Failure(construction, status.status);
    may_share_ = may_share != 0;
  }

  void compute(TF_OpKernelContext* context) const {
    const Status status;
    if (Error error = sum(context, status); !error.empty()) {
      TF_SetStatus(status.status, TF_ABORTED, error.c_str());
    }
    if (!status.is_ok()) TF_OpKernelContext_Failure(context, status.status);
  }

 private:
  Error sum(TF_OpKernelContext* context, const Status& status) const {
    Group* group = find_group(group_);
    if (group == nullptr) return "the ranks have not joined: this graph is of another process.";
    const int64_t num_parts = TF_NumInputs(context);
    Parts parts;
    std::vector<TF_DataType> types;
    std::vector<std::vector<int64_t>> shapes;
    parts.reserve(num_parts);
    uint64_t meaning = mix(mix(mix(static_cast<uint64_t>(meaning_), may_share_), num_scaled_), scale_);
    if (gathers_) meaning = mix(meaning, num_parts + 1);  // differs from a sum
    double scale;
    std::memcpy(&scale, &scale_, sizeof scale);
    int64_t bytes = 0;
    const int64_t* whole = dims_.data();
    for (int index = 0; index < num_parts; ++index) {
      Tensor input;  // dropped at once, so that the sum can reuse its memory
      TF_GetInput(context, index, &input.tensor, status.status);
      if (!status.is_ok()) return "";
      types.push_back(TF_TensorType(input.tensor));
      std::vector<int64_t>& dims = shapes.emplace_back(TF_NumDims(input.tensor));
      int64_t count = 1;
      for (size_t axis = 0; axis < dims.size(); ++axis) {
        dims[axis] = TF_Dim(input.tensor, static_cast<int>(axis));
        count *= dims[axis];
      }
      parts.push_back({type_of(types.back()), count, input.data(), index < num_scaled_ ? scale : 1});
      Part& part = parts.back();
      if (gathers_) {
        part.given = part.bytes();
        part.begin = begins_[index] * size_of(part.type);
        dims.assign(whole, whole + ranks_[index]);
        whole += ranks_[index];
        part.count = 1;
        for (int64_t dim : dims) part.count *= dim;
        if (part.begin + part.given > part.bytes()) return "a piece is not within what is gathered.";
      }
      meaning = mix(mix(meaning, types.back()), dims.size());
      for (int64_t dim : dims) meaning = mix(meaning, dim);
      bytes += part.bytes();
    }

    const std::lock_guard<std::mutex> lock(group->mutex);
    Transport& transport = *group->transport;
    std::vector<Tensor>& kept = group->kept[meaning];
    kept.clear();
    const bool is_short = transport.lay_out(parts, gathers_);
    Tensor squares;  // unused by a gather
    squares.tensor = TF_AllocateOutput(context, static_cast<int>(num_parts), TF_DOUBLE, &num_parts, 1,
                                       num_parts * sizeof(double), status.status);
    const auto allocate = [&](const Result* result) {
      for (int index = 0; index < num_parts && status.is_ok(); ++index) {
        if (result != nullptr && parts[index].count > 0) continue;
        const std::vector<int64_t>& dims = shapes[index];
        Tensor output;
        int forwarded = -1;
        output.tensor = gathers_
                            ? TF_AllocateOutput(context, index, types[index], dims.data(),
                                                static_cast<int>(dims.size()), parts[index].bytes(), status.status)
                            : TF_ForwardInputOrAllocateOutput(context, &index, 1, index, dims.data(),
                                                              static_cast<int>(dims.size()), &forwarded, status.status);
        if (status.is_ok()) parts[index].out = output.data();
      }
      if (!status.is_ok()) transport.fail();
      return status.is_ok();
    };
    // Allocate before the ranks match, if possible: if it failed later, the others could already have their sum.
    const bool is_own = is_short || !may_share_;
    if (is_own && !allocate(nullptr)) return "";
    const int64_t begun = now();
    if (Error error = transport.begin(meaning, parts, may_share_); !error.empty()) return error;
    const int64_t met = now();
    Result* result = transport.result();
    if (!is_own && !allocate(result)) return "";
    if (Error error = transport.finish(parts, reinterpret_cast<double*>(squares.data())); !error.empty()) return error;
    if (group->is_recording) group->events.push_back({meaning_, bytes, begun, met, now()});
    for (int index = 0; index < num_parts && result != nullptr && status.is_ok(); ++index) {
      const Part& part = parts[index];
      if (part.count == 0) continue;
      Tensor output;
      result->uses.fetch_add(1, std::memory_order_relaxed);
      output.tensor = TF_NewTensor(types[index], shapes[index].data(), static_cast<int>(shapes[index].size()),
                                   result->read + part.offset, part.bytes(), release, result);
      TF_SetOutput(context, index, output.tensor, status.status);
      kept.push_back(std::move(output));
    }
    return "";
  }

  static void release(void*, size_t, void* result) {
    static_cast<Result*>(result)->uses.fetch_sub(1, std::memory_order_release);
  }

  const bool gathers_;
  int64_t group_ = -1, meaning_ = 0, num_scaled_ = 0, scale_ = 0;
  // For a gather: axes and dimensions of the whole tensors, and offsets of this rank's values.
  std::vector<int64_t> ranks_, dims_, begins_;
  bool may_share_ = false;
};

void infer_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int64_t num_parts = TF_ShapeInferenceContextNumInputs(context);
  for (int index = 0; index < num_parts; ++index) {
    TF_ShapeHandle* shape = TF_NewShapeHandle();
    TF_ShapeInferenceContextGetInput(context, index, shape, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, index, shape, status);
    TF_DeleteShapeHandle(shape);
    if (TF_GetCode(status) != TF_OK) return;
  }
  TF_ShapeHandle* squares = TF_ShapeInferenceContextVectorFromSize(context, num_parts);
  TF_ShapeInferenceContextSetOutput(context, static_cast<int>(num_parts), squares, status);
  TF_DeleteShapeHandle(squares);
}

void infer_nothing(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

template <bool gathers>
void* create(TF_OpKernelConstruction* construction) {
  return new Kernel(construction, gathers);
}
void compute(void* kernel, TF_OpKernelContext* context) { static_cast<Kernel*>(kernel)->compute(context); }
void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

template <bool gathers>
bool register_operation(const char* name, std::initializer_list<const char*> attributes) {
  const Status status;
  TF_OpDefinitionBuilder* definition = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(definition, "T: list({half, bfloat16, float, double, int32, int64}) >= 1");
  TF_OpDefinitionBuilderAddAttr(definition, "group: int");
  TF_OpDefinitionBuilderAddAttr(definition, "meaning: int");
  TF_OpDefinitionBuilderAddAttr(definition, "may_share: bool");
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(definition, attribute);
  TF_OpDefinitionBuilderAddInput(definition, "tensors: T");
  TF_OpDefinitionBuilderAddOutput(definition, "totals: T");
  TF_OpDefinitionBuilderAddOutput(definition, "squares: double");
  TF_OpDefinitionBuilderSetIsStateful(definition, true);  // not merged, pruned or folded
  TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, gathers ? infer_nothing : infer_shapes);
  TF_RegisterOpDefinition(definition, status.status);
  if (!status.is_ok()) return false;  // Python then does not find the operation
  TF_KernelBuilder* builder = TF_NewKernelBuilder(name, "CPU", create<gathers>, compute, destroy);
  TF_RegisterKernelBuilder(name, builder, status.status);
  return status.is_ok();
}

// When TensorFlow loads the library. `scale` has the bits of a double, as TensorFlow's attributes are floats; it
// applies to the first `num_scaled` tensors.
const bool is_registered =
    register_operation<false>("RingtrainAllReduce", {"num_scaled: int", "scale: int"}) &&
    register_operation<true>("RingtrainAllGather", {"ranks: list(int)", "dims: list(int)", "begins: list(int)"});

std::byte* map_memory(int descriptor, int64_t offset, int64_t length, bool is_writable) {
  int error;
  while ((error = posix_fallocate(descriptor, offset, length)) == EINTR) continue;
  if (error != 0) return nullptr;  // process or container limit
  const int access = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* memory = mmap(nullptr, length, access, MAP_SHARED | MAP_POPULATE, descriptor, offset);
  if (memory == MAP_FAILED) return nullptr;
  // Child processes take no part in sums. Read-only mappings remain: a variable may use one.
  if (is_writable) madvise(memory, length, MADV_DONTFORK);
  return static_cast<std::byte*>(memory);
}

}  // namespace
}  // namespace ringtrain

// MPI_Allreduce of the process's MPI. Handles are pointers (Open MPI) or integers (MPICH), with the same calling
// convention.
using AllReduce = int (*)(const void* sent, void* received, int count, void* type, void* operation, void* communicator);

// For MPI_Op_create, as MPI has no halves.
extern "C" __attribute__((visibility("default"))) void ringtrain_add_halves(void* in, void* sums, int* count, void*) {
  std::byte* to = static_cast<std::byte*>(sums);
  ringtrain::add_values(ringtrain::Type::kHalf, {static_cast<std::byte*>(in), to}, *count, 1, to);
}
extern "C" __attribute__((visibility("default"))) void ringtrain_add_bfloat16s(void* in, void* sums, int* count,
                                                                               void*) {
  std::byte* to = static_cast<std::byte*>(sums);
  ringtrain::add_values(ringtrain::Type::kBfloat16, {static_cast<std::byte*>(in), to}, *count, 1, to);
}

// Join a node's ranks, which all have `descriptor` open, and the ranks of equal local rank on other nodes, by MPI's
// handles; `types` and `operations` in the order of `Type`. Returns the operation's attribute `group`; -1 if memory
// cannot be mapped.
extern "C" __attribute__((visibility("default"))) int ringtrain_join(
    int descriptor, int rank, int size, const int* processes, int64_t spin_ns, int64_t stall_ns, int num_nodes,
    AllReduce all_reduce, void* communicator, void* in_place, void* const* types, void* const* operations) {
  using ringtrain::Group;
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return -1;
  const auto map = [own](int64_t offset, int64_t length, bool is_writable) {
    return ringtrain::map_memory(own, offset, length, is_writable);
  };
  const std::vector<void*> all_types(types, types + ringtrain::kNumTypes);
  const std::vector<void*> all_operations(operations, operations + ringtrain::kNumTypes);
  const auto add = [=](ringtrain::Type type, std::byte* values, int64_t count) {
    const int kind = static_cast<int>(type), number = static_cast<int>(count);
    // mpi4py makes MPI return errors.
    return all_reduce(in_place, values, number, all_types[kind], all_operations[kind], communicator) == 0;
  };
  auto transport = ringtrain::Transport::open(map, rank, std::vector<int>(processes, processes + size),
                                              {spin_ns, stall_ns}, {num_nodes, add});
  if (transport == nullptr) {
    close(own);
    return -1;
  }
  const std::lock_guard<std::mutex> lock(ringtrain::groups_mutex);
  ringtrain::groups.push_back(new Group{std::move(transport), {}, {}, false, {}});
  return static_cast<int>(ringtrain::groups.size()) - 1;
}

// Start or stop recording a group's sums. Returns the number recorded; copies up to `limit`.
extern "C" __attribute__((visibility("default"))) int64_t ringtrain_record(int number, bool is_recording,
                                                                           ringtrain::Event* events, int64_t limit) {
  ringtrain::Group& group = *ringtrain::find_group(number);
  const std::lock_guard<std::mutex> lock(group.mutex);
  group.is_recording = is_recording;
  const int64_t count = group.events.size();
  std::copy_n(group.events.begin(), std::min(count, limit), events);
  if (is_recording) group.events.clear();
  return count;
}
