#include "transport.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>

#include "sums.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringtrain {
namespace {

constexpr int64_t kChunkBytes = 256 * 1024;
constexpr int64_t kChunkBytesOfNodes = 1024 * 1024;  // messages have a fixed cost
constexpr int kSlots = 4;                            // chunks in flight
constexpr int64_t kShortBytes = 64 * 1024;           // read from other ranks, if each rank adds everything
constexpr int64_t kMaxParts = 4096;                  // with shared squares
constexpr size_t kMaxResults = 3;                    // per sum: TensorFlow may hold the last two
constexpr int64_t kPageBytes = 64 * 1024;            // largest page size in use
constexpr char kApart[] = "the ranks are at different places of the program: they sum different things.";
constexpr char kLostNode[] = "a rank has ended that others wait for: one on another node, says MPI";
constexpr char kLostRank[] = "a rank has ended that others wait for: rank ";
constexpr long kLookNs = 50 * 1000 * 1000;  // between liveness checks

int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// Comparison of wrapping counters.
bool has_reached(uint32_t counter, uint32_t least) { return static_cast<int32_t>(counter - least) >= 0; }

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Call `visit(index, part, from, at, bytes)` for each piece of [begin, end) of the stream: `from` is its offset in the
// part, `at` in the stream.
template <typename AnyParts, typename Visit>
void for_each_piece(AnyParts& parts, int64_t begin, int64_t end, Visit visit) {
  auto after = std::upper_bound(parts.begin(), parts.end(), begin,
                                [](int64_t at, const Part& part) { return at < part.offset; });
  for (size_t index = after == parts.begin() ? 0 : after - parts.begin() - 1; index < parts.size(); ++index) {
    auto& part = parts[index];
    if (part.offset >= end) break;
    const int64_t at = std::max(begin, part.offset);
    const int64_t bytes = std::min(end, part.offset + part.bytes()) - at;
    if (bytes > 0) visit(index, part, at - part.offset, at, bytes);
  }
}

}  // namespace

int64_t Part::bytes() const { return count * size_of(type); }

// Window: for each rank a state, squares and slots, and one row of slots for sums.
std::unique_ptr<Transport> Transport::open(Map map, int rank, const std::vector<int>& processes, Patience patience,
                                           Nodes nodes) {
  std::unique_ptr<Transport> transport(new Transport(std::move(map), rank, processes, patience, std::move(nodes)));
  return transport->window_ == nullptr ? nullptr : std::move(transport);
}

