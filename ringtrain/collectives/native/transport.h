// Sums over a node's ranks in shared memory, without TensorFlow, MPI or own threads.  A call's tensors form one stream
// of bytes, cut into chunks that fit into a core's cache. Of each chunk every rank copies what the others add, and adds
// its own segment in rank order (reduce-scatter, all-gather). Each sum is made once, so that all ranks have the same
// bits. Short chunks are added by every rank: one wait instead of two.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ringtrain {

enum class Type : uint8_t { kHalf, kBfloat16, kFloat, kDouble, kInt32, kInt64 };
constexpr int kNumTypes = 6;

// One tensor. `in` may equal `out`.
struct Part {
  Type type;
  int64_t count;  // values
  const std::byte* in;
  double scale = 1;  // of its sum
  std::byte* out = nullptr;
  int64_t offset = 0;  // in the stream, in bytes
  int64_t begin = 0;   // of a gather: offset in bytes of this rank's piece
  int64_t given = 0;   // of a gather: bytes of it

  int64_t bytes() const;
};

using Parts = std::vector<Part>;

// Message for the user; empty: no error.
using Error = std::string;

constexpr int64_t kLine = 64;  // bytes: cache line, and TensorFlow's alignment

// A rank's state. Only it writes here, except for `asleep`.
struct RankState {
  // Chunks in all calls so far. They wrap: only differences count.
  alignas(kLine) std::atomic<uint32_t> given, added, taken;
  // Of this call and the previous one, by parity, since a rank may be one call ahead: the sum, and its free results as
  // bits.
  std::atomic<uint64_t> meaning[2];
  std::atomic<uint32_t> free_results[2];
  alignas(kLine) std::atomic<uint32_t> asleep;  // number of ranks waiting for a counter
  std::atomic<uint32_t> blamed;                 // rank + 1 because of which this rank has left; 0: none
};

// Shared sums, which need no copy. Mapped twice: a stray write through `read` ends the process instead of changing
// other ranks' sums.
struct Result {
  std::byte* write;
  std::byte* read;
  std::atomic<int> uses{0};  // references by this process's tensors
};

// Map zeroed shared memory; nullptr on failure. Never unmapped, since tensors may use it.
using Map = std::function<std::byte*(int64_t offset, int64_t length, bool is_writable)>;

// Other nodes. Ranks of equal local rank add their segments.
struct Nodes {
  int count = 1;
  // Sum values over the nodes in place, to the same bits on each. Returns success.
  std::function<bool(Type type, std::byte* values, int64_t count)> all_reduce;
};

// In nanoseconds.
struct Patience {
  int64_t spin;       // before sleeping; 0 if ranks share a core
  int64_t stall = 0;  // before a warning; 0: never
};

class Transport {
 public:
  // `processes`: process ids of all ranks of a node, equally many on each. nullptr if the window cannot be mapped.
  static std::unique_ptr<Transport> open(Map map, int rank, const std::vector<int>& processes, Patience patience,
                                         Nodes nodes = {});
  ~Transport();

  // Set the parts' offsets. Returns if the call is short; gathers never are.
  bool lay_out(Parts& parts, bool gathers = false);

  // Match the other ranks. `meaning` identifies the sum, the same on all ranks. With `may_share`, sums that are not
  // short may be in shared memory, at `result()`; else each part needs `out` before `finish`.
  Error begin(uint64_t meaning, const Parts& parts, bool may_share);
  Result* result() const { return result_; }

  // `squares` [parts]: sums of squares of the sums.
  Error finish(Parts& parts, double* squares);

  // Report that this rank cannot finish its call.
  void fail();

 private:
  using Counter = std::atomic<uint32_t> RankState::*;
  struct Range {  // of the stream
    int64_t begin, end;
  };

  Transport(Map map, int rank, const std::vector<int>& processes, Patience patience, Nodes nodes);

  RankState& state(int rank) const;
  double* squares_of(int rank) const;
  std::byte* slot(int rank, uint32_t chunk) const;
  Range chunk_range(uint32_t number) const;
  Range segment(const Range& chunk, int rank) const;
  bool is_short() const;

  Error wait_for(Counter counter, uint32_t least);
  void sleep_until_moved(RankState& other, Counter counter, uint32_t seen);
  void publish(Counter counter, uint32_t value);
  int find_lost() const;
  Error stop(Error error, int blamed);

  Error give(const Parts& parts, uint32_t number);
  Error add(Parts& parts, uint32_t number, double* squares);
  Error take(Parts& parts, uint32_t number);
  Error put_all(const Parts& parts);
  void put_range(const Parts& parts, const Range& range, std::byte* sums) const;
  void add_range(Parts& parts, const Range& chunk, const Range& range, uint32_t number, double* squares);
  void add_over_nodes(Parts& parts, const Range& range, std::byte* sums, double* squares);
  void prepare_result(std::vector<std::unique_ptr<Result>>& results);

  const Map map_;
  std::byte* window_ = nullptr;
  const int rank_, size_;
  const Patience patience_;
  const std::vector<int> processes_;
  std::vector<int> pidfds_;
  const Nodes nodes_;
  const int64_t chunk_bytes_;
  std::unordered_map<uint64_t, std::vector<std::unique_ptr<Result>>> results_;  // by sum
  int64_t end_;                                                                 // of used memory
  uint32_t num_calls_ = 0;
  uint32_t first_ = 0, num_chunks_ = 0;  // of this call
  int64_t length_ = 0;                   // of its stream
  bool gathers_ = false;
  Result* result_ = nullptr;
  Error broken_;  // error of an earlier call; later calls fail
};

}  // namespace ringtrain
