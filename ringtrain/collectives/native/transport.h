// Sums over the ranks of a node through memory that they share: no TensorFlow, no MPI, no thread of its own.
//
// What a call adds is laid out as one stream of bytes, tensor after tensor, and cut into chunks that stay in a core's
// cache. Of each chunk every rank gives what the others add, and adds its own segment of it in the order of the ranks
// (a reduce-scatter and an all-gather, as in a ring, where every neighbour is as near). So each sum is made once, and
// all ranks have the same bits, whatever the timing. What is short every rank adds by itself: one wait, not two.

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

// One tensor of a call. `in` and `out` may be the same.
struct Part {
  Type type;
  int64_t count;  // values
  const std::byte* in;
  double scale = 1;  // by which its sum is multiplied
  std::byte* out = nullptr;
  int64_t offset = 0;  // in the stream, in bytes
  int64_t begin = 0;   // of a gather: where in the part lies what this rank gives, in bytes
  int64_t given = 0;   // of a gather: how many bytes these are

  int64_t bytes() const;
};

using Parts = std::vector<Part>;

// What went wrong, in words for the user; empty: nothing.
using Error = std::string;

constexpr int64_t kLine = 64;  // bytes: of a core's cache, and how TensorFlow aligns tensors

// What a rank says to the others. Only it writes here, but for `asleep`.
struct RankState {
  // Chunks given, added and taken, in all calls so far. They wrap: only differences count.
  alignas(kLine) std::atomic<uint32_t> given, added, taken;
  // Of this call and of the one before, by parity: what is added, and which results are free, as bits. (A rank may be
  // one call ahead of another, which then still reads the one before.)
  std::atomic<uint64_t> meaning[2];
  std::atomic<uint32_t> free_results[2];
  alignas(kLine) std::atomic<uint32_t> asleep;  // ranks that wait for one of the counters
  std::atomic<uint32_t> blamed;                 // whose fault it is (+ 1) that this rank has left; 0: it has not
};

// Memory where all ranks add a sum, and read it: nobody copies it. It is mapped twice, since what wrote to it by
// mistake would change the other ranks' sums: it ends the process instead.
struct Result {
  std::byte* write;
  std::byte* read;
  std::atomic<int> uses{0};  // tensors of this process that refer to it
};

// Maps [offset, offset + length) of the memory that all ranks share, zeros at first; nullptr where that fails. It stays
// mapped as long as the process lives, as tensors may.
using Map = std::function<std::byte*(int64_t offset, int64_t length, bool is_writable)>;

// Other nodes, of each of which one rank takes part, with the same local rank: each carries its own segment of a chunk.
struct Nodes {
  int count = 1, mine = 0;
  // Send to a node while receiving from one; the lengths [bytes] may differ. Whether it was possible.
  std::function<bool(const void* sent, int64_t num_sent, int to, void* received, int64_t num_received, int from)>
      exchange;
};

// How long a rank waits for another, in nanoseconds.
struct Patience {
  int64_t spin;       // until it sleeps; 0 where ranks share a core
  int64_t stall = 0;  // until it says so, where nobody else does; 0: never
};

class Transport {
 public:
  // `processes` are the ranks' process numbers: all of a node, as many as on every other. nullptr where the window
  // cannot be mapped.
  static std::unique_ptr<Transport> open(Map map, int rank, const std::vector<int>& processes, Patience patience,
                                         Nodes nodes = {});
  ~Transport();

  // Look at what is to be added, or, of a gather, put together: of each part every rank has another piece. Whether it
  // is short, which a gather never is.
  bool lay_out(Parts& parts, bool gathers = false);

  // Meet the other ranks. `meaning` says what is added, the same on all ranks; `may_share`: the sums may lie in memory
  // of all, unless they are short, and then `result()` is where. Else each part needs an `out` before `finish`.
  Error begin(uint64_t meaning, const Parts& parts, bool may_share);
  Result* result() const { return result_; }

  // Add the parts. `squares` [parts] are the sums of squares of the sums.
  Error finish(Parts& parts, double* squares);

  // Let the other ranks know that this one will not finish what it has begun.
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
  void add_by_doubling(Parts& parts, const Range& range, std::byte* sums);
  void add_by_ring(Parts& parts, const Range& range, std::byte* sums);
  void add_received(Parts& parts, const Range& range, std::byte* sums);
  void exchange(const std::byte* sums, const Range& out, int to, const Range& in, int from);
  void prepare_result(std::vector<std::unique_ptr<Result>>& results);

  const Map map_;
  std::byte* window_ = nullptr;
  const int rank_, size_;
  const Patience patience_;
  const std::vector<int> processes_;
  std::vector<int> pidfds_;
  const Nodes nodes_;
  const int64_t chunk_bytes_;
  std::vector<std::byte> received_;                                             // from another node
  std::unordered_map<uint64_t, std::vector<std::unique_ptr<Result>>> results_;  // by what is added
  int64_t end_;                                                                 // of the memory that is in use
  uint32_t num_calls_ = 0;
  uint32_t first_ = 0, num_chunks_ = 0;  // of this call
  int64_t length_ = 0;                   // of its stream
  bool gathers_ = false;                 // whether nothing is added in it
  Result* result_ = nullptr;
  Error broken_;  // what ended an earlier call: none comes after it
};

}  // namespace ringtrain