Transport::Transport(Map map, int rank, const std::vector<int>& processes, Patience patience, Nodes nodes)
    : map_(std::move(map)),
      rank_(rank),
      size_(static_cast<int>(processes.size())),
      patience_(patience),
      processes_(processes),
      nodes_(std::move(nodes)),
      chunk_bytes_(nodes_.count == 1 ? kChunkBytes : kChunkBytesOfNodes) {
  const int64_t bytes = size_ * (sizeof(RankState) + kMaxParts * sizeof(double)) + (size_ + 1) * kSlots * chunk_bytes_;
  end_ = round_up(bytes, kPageBytes);
  window_ = map_(0, end_, true);
  for (int process : processes) {
#if defined(SYS_pidfd_open)
    pidfds_.push_back(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
#else
    pidfds_.push_back(-1);
#endif
  }
}

Transport::~Transport() {
  for (int pidfd : pidfds_) {
    if (pidfd >= 0) close(pidfd);
  }
}

RankState& Transport::state(int rank) const { return reinterpret_cast<RankState*>(window_)[rank]; }

double* Transport::squares_of(int rank) const {
  return reinterpret_cast<double*>(window_ + size_ * sizeof(RankState)) + rank * kMaxParts;
}

// A rank's contribution to a chunk; rank `size_` has the sums.
std::byte* Transport::slot(int rank, uint32_t chunk) const {
  std::byte* slots = window_ + size_ * (sizeof(RankState) + kMaxParts * sizeof(double));
  return slots + (rank * kSlots + chunk % kSlots) * chunk_bytes_;
}

Transport::Range Transport::chunk_range(uint32_t number) const {
  const int64_t begin = static_cast<int64_t>(number - first_) * chunk_bytes_;
  return {begin, std::min(begin + chunk_bytes_, length_)};
}

// A rank's share of the additions.
Transport::Range Transport::segment(const Range& chunk, int rank) const {
  const int64_t lines = (chunk.end - chunk.begin) / kLine;
  return {chunk.begin + lines * rank / size_ * kLine, chunk.begin + lines * (rank + 1) / size_ * kLine};
}

bool Transport::is_short() const {
  return !gathers_ && nodes_.count == 1 && length_ <= chunk_bytes_ && length_ * (size_ - 1) <= kShortBytes;
}

bool Transport::lay_out(Parts& parts, bool gathers) {
  gathers_ = gathers;
  length_ = 0;
  for (Part& part : parts) {
    part.offset = length_;
    length_ += round_up(part.bytes(), kLine);
  }
  return is_short();
}

Error Transport::begin(uint64_t meaning, const Parts& parts, bool may_share) {
  if (!broken_.empty()) return broken_;
  first_ += num_chunks_;
  num_chunks_ = static_cast<uint32_t>(std::max<int64_t>(1, (length_ + chunk_bytes_ - 1) / chunk_bytes_));
  result_ = nullptr;
  may_share = may_share && !is_short();

  static std::vector<std::unique_ptr<Result>> none;
  const bool is_known = may_share && results_.count(meaning) > 0;
  std::vector<std::unique_ptr<Result>>& results = may_share ? results_[meaning] : none;
  uint32_t are_free = 0;
  for (size_t number = 0; number < results.size(); ++number) {
    const Result& result = *results[number];
    if (result.read != nullptr && result.uses.load(std::memory_order_acquire) == 0) are_free |= 1u << number;
  }
  const int parity = num_calls_++ % 2;
  RankState& mine = state(rank_);
  mine.meaning[parity].store(meaning, std::memory_order_relaxed);
  mine.free_results[parity].store(are_free, std::memory_order_relaxed);
  if (Error error = give(parts, first_); !error.empty()) return error;
  if (Error error = wait_for(&RankState::given, first_ + 1); !error.empty()) return error;
  for (int rank = 0; rank < size_; ++rank) {
    if (state(rank).meaning[parity].load(std::memory_order_relaxed) != meaning) {
      return stop(kApart, rank);
    }
    are_free &= state(rank).free_results[parity].load(std::memory_order_relaxed);
  }
  if (nodes_.count > 1) {
    uint64_t total = meaning;
    if (!nodes_.all_reduce(Type::kInt64, reinterpret_cast<std::byte*>(&total), 1)) return stop(kLostNode, rank_);
    if (total != meaning * nodes_.count) return stop(kApart, rank_);
  }
  for (size_t number = 0; number < results.size(); ++number) {
    if (are_free >> number & 1) result_ = results[number].get();
  }
  // From a sum's second call on. All ranks do so in the same call, so that offsets agree.
  if (is_known && result_ == nullptr && results.size() < kMaxResults) prepare_result(results);
  return "";
}

void Transport::prepare_result(std::vector<std::unique_ptr<Result>>& results) {
  auto result = std::make_unique<Result>();
  result->write = map_(end_, round_up(length_, kPageBytes), true);
  result->read = result->write == nullptr ? nullptr : map_(end_, round_up(length_, kPageBytes), false);
  end_ += round_up(length_, kPageBytes);
  results.push_back(std::move(result));
}

// Overlap: while the others give a chunk, this rank adds the previous one.
Error Transport::finish(Parts& parts, double* squares) {
  if (!broken_.empty()) return broken_;
  std::fill(squares, squares + parts.size(), 0.0);
  if (gathers_ && result_ != nullptr) return put_all(parts);
  const int lag = is_short() ? 0 : 1;
  for (uint32_t step = 0; step < num_chunks_ + 2 * lag; ++step) {
    const uint32_t number = first_ + step;
    if (step > 0 && step < num_chunks_) {  // begin() gave the first
      if (Error error = give(parts, number); !error.empty()) return error;
    }
    if (step >= static_cast<uint32_t>(lag) && step - lag < num_chunks_) {
      if (Error error = add(parts, number - lag, squares); !error.empty()) return error;
    }
    if (lag == 1 && step >= 2) {
      if (Error error = take(parts, number - 2); !error.empty()) return error;
    }
  }
  if (is_short() || gathers_) return "";
  if (static_cast<int64_t>(parts.size()) > kMaxParts) {  // no space for shared squares
    for (size_t index = 0; index < parts.size(); ++index) {
      const Part& part = parts[index];
      const std::byte* sum = result_ == nullptr ? part.out : result_->read + part.offset;
      std::vector<std::byte> copy(part.bytes());
      squares[index] = add_values(part.type, {sum}, part.count, 1, copy.data());
    }
    return "";
  }
  for (size_t index = 0; index < parts.size(); ++index) {
    squares[index] = 0;
    for (int rank = 0; rank < size_; ++rank) squares[index] += squares_of(rank)[index];
  }
  return "";
}

// Copy for the others' segments of a chunk.
Error Transport::give(const Parts& parts, uint32_t number) {
  if (Error error = wait_for(&RankState::added, number - kSlots + 1); !error.empty()) return error;
  const Range chunk = chunk_range(number);
  Range own = segment(chunk, rank_);
  if (is_short()) own = {chunk.end, chunk.end};  // all ranks add all of it
  if (gathers_) own = chunk;                     // no rank adds
  std::byte* to = slot(rank_, number) - chunk.begin;
  const auto copy = [to](size_t, const Part& part, int64_t from, int64_t at, int64_t bytes) {
    std::memcpy(to + at, part.in + from, bytes);
  };
  for_each_piece(parts, chunk.begin, own.begin, copy);
  for_each_piece(parts, own.end, chunk.end, copy);
  publish(&RankState::given, number + 1);
  return "";
}

// Add this rank's segment of all ranks; short chunks entirely.
Error Transport::add(Parts& parts, uint32_t number, double* squares) {
  const Range chunk = chunk_range(number);
  if (Error error = wait_for(&RankState::given, number + 1); !error.empty()) return error;
  if (is_short()) {
    add_range(parts, chunk, chunk, number, squares);
    publish(&RankState::taken, number + 1);
    publish(&RankState::added, number + 1);
    return "";
  }
  if (result_ == nullptr) {
    if (Error error = wait_for(&RankState::taken, number - kSlots + 1); !error.empty()) return error;
  }
  const Range own = segment(chunk, rank_);
  if (gathers_) {
    put_range(parts, chunk, result_ == nullptr ? slot(size_, number) - chunk.begin : result_->write);
  } else {
    add_range(parts, chunk, own, number, squares);
  }
  if (nodes_.count > 1) {
    add_over_nodes(parts, own, result_ == nullptr ? slot(size_, number) - chunk.begin : result_->write, squares);
    if (!broken_.empty()) return broken_;
  }
  // All ranks are in this call, so that no rank still reads the previous squares.
  if (!gathers_ && number + 1 == first_ + num_chunks_ && static_cast<int64_t>(parts.size()) <= kMaxParts) {
    std::copy(squares, squares + parts.size(), squares_of(rank_));
  }
  publish(&RankState::added, number + 1);
  return "";
}

// Shared results need no copies: each rank writes all its pieces at once.
Error Transport::put_all(const Parts& parts) {
  const uint32_t end = first_ + num_chunks_;
  put_range(parts, {0, length_}, result_->write);
  publish(&RankState::given, end);
  publish(&RankState::added, end);
  publish(&RankState::taken, end);
  return wait_for(&RankState::added, end);
}

// Write this rank's pieces of a range to shared memory.
void Transport::put_range(const Parts& parts, const Range& range, std::byte* sums) const {
  for_each_piece(parts, range.begin, range.end, [&](size_t, const Part& part, int64_t from, int64_t, int64_t bytes) {
    const int64_t begin = std::max(from, part.begin), end = std::min(from + bytes, part.begin + part.given);
    if (begin < end) std::memcpy(sums + part.offset + begin, part.in + (begin - part.begin), end - begin);
  });
}

// Add a range in rank order: into shared memory, or, if short, into `out`.
void Transport::add_range(Parts& parts, const Range& chunk, const Range& range, uint32_t number, double* squares) {
  std::vector<const std::byte*> sources(size_);
  const bool is_own = is_short();
  std::byte* sums = result_ == nullptr ? slot(size_, number) - chunk.begin : result_->write;
  for_each_piece(parts, range.begin, range.end, [&](size_t index, Part& part, int64_t from, int64_t at, int64_t bytes) {
    for (int rank = 0; rank < size_; ++rank) {
      sources[rank] = rank == rank_ ? part.in + from : slot(rank, number) + (at - chunk.begin);
    }
    std::byte* out = is_own ? part.out + from : sums + at;
    const double scale = nodes_.count == 1 ? part.scale : 1;
    const double of_node = add_values(part.type, sources, bytes / size_of(part.type), scale, out);
    if (nodes_.count == 1) squares[index] += of_node;
  });
}

// Sum a range over all nodes: neighbors of one type together, with the padding between them.
void Transport::add_over_nodes(Parts& parts, const Range& range, std::byte* sums, double* squares) {
  Range run = {range.begin, range.begin};
  Type type = Type::kInt64;
  bool is_done = true;
  const auto reduce = [&] {
    const int64_t count = (run.end - run.begin) / size_of(type);
    is_done = is_done && (count == 0 || nodes_.all_reduce(type, sums + run.begin, count));
  };
  for_each_piece(parts, range.begin, range.end, [&](size_t, Part& part, int64_t, int64_t at, int64_t bytes) {
    if (part.type != type) {
      reduce();
      type = part.type;
      run.begin = at;
    }
    run.end = at + bytes;
  });
  reduce();
  if (!is_done) stop(kLostNode, rank_);
  for_each_piece(parts, range.begin, range.end, [&](size_t index, Part& part, int64_t, int64_t at, int64_t bytes) {
    squares[index] += add_values(part.type, {sums + at}, bytes / size_of(part.type), part.scale, sums + at);
  });
}

// Copy a chunk's sums.
Error Transport::take(Parts& parts, uint32_t number) {
  if (Error error = wait_for(&RankState::added, number + 1); !error.empty()) return error;
  if (result_ == nullptr) {
    const Range chunk = chunk_range(number);
    const std::byte* sums = slot(size_, number) - chunk.begin;
    for_each_piece(parts, chunk.begin, chunk.end, [sums](size_t, Part& part, int64_t from, int64_t at, int64_t bytes) {
      std::memcpy(part.out + from, sums + at, bytes);
    });
  }
  publish(&RankState::taken, number + 1);
  return "";
}

// Wait until the counters of all ranks reach a value.
Error Transport::wait_for(Counter counter, uint32_t least) {
  using Clock = std::chrono::steady_clock;
  for (int rank = 0; rank < size_; ++rank) {
    RankState& other = state(rank);
    uint32_t seen = (other.*counter).load(std::memory_order_acquire);
    if (has_reached(seen, least)) continue;
    const auto begin = Clock::now();
    const auto end_of_spin = begin + std::chrono::nanoseconds(patience_.spin);
    const auto stall = std::chrono::nanoseconds(patience_.stall);
    auto last_look = begin;
    bool has_warned = patience_.stall == 0;
    while (!has_reached(seen = (other.*counter).load(std::memory_order_acquire), least)) {
      const auto now = Clock::now();
      if (now < end_of_spin) {
        pause_core();
        continue;
      }
      if (now - last_look >= std::chrono::nanoseconds(kLookNs)) {
        const int lost = find_lost();
        last_look = now;
        if (lost >= 0 && (other.*counter).load(std::memory_order_acquire) == seen) {  // its earlier progress counts
          const bool has_failed = state(lost).blamed.load() == static_cast<uint32_t>(lost) + 1;
          return stop(kLostRank + std::to_string(lost) + (has_failed ? ", where a sum could not be finished" : ""),
                      lost);
        }
        if (!has_warned && now - begin >= stall) {
          has_warned = true;
          std::fprintf(
              stderr,
              "ringtrain: warning: local rank %d has waited %lld s in a sum for local rank %d, which lives and "
              "has not come to it. Do all ranks train the same number of steps?\n",
              rank_, static_cast<long long>(patience_.stall / 1'000'000'000), rank);
        }
      }
      sleep_until_moved(other, counter, seen);
    }
  }
  return "";
}

// Sleep until the counter changes, or until the next liveness check.
void Transport::sleep_until_moved(RankState& other, Counter counter, uint32_t seen) {
  const timespec look = {0, kLookNs};
  other.asleep.fetch_add(1);  // before the kernel's check of the counter
  syscall(SYS_futex, &(other.*counter), FUTEX_WAIT, seen, &look, nullptr, 0);
  other.asleep.fetch_sub(1);
}

void Transport::publish(Counter counter, uint32_t value) {
  RankState& mine = state(rank_);
  (mine.*counter).store(value);  // sequentially consistent: no rank falls asleep between store and load
  if (mine.asleep.load() > 0) syscall(SYS_futex, &(mine.*counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Return the rank blamed by another, or one that has exited; -1: none.
int Transport::find_lost() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (const uint32_t blamed = state(rank).blamed.load(); blamed != 0) return static_cast<int>(blamed) - 1;
  }
  for (int rank = 0; rank < size_; ++rank) {
    pollfd ended = {pidfds_[rank], POLLIN, 0};
    const bool is_gone =
        pidfds_[rank] >= 0 ? poll(&ended, 1, 0) == 1 : kill(processes_[rank], 0) != 0 && errno == ESRCH;
    if (is_gone) return rank;
  }
  return -1;
}

Error Transport::stop(Error error, int blamed) {
  broken_ = error;
  state(rank_).blamed.store(static_cast<uint32_t>(blamed) + 1);
  return error;
}

void Transport::fail() { stop("an earlier sum of this process was not finished.", rank_); }

}  // namespace ringtrain
